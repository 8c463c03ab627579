"""The loss of each example, and the effect of an intervention on it.

Every intervention takes `batches`, any values that `loss_of` takes, and `loss_of(batch)`, which runs the model and
returns the loss of each example of the batch, [examples]. One loss per example, not their mean: then differences are
paired example by example, and the absolute value of Michel's importance is taken per example. (Ablation alone takes
other parts of a batch as well, such as the losses of the tokens of one long text.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ProblemError
from regard.inspect.brief import brief, shown
from regard.inspect.measures.received import check_function
from regard.inspect.measures.score import is_level, student_quantile
from regard.inspect.names import HeadName
from regard.integers import is_integer

LossOf = Callable[[Any], Tensor]
"""batch -> the loss of each of its examples, [examples]; in nats for a cross-entropy."""

Tick = Callable[[], None]
"""Called after each run of the model, to show progress; an exception ends the work, and all changes are undone."""


def next_token_loss(model: nn.Module) -> LossOf:
    """The `loss_of` of a causal language model: mean cross-entropy of each sequence's next tokens, nats.

    A batch is token ids, int [examples, tokens], or the output of a tokenizer: a mapping with `input_ids` and, if
    sequences are padded, `attention_mask`; padding is no target.

    Raises:
        ProblemError: it is no model; when it is called, for a text of fewer than 2 tokens.

    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=1, heads=2)
    >>> next_token_loss(model)(torch.randint(19, (5, 7))).shape
    torch.Size([5])
    """
    check_function(model, "model", "a causal language model")

    def loss_of(batch: Tensor | Mapping[str, Tensor]) -> Tensor:
        ids = batch if isinstance(batch, Tensor) else _ids_of(batch)
        logits = logits_of(model(ids) if isinstance(batch, Tensor) else model(**batch))
        losses = F.cross_entropy(_wide(logits[:, :-1]).mT, ids[:, 1:], reduction="none")
        kept = None if isinstance(batch, Tensor) else batch.get("attention_mask")
        wanted = torch.ones_like(losses) if kept is None else (kept[:, 1:] * kept[:, :-1]).to(losses.dtype)
        _check_targets(wanted, ids)
        return losses.mean(1) if kept is None else (losses * wanted).sum(1) / wanted.sum(1)

    return loss_of


def _ids_of(batch: Any) -> Tensor:
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise ProblemError(
            f"a batch is a {type(batch).__name__}: expected token ids, an int tensor [examples, tokens], or a mapping "
            "with input_ids."
        )
    return cast(Mapping[str, Tensor], batch)["input_ids"]


def _check_targets(wanted: Tensor, ids: Tensor) -> None:
    """A mean over no tokens would be NaN, and so would everything computed from it."""
    if not bool((targets := wanted.sum(1)).all()):
        raise ProblemError(
            f"example {int(targets.argmin())} of token ids {list(ids.shape)} has no token that follows another: the "
            "loss of the next token needs texts of 2 tokens or more, padding not counted."
        )


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def logits_of(output: Any) -> Tensor:
    """The logits of what a model returned: a tensor, an output of transformers, or a tuple that begins with them."""
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def of_examples(losses: Any) -> Tensor:
    """The losses that `loss_of` returned, [examples]; a scalar is the loss of a single example.

    Raises:
        ProblemError: it returned something else.
    """
    if not isinstance(losses, Tensor) or losses.ndim > 1 or not losses.is_floating_point():
        received = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ProblemError(f"loss_of returned {received}: expected the loss of each example, floats [examples].")
    return losses.reshape(-1)


def check_loss_of(loss_of: object) -> None:
    """Raise `ProblemError` for what is no function of a batch, such as the losses of one."""
    expected = "a function that returns the loss of each example of a batch, such as next_token_loss(model)"
    check_function(loss_of, "loss_of", expected)


def losses(batches: Sequence[Any], loss_of: LossOf) -> Tensor:
    """The loss of every example of all batches, without gradients; float64 [examples], on the CPU."""
    check_loss_of(loss_of)
    with torch.no_grad():
        return torch.cat([of_examples(loss_of(batch)).double().cpu() for batch in batches])


def each_of(batches: Any) -> Iterable[Any]:
    """The batches, one by one. Raises `ProblemError` if it is one batch where a list of them was expected."""
    if isinstance(batches, Tensor | Mapping):
        raise ProblemError(f"batches is one batch, a {type(batches).__name__}: pass a list of batches, [batch].")
    if not isinstance(batches, Iterable):
        raise ProblemError(f"batches is {shown(batches)}: expected a list of batches.")
    return batches


def all_of(batches: Any) -> tuple[Any, ...]:
    """The batches as a tuple, to iterate over more than once.

    Raises:
        ProblemError: there are none, or it is one batch where a list of them was expected.
    """
    kept = tuple(each_of(batches))
    if not kept:
        raise ProblemError("there are no batches: pass at least one.")
    return kept


class Interval(NamedTuple):
    """A confidence interval of a mean; NaN from a single example."""

    low: float
    high: float


@brief
@dataclass(frozen=True, eq=False)
class Effect:
    """The losses with some heads changed, and those of the unchanged model.

    Args:
        heads: the heads that were changed.
        base, losses: the loss of each example without and with the change; float64 [examples].

    >>> Effect(((0, 1),), base=torch.tensor([1.0, 2.0]), losses=torch.tensor([1.5, 2.0])).change
    0.25
    """

    heads: tuple[HeadName, ...]
    base: Tensor
    losses: Tensor

    @property
    def change(self) -> float:
        """The mean change of the loss; positive if the heads were useful."""
        return (self.losses - self.base).mean().item()

    def interval(self, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
        """A bootstrap interval of the change: over examples, in pairs.

        >>> Effect((), torch.zeros(4), torch.tensor([1.0, 1, 1, 1])).interval()
        Interval(low=1.0, high=1.0)
        """
        return bootstrap(self.losses - self.base, level, draws, seed)


def bootstrap(values: Tensor, level: float = 0.95, draws: int = 1000, seed: int = 0) -> Interval:
    """The percentile interval of the mean of `values`, [examples], Efron & Tibshirani 1993, chapter 13, widened.

    The draws of few values vary too little, by sqrt((examples - 1) / examples), and their spread is an estimate as
    well: the interval is widened as Student's interval is against that of a normal distribution of known spread.
    Hesterberg 2015, arXiv:1411.5279, §3.2.

    Raises:
        ProblemError: a level that is not between 0 and 1, or no draws.
    """
    if not is_level(level) or not is_integer(draws, least=1):
        raise ProblemError(f"level is {level} and draws {draws}: expected a level between 0 and 1, and 1 draw or more.")
    if len(values) < 2:
        return Interval(float("nan"), float("nan"))
    random = torch.Generator().manual_seed(seed)
    means = values.double()[torch.randint(len(values), (draws, len(values)), generator=random)].mean(1)
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=torch.float64)
    middle, count = values.double().mean(), len(values)
    students_t = student_quantile((1 + level) / 2, count - 1)
    wider = students_t / NormalDist().inv_cdf((1 + level) / 2) * (count / (count - 1)) ** 0.5
    low, high = (middle + wider * (means.quantile(ends) - middle)).tolist()
    return Interval(low, high)
