"""`python -m bench [schedule] [engines] [--write]`: prints the tables; `--write` puts them into docs/bench.md."""

import argparse
from pathlib import Path

from bench import engines, schedule
from bench.measure import machine

PAGE = Path(__file__).parents[1] / "docs" / "bench.md"
BENCHES = {
    "schedule": ("Schedules", schedule.__doc__, schedule.run),
    "engines": ("Engines", engines.__doc__, engines.run),
}


def main() -> None:
    """Run the benches named, or all."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*BENCHES, []], help="which; all if none is named")
    parser.add_argument("--write", action="store_true", help=f"write the tables to {PAGE.name}")
    asked = parser.parse_args()
    if asked.write and asked.names:
        parser.error("--write writes the whole page: name no bench")
    sections = []
    for name in asked.names or BENCHES:
        title, about, run = BENCHES[name]
        sections.append(f"## {title}\n\n{about}\n\n`python -m bench {name}` on {machine()}:\n\n{run()}\n")
        print(sections[-1])  # noqa: T201
    if asked.write:
        head = (
            "# Benchmarks\n\nMedians of interleaved runs; anyone can repeat them with the command above each table.\n\n"
        )
        PAGE.write_text(head + "\n".join(sections))


if __name__ == "__main__":
    main()
