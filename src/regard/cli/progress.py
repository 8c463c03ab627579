"""Progress bars on stderr, one per stage, removed at the end. Without a terminal: a line per stage, or nothing."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

Progress = Callable[[str, int, int], None]
"""Called with (stage, steps done, steps in all)."""

STAGES = {
    "model": "loading the model",
    "prompt": "reading the prompt",
    "continuation": "generating",
    "comparison": "comparing with eager attention",
    "layers": "measuring the heads of each layer",
    "induction": "measuring induction",
    "other texts": "measuring on other texts",
    "examples": "evaluating",
    "ablation": "ablating one head after the other",
}


@contextmanager
def progress_bars(*, lines: bool = False) -> Generator[Progress]:
    """Yield a function that updates the bar of a stage.

    Args:
        lines: whether to print the name of each stage once where stderr is no terminal.
    """
    if not sys.stderr.isatty():
        yield _print_stages() if lines else lambda stage, done, total: None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bars
        from rich.progress import TimeElapsedColumn as Elapsed
        from rich.progress import TimeRemainingColumn as Remaining
    except ModuleNotFoundError:
        yield lambda stage, done, total: None
        return
    columns = (
        SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), BarColumn(bar_width=24),
        MofNCompleteColumn(), Elapsed(), TextColumn("left"), Remaining(),
    )  # fmt: skip
    tasks: dict[str, TaskID] = {}
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:

        def update(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(STAGES.get(stage, stage), total=total)
            bars.update(tasks[stage], completed=done, total=total)

        yield update


def _print_stages() -> Progress:
    stages: set[str] = set()

    def show(stage: str, done: int, total: int) -> None:
        if stage not in stages:
            stages.add(stage)
            print(f"regard: {STAGES.get(stage, stage)}", file=sys.stderr, flush=True)

    return show
