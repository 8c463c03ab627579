"""Value zeroing: how much a layer's outputs change when the value vector of one token is zero.

Mohebbi, Zuidema, Chrupala & Alishahi 2023, *Quantifying context mixing in transformers*, arXiv:2301.12971: in one
layer, the value vector of token j is set to zero in every head, weights do not change, and each row's output x'_i of
the whole layer (skip connection, norm and MLP included) is compared with the original x_i:

    C[i, j] = 1 - cos(x_i, x'_i)

A head's output without the value is z_i - A[i, j] v_j, so a token costs O(tokens) in the layer's attention, and a run
of the model up to the end of that layer.
"""

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.calls import Call
from regard.errors import ProblemError
from regard.inspect.brief import brief
from regard.inspect.intervene.heads import Site, edit_outputs, module_at, whole_layer
from regard.inspect.intervene.loss import Tick
from regard.inspect.intervene.training import check_no_dropout, without_dropout
from regard.inspect.measures.received import RUNS, check_function
from regard.inspect.names import Layer, read_layer
from regard.inspect.weights.index import counted_rows, listed
from regard.inspect.weights.lazy import Weights


@brief
@dataclass(frozen=True, eq=False)
class ValueZeroing:
    """The change of a layer's outputs when the values of chosen tokens are zero.

    Args:
        layer: the layer; module: the path of the module whose outputs were compared.
        tokens: the tokens whose values were zeroed, one at a time.
        distances: [batch, tokens zeroed, rows], cosine distance, 0 (nothing changed) to 2; float64.
    """

    layer: Layer
    module: str
    tokens: tuple[int, ...]
    distances: Tensor
    caveat: str = "This measures what one layer mixes into its outputs, not what later layers do with them."


class _DoneError(Exception):
    """Stops the model once the outputs are known; a model that catches it merely runs on.

    A subclass of `Exception`, as torch calls no hooks for others, and observers around this need to know what ended.
    """


@torch.no_grad()
def value_zeroing(
    model: nn.Module,
    run: Callable[[], Any],
    layer: Layer,
    tokens: Sequence[int],
    *,
    module: str | None = None,
    tick: Tick | None = None,
) -> ValueZeroing:
    """The effect of zeroing tokens' values in a layer, one token at a time: a run for each, and two more.

    Args:
        run: runs the model on a text; its KV cache, if any, must start empty, as transformers' own does.
        layer: its number, or the path of the module that attends; of a module that runs several times in a forward
            pass, as in ALBERT, the path is its first run.
        tokens: the tokens whose values are zeroed; -1 is the last.
        module: the path of the module whose output is compared; None: the whole layer, which is the attending module's
            path up to its first number (`model.layers.3` of `model.layers.3.self_attn`).
        tick: called after each run.

    Raises:
        ProblemError: a layer that never attended, a token that does not exist, dropout, or a module that returns no
            tensor, or not after the layer attended.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4, 1, 5]])
    >>> found = value_zeroing(model, lambda: model(ids), layer=1, tokens=[0, 2])
    >>> found.module, found.distances[0, 1] > 1e-9  # rows before token 2 do not see it
    ('body.blocks.1', tensor([False, False,  True,  True,  True]))
    """
    check_function(run, "run", RUNS)
    tokens = listed("token", tokens)
    if not tokens:
        raise ProblemError("tokens is empty: expected at least one token whose value to zero.")
    layer = read_layer(layer)
    site, attending, keys = _attending(model, run, layer)
    whole = whole_layer(attending) if module is None else module
    counted = counted_rows("token", tokens, keys)
    before = _output(model, run, whole, site, lambda call: None)
    if tick is not None:
        tick()
    distances: list[Tensor] = []
    for token in counted:
        after = _output(model, run, whole, site, _without(token))
        distances.append(1 - torch.nn.functional.cosine_similarity(before.double(), after.double(), dim=-1))
        if tick is not None:
            tick()
    return ValueZeroing(layer, whole, counted, torch.stack(distances, 1))


def _without(token: int) -> Callable[[Call], Tensor]:
    """A change of a call that removes the value of a token from its outputs."""

    def change(call: Call) -> Tensor:
        rows = torch.arange(call.out.shape[2], device=call.out.device)
        column = Weights.of(call).pairs(rows, torch.full_like(rows, token))  # [batch, heads, queries]
        value = call.v[:, :, token].repeat_interleave(call.out.shape[1] // call.v.shape[1], dim=1)
        column = column[..., None]
        part = torch.where(column == 0, 0.0, column * value[:, :, None])  # a hidden value may be NaN
        return (call.out - part).to(call.out.dtype)

    return change


def _attending(model: nn.Module, run: Callable[[], Any], layer: Layer) -> tuple[Site, str, int]:
    """The first site of a layer, the path of its module, and the number of its keys."""
    found: dict[Site, int] = {}

    def look(site: Site, call: Call) -> None:
        if site.is_named(layer):
            check_no_dropout(site, call)
            found[site] = call.k.shape[2]

    with edit_outputs(model, look, [(layer, 0)]), without_dropout(model):
        run()
    site, keys = next(iter(found.items()), (None, 0))
    if site is None or site.module is None:
        raise ProblemError(
            f"layer {layer!r} attends outside of the model's modules: it has no module output to compare."
        )
    return site, site.module, keys


def _output(
    model: nn.Module, run: Callable[[], Any], path: str, site: Site, change: Callable[[Call], Tensor | None]
) -> Tensor:
    """The output of a module that ends after a call of the site, whose output `change` replaces, [batch, rows, width].

    A module may run several times in a forward pass, once for each of several layers.
    """
    attended: set[int] = set()  # the threads of the calls: others may run the same model
    found: list[Tensor] = []

    def at(other: Site, call: Call) -> Tensor | None:
        if other != site:
            return None
        attended.add(threading.get_ident())
        return change(call)

    with edit_outputs(model, at), _stop_after(model, path, attended, found):
        run()
    if not found:
        raise ProblemError(
            f"module {path!r} did not run after layer {site.layer} attended, or returned no tensor "
            "[batch, tokens, width]: name another."
        )
    return found[0]


@contextmanager
def _stop_after(model: nn.Module, path: str, attended: set[int], found: list[Tensor]) -> Generator[None]:
    """Within the block, the model stops once the module at `path` returns its output after the layer has attended.

    Args:
        attended: the threads in which the layer has attended.
        found: gets the output.
    """

    def take(module: nn.Module, arguments: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else next(iter(output), None)
        if threading.get_ident() in attended and isinstance(first, Tensor) and first.ndim == 3:
            found.append(first)
            raise _DoneError

    hook = module_at(model, path).register_forward_hook(take)
    try:
        yield
    except _DoneError:
        pass
    finally:
        hook.remove()
