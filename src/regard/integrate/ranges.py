"""Lists of layers as text."""

from collections.abc import Iterable


def ranges(indices: Iterable[int]) -> str:
    """Indices in order, with runs in short.

    >>> ranges([0, 1, 2, 3, 5])
    '0-3, 5'
    """
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
