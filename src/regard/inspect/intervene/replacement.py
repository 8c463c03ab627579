"""Replacements for the output of an ablated head: zero, its mean, or its output on other inputs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.heads import Site, edit_outputs
from regard.inspect.intervene.loss import each_of
from regard.inspect.measures.received import RUNS, check_function

Outputs = Mapping[Site, Tensor]
"""The outputs of the heads of each layer."""


class Replacement(ABC):
    """A replacement for the output of an ablated head."""

    @abstractmethod
    def outputs(self, site: Site, call: Call) -> Tensor:
        """The replacement for all heads of the call; broadcasts to its output, [batch, heads, queries, v_dim]."""


@dataclass(frozen=True)
class Zero(Replacement):
    """Zero, as if all values of the head were zero. Michel et al. 2019, arXiv:1905.10650, §2.3."""

    def outputs(self, site: Site, call: Call) -> Tensor:
        return call.out.new_zeros(())


@brief
@dataclass(frozen=True, eq=False)
class Mean(Replacement):
    """The mean output over a dataset; `mean_outputs` computes it.

    The mean keeps what all inputs have in common. Zero can hurt a model merely because the model never received it in
    training.

    Args:
        of: for each layer [heads, v_dim], the mean over all tokens; or [heads, positions, v_dim], per position.
    """

    of: Outputs

    def outputs(self, site: Site, call: Call) -> Tensor:
        mean = _recorded(self.of, site).to(call.out)
        if mean.ndim == 2:
            return mean[:, None]
        starts, queries = _starts(call), call.out.shape[2]
        if min(starts) < 0 or max(starts) + queries > mean.shape[1]:
            raise ProblemError(
                f"the call is at positions {min(starts)} to {max(starts) + queries - 1}, and there are means of "
                f"{mean.shape[1]} positions: compute means of texts that are as long, or per_position=False."
            )
        return torch.stack([mean[:, start : start + queries] for start in starts])


@brief
@dataclass(frozen=True, eq=False)
class Resample(Replacement):
    """The output on another input; `outputs_of` records it.

    Mean and zero may both be unlike any output of the head; a real output is not. For two inputs that differ in one
    thing, it removes the information of the head on that thing. The texts must have the same length.

    Args:
        of: for each layer [batch, heads, queries, v_dim]; a batch of 1 is used for every example.
    """

    of: Outputs

    def outputs(self, site: Site, call: Call) -> Tensor:
        other = _recorded(self.of, site)
        batch, heads, queries, v_dim = call.out.shape
        if other.shape[0] not in (1, batch) or tuple(other.shape[1:]) != (heads, queries, v_dim):
            raise ProblemError(
                f"the output on the other input is {list(other.shape)} in layer {site.layer}, and on this one "
                f"{list(call.out.shape)}: resampling needs inputs of the same size, or a batch of 1."
            )
        return other.to(call.out)


By = Literal["zero"] | Replacement
"""How heads are ablated: `"zero"`, or a `Mean` or `Resample`."""

ByBatch = By | Callable[[Any], By]
"""The same, or a function that returns it for each batch."""


def as_replacement(by: By) -> Replacement:
    """The replacement that `by` names. Raises `ProblemError` for other values."""
    if isinstance(by, Replacement):
        return by
    if by == "zero":
        return Zero()
    raise ProblemError(f"by is {by!r}: expected 'zero', mean_outputs(...) or Resample(outputs_of(...)).")


def check_replacement(by: ByBatch) -> ByBatch:
    """`by`, if it is one. Raises `ProblemError` for other values."""
    return by if callable(by) else as_replacement(by)


@torch.no_grad()
def mean_outputs(
    model: nn.Module | None,
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    *,
    per_position: bool = False,
    rows: Callable[[Any], Tensor] | None = None,
) -> Mean:
    """The mean output of every head over a dataset, to ablate by.

    Args:
        batches, run: `run(batch)` runs the model on each.
        per_position: whether each position has its own mean. Texts may differ in length: a position's mean is over the
            texts that reach it. With a cache, see `ablated`.
        rows: for a batch, [batch, queries], bool or numbers: queries with True or a nonzero number count. None: all,
            including padding.

    Raises:
        ProblemError: no batches, rows of another shape, or a layer or a position that counts in no text.

    >>> from regard.inspect.intervene import ablated, mean_outputs
    >>> from regard.nn import Decoder
    >>> model, texts = Decoder(19, 32, layers=2, heads=4), torch.randint(19, (3, 5, 7))
    >>> mean = mean_outputs(model, list(texts), model)  # three batches of five texts
    >>> [tuple(of.shape) for of in mean.of.values()]  # of each layer [heads, v_dim]
    [(4, 8), (4, 8)]
    >>> with ablated(model, [(1, 0)], mean):
    ...     logits = model(texts[0])
    """
    check_function(run, "run", "a function that runs the model on a batch, such as the model itself")
    if rows is not None:
        check_function(rows, "rows", "a function of a batch that returns which queries count, bool [batch, queries]")
    sums: dict[Site, Tensor] = {}
    counts: dict[Site, Tensor] = {}
    for batch in each_of(batches):
        counted = None if rows is None else rows(batch)

        def add(site: Site, call: Call, counted: Tensor | None = counted) -> None:
            starts = _starts(call) if per_position else (0,)
            sums[site], counts[site] = _add(sums.get(site), counts.get(site), call, counted, starts)

        with edit_outputs(model, add):
            run(batch)
    if not sums:
        raise ProblemError("no heads attended: pass at least one batch, and a run of attention that is regard's.")
    _check_counts(counts)
    if not per_position:
        return Mean({site: sums[site].sum(1) / counts[site].sum() for site in sums})
    for site, count in counts.items():
        if not count.all():
            raise ProblemError(
                f"position {int(count.argmin())} of layer {site.layer} counts in no text: no mean of it."
            )
    return Mean({site: sums[site] / counts[site][:, None] for site in sums})


@torch.no_grad()
def outputs_of(model: nn.Module | None, run: Callable[[], Any]) -> Outputs:
    """The output of every head while `run` runs, for each layer [batch, heads, queries, v_dim].

    Raises:
        ProblemError: a layer attended more than once, as in generation.

    >>> from regard.inspect.intervene import Resample, ablated, outputs_of
    >>> from regard.nn import Decoder
    >>> model, text, other = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4]]), torch.tensor([[2, 7, 1]])
    >>> of_other = outputs_of(model, lambda: model(other))
    >>> with torch.no_grad(), ablated(model, [(0, h) for h in range(4)], Resample(of_other)):
    ...     logits = model(other)
    >>> torch.equal(logits, model(other))  # its own outputs change nothing
    True
    """
    check_function(run, "run", RUNS)
    found: dict[Site, Tensor] = {}

    def keep(site: Site, call: Call) -> None:
        if site in found:
            raise ProblemError(f"layer {site.layer} attended more than once: record one forward pass, no generation.")
        found[site] = call.out.clone()

    with edit_outputs(model, keep):
        run()
    return found


def _starts(call: Call) -> tuple[int, ...]:
    """The position in the text of the first query of each batch row, or of all."""
    return tuple(call.dropped + start for start in call.starts or (call.offset,))


def _add(
    sums: Tensor | None, counts: Tensor | None, call: Call, rows: Tensor | None, starts: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """[heads, positions, v_dim] and [positions], float64, with the outputs of a call that begins at `starts` added."""
    batch, heads, queries, v_dim = call.out.shape
    if min(starts) < 0:
        raise ProblemError(f"a call has queries before the first key (position {min(starts)}): use per_position=False.")
    end = max(starts) + queries
    sums = call.out.new_zeros(heads, 0, v_dim, dtype=torch.float64) if sums is None else sums
    counts = call.out.new_zeros(0, dtype=torch.float64) if counts is None else counts
    if (longer := end - len(counts)) > 0:
        sums = torch.nn.functional.pad(sums, (0, 0, 0, longer))
        counts = torch.nn.functional.pad(counts, (0, longer))
    out = call.out.double()
    if rows is not None and (not isinstance(cast(object, rows), Tensor) or tuple(rows.shape) != (batch, queries)):
        raise ProblemError(f"rows returned {_shape(rows)}: expected bool [batch, queries] = {[batch, queries]}.")
    counted = torch.ones(batch, queries, dtype=torch.bool) if rows is None else rows.bool()  # of numbers, not a weight
    counted = counted.to(out.device)
    out = out.masked_fill(~counted[:, None, :, None], 0.0)
    for start, of, count in zip(starts, out.chunk(len(starts)), counted.chunk(len(starts)), strict=True):
        sums[:, start : start + queries] += of.sum(0)
        counts[start : start + queries] += count.sum(0)
    return sums, counts


def _shape(rows: object) -> str:
    return str(list(rows.shape)) if isinstance(rows, Tensor) else f"a {type(rows).__name__}"


def _check_counts(counts: Mapping[Site, Tensor]) -> None:
    """Raise `ProblemError` if no row of a layer counts in any batch: its mean would be NaN."""
    if without := [site for site, count in counts.items() if not count.any()]:
        names = [f"{site.layer}" if site.module is None else f"{site.layer} ({site.module})" for site in without]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise ProblemError(
            f"no rows of layer{'s' if len(names) > 1 else ''} {', '.join(names[:4])}{more} count, so there is no mean "
            "of them: expected at least one row in one batch, for which `rows` returns True."
        )


def _recorded(of: Outputs, site: Site) -> Tensor:
    if site not in of:
        raise ProblemError(
            f"nothing was recorded of layer {site.layer} ({site.module}): record the same model, "
            f"called in the same way. There are {sorted(s.layer for s in of)}."
        )
    return of[site]
