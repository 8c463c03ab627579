"""Lowering: small named steps that say the same problem in words that more engines know.

A step takes a problem and what is known of it, and returns another problem that has the same answer. Its name and
what it did are kept in the plan, and `explain` shows them.
"""

from dataclasses import replace

import numpy as np

from regard.describe.mask_by_rule import Causal
from regard.plan.problem import Problem
from regard.plan.schedule import Schedule
from regard.plan.tiling import schedule


def simplify_mask(problem: Problem, tiles: Schedule) -> tuple[Problem, str | None]:
    """Say the mask in a simpler word if, in this call, it hides nothing or just what `Causal()` hides.

    A window that is longer than the sequence, lengths that are all full, one decoded token: the schedule tells.

    Returns:
        the problem, and what was done, None if nothing.
    """
    if problem.mask is None:
        return problem, None
    if tiles.pairs == problem.batch * problem.heads * problem.queries * problem.keys:
        return replace(problem, mask=None), f"simplify_mask: {problem.mask} hides nothing here"
    if problem.mask != _CAUSAL and tiles.maps == (1, 1) and _is_triangle(tiles):
        return replace(problem, mask=_CAUSAL), f"simplify_mask: {problem.mask} is Causal() here"
    return problem, None


_CAUSAL = Causal().outline()


def _is_triangle(tiles: Schedule) -> bool:
    """Whether the schedule lists just what `Causal()` keeps: first as many pairs, then the same ones."""
    seen = np.clip(np.arange(tiles.queries) + tiles.offset + 1, 0, tiles.keys)
    if int(seen.sum()) * tiles.batch * tiles.heads != tiles.pairs:
        return False
    sizes = {name: getattr(tiles, name) for name in ("batch", "heads", "queries", "keys", "offset", "tile")}
    return _same(tiles, schedule(Causal(), **sizes))


def _same(a: Schedule, b: Schedule) -> bool:
    names = ("run_start", "run_tile", "run_length", "patch_start", "patch_tile")
    if not all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names):
        return False
    return np.array_equal(a.patterns[a.patch_pattern], b.patterns[b.patch_pattern])
