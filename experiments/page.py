"""Runs the experiments one after the other, and makes docs/experiments.md of their records: `./experiments/all`."""

import json
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import DOCS, short

from regard.atomic_write import write_whole

HERE = Path(__file__).parent
ORDER = (
    "score_scale", "temperature", "permutation", "kernel_smoother", "performer", "online_softmax", "heads",
    "shared_heads", "length_generalisation", "induction_heads", "head_redundancy", "attention_weights",
    "rank_collapse", "sinks", "lost_in_the_middle", "quantised_cache", "score_functions", "worked_examples",
)  # fmt: skip
"""Of the page; scripts that are not in it follow by name."""

SHARED = {"page", "record", "tiny_model"}
"""Modules that are no experiments."""

INTRODUCTION = """\
# Experiments: the claims about attention, tried

Each claim is tried by one script that uses regard and its packages. A script prints what is expected and who says
so, what was measured, and a verdict that thresholds in the script decide: *holds*, *holds in part* (some of its checks
hold), *does not hold here*. "Here" is meant: small models, minutes on two CPU cores.

```sh
python experiments/score_scale.py --quick     # seconds; --seed N for other random numbers
./experiments/all                             # all of them, in turn; writes the figures, the records and this page
```

This page is made of the records in [docs/experiments](experiments), which hold the plotted numbers. All experiments
together took {minutes:.0f} minutes.
"""


def scripts() -> list[str]:
    """The names of the experiments, in the order of the page."""
    found = {path.stem for path in HERE.glob("*.py")} - SHARED
    return [name for name in ORDER if name in found] + sorted(found - set(ORDER))


def page(records: Sequence[dict[str, Any]]) -> str:
    """The page as Markdown."""
    introduction = INTRODUCTION.format(minutes=sum(r["seconds"] for r in records) / 60)
    lines = [introduction, "| claim | source | expected | measured | verdict | command |", "|---|---|---|---|---|---|"]
    for r in records:
        anchor = "".join(c for c in r["title"].lower().replace(" ", "-") if c.isalnum() or c == "-")
        command = f"`python experiments/{r['name']}.py`"
        cells = [f"[{r['title']}](#{anchor}): {r['claim']}", r["source"], r["expected"], r["measured"]]
        lines.append(f"| {' | '.join(map(_cell, cells))} | **{r['verdict']}** | {command} |")
    return "\n".join([*lines, "", *map(_section, records)])


def _section(r: dict[str, Any]) -> str:
    checks = [
        f"| {_cell(c['what'])} | {c['expected']} | {short(c['measured'])} | {'yes' if c['holds'] else '**no**'} |"
        for c in r["checks"]
    ]
    script = f"[experiments/{r['name']}.py](../experiments/{r['name']}.py)"
    record = f"[record](experiments/{r['name']}.json)"
    times = f"{r['seconds']:.0f} s ({r['cpu_seconds']:.0f} s of CPU)"
    return f"""\
## {r["title"]}

![{r["title"]}](experiments/{r["name"]}.svg)

| check | expected | measured | holds |
|---|---|---|---|
{chr(10).join(checks)}

{r["note"]}

{script}, {record}; seed {r["seed"]}, {times} on {r["machine"]}, {r["date"]}; {r["versions"]}.
"""


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def write(folder: Path) -> Path:
    """Write the page of the records in a folder, and return its path."""
    paths = [folder / "experiments" / f"{name}.json" for name in scripts()]
    records = [json.loads(path.read_text()) for path in paths if path.exists()]
    write_whole(folder / "experiments.md", page(records).encode())
    return folder / "experiments.md"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiments, and write the page unless they were quick."""
    parser = ArgumentParser(prog="./experiments/all", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", choices=[[], *scripts()], help="these experiments alone")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small versions; nothing is written")
    parser.add_argument("--write", type=Path, default=DOCS, metavar="FOLDER", help="instead of docs")
    options = parser.parse_args(arguments)
    times, failed, first = list[str](), list[str](), time.perf_counter()
    for name in options.names or scripts():
        command = [sys.executable, str(HERE / f"{name}.py"), "--seed", str(options.seed)]
        command += ["--quick"] if options.quick else ["--write", str(options.write)]
        started = time.perf_counter()
        code = subprocess.run(command, check=False).returncode
        times.append(f"{name:20} {time.perf_counter() - started:6.1f} s{'  FAILED' if code else ''}")
        failed += [name] if code else []
        print("\n" + "-" * 100 + "\n", flush=True)
    print("\n".join([*times, f"{'all':20} {time.perf_counter() - first:6.1f} s"]))
    if not options.quick:
        print(f"page: {write(options.write)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
