"""What is measured when heads are changed: the loss of each example.

Every intervention takes `batches`, whatever `loss_of` understands, and `loss_of(batch)`, which runs the model and
gives the loss of each example of the batch, [examples]. One number per example, not one for all: so differences can be
paired example by example, and the absolute value of Michel's importance taken where it belongs. (Ablation alone takes
any parts of a batch: the losses of the tokens of one long text, say.)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import ProblemError

LossOf = Callable[[Any], Tensor]
"""batch -> the loss of each of its examples, [examples]; nats where it is a cross-entropy."""

Tick = Callable[[], None]
"""Called each time that the model has run, to show progress; what it raises ends the work, and changes are undone."""


def next_token_loss(model: nn.Module) -> LossOf:
    """The `loss_of` of a causal language model: mean cross-entropy of each sequence's next tokens, nats.

    A batch is token ids, int [examples, tokens], or what a tokenizer gives: a mapping with `input_ids` and, where
    sequences are padded, `attention_mask`; padding is no target.

    Raises:
        ProblemError: when it is called, for a text with no token that has a next one.

    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=1, heads=2)
    >>> next_token_loss(model)(torch.randint(19, (5, 7))).shape
    torch.Size([5])
    """

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
    """A mean over no tokens would be NaN, and so would all that is made of it."""
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
    """The losses that `loss_of` gave, [examples]; a single number is that of a single example.

    Raises:
        ProblemError: it gave something else.
    """
    if not isinstance(losses, Tensor) or losses.ndim > 1 or not losses.is_floating_point():
        came = f"{losses.dtype} {list(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ProblemError(f"loss_of gave {came}: expected the loss of each example, floats [examples].")
    return losses.reshape(-1)


def losses(batches: Sequence[Any], loss_of: LossOf) -> Tensor:
    """The loss of every example of all batches, without gradients; float64 [examples], on the CPU."""
    with torch.no_grad():
        return torch.cat([of_examples(loss_of(batch)).double().cpu() for batch in batches])


def each_of(batches: Any) -> Iterable[Any]:
    """The batches, one by one. Raises `ProblemError` if it is one batch where a list of them was expected."""
    if isinstance(batches, Tensor | Mapping):
        raise ProblemError(f"batches is one batch, a {type(batches).__name__}: pass a list of batches, [batch].")
    return batches


def all_of(batches: Any) -> tuple[Any, ...]:
    """The batches, to be gone through more than once.

    Raises:
        ProblemError: there are none, or it is one batch where a list of them was expected.
    """
    kept = tuple(each_of(batches))
    if not kept:
        raise ProblemError("there are no batches: pass at least one.")
    return kept
