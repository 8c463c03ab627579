"""Survey the heads of a model over many texts on several machines: each process takes some of the texts.

    torchrun --nproc-per-node 2 examples/sweep.py docs/guide.md docs/caches.md README.md
    torchrun --nnodes 4 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint HOST:PORT examples/sweep.py texts/*.txt

A line of JSON for each text, in the order of the arguments: the text, its tokens, and the head with the greatest value
of each measure. A text that cannot be read, or a survey that fails, gives a line with the error; the others go on.
"""

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from regard.inspect import survey
from regard.integrate import load


def main() -> None:
    """Survey this process's texts; the first process prints those of all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("texts", nargs="+", type=Path, help="files of text")
    parser.add_argument("--tokens", type=int, default=256, help="the most tokens of a text (default: 256)")
    parser.add_argument("--measures", nargs="+", default=["sink", "entropy"], help="(default: sink entropy)")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 examples/sweep.py README.md")
    dist.init_process_group("gloo")
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model, tokenizer, _ = load()
        found = [line(path, model, tokenizer, args.tokens, args.measures) for path in args.texts[rank::ranks]]
        every: list[Any] = [None] * ranks
        dist.gather_object(found, every if rank == 0 else None)
        for i in range(len(args.texts) if rank == 0 else 0):
            print(json.dumps(every[i % ranks][i // ranks]))
    finally:
        dist.destroy_process_group()


def line(path: Path, model: Any, tokenizer: Any, tokens: int, measures: Sequence[str]) -> dict[str, Any]:
    """What one text gives."""
    try:
        text = path.read_text(encoding="utf-8")
        report = survey(
            model, tokenizer, text, measures=list(measures), tokens=tokens, new_tokens=0, compare_eager=False
        )
    except Exception as error:  # noqa: BLE001 - one text must not end a sweep of days
        return {"text": str(path), "error": f"{type(error).__name__}: {error}"}
    best: dict[str, Any] = {}
    for measure in measures:
        values = [(head.scores[measure].value, f"{head.layer}.{head.head}") for head in report.heads]
        value, name = max((each for each in values if each[0] is not None), default=(None, None))
        best[measure] = {"head": name, "value": value}
    return {"text": str(path), "tokens": report.prompt_tokens, **best}


if __name__ == "__main__":
    main()
