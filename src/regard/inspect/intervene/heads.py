"""The heads of a model and their names, and `edit_outputs`, which changes the outputs of attention calls by layer.

A head is named `(layer, head)`: `(3, 1)` is query head 1 of layer 3, counted from 0, with the layers of `observe`.
Where several modules share a number, as encoder, decoder and cross-attention of a translation model do, the path of the
module replaces the number: `("decoder.block.0.layer.1.EncDecAttention", 1)`.
"""

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.calls import Call, replace_outputs
from regard.errors import ProblemError
from regard.inspect.names import HeadName, Heads, Layer, read_heads
from regard.inspect.observing.layers import track_layers


class Site(NamedTuple):
    """The origin of a call: the number of its layer, and the path of the module that made it (None: no module).

    >>> site = Site(3, "model.layers.3.self_attn")
    >>> site.is_named(3), site.is_named("model.layers.3.self_attn"), site.is_named(2)
    (True, True, False)
    """

    layer: int
    module: str | None

    def is_named(self, layer: Layer) -> bool:
        """Whether `layer` is this site's number or path."""
        return layer in (self.layer, self.module)


class Sites:
    """The layers that attended, each with its number of heads; `named` heads are checked against them."""

    def __init__(self, named: Heads = ()) -> None:
        self.named = read_heads(named)
        self.heads: dict[Site, int] = {}

    def add(self, site: Site, heads: int) -> None:
        """Add the site of a call.

        Raises:
            ProblemError: the layer lacks a named head, or the number of a named head fits several modules.
        """
        for layer, head in self.named:
            if not site.is_named(layer):
                continue
            if not 0 <= head < heads:
                raise ProblemError(
                    f"head {(layer, head)} does not exist: layer {layer} has {heads} heads, 0 to {heads - 1}."
                )
            others = [other.module for other in self.heads if other != site and other.is_named(layer)]
            if isinstance(layer, int) and others:
                raise ProblemError(
                    f"head {(layer, head)} is ambiguous: number {layer} fits several modules, {others[0]!r} and "
                    f"{site.module!r}. Name the module: ({site.module!r}, {head})."
                )
        self.heads[site] = heads

    def of(self, site: Site) -> list[int]:
        """The named heads of a site, each once, in the order of their names."""
        return list(dict.fromkeys(head for layer, head in self.named if site.is_named(layer)))

    def names(self) -> tuple[HeadName, ...]:
        """Every head that attended, layer by layer; named by its module where several share the layer's number."""
        layers = [site.layer for site in self.heads]
        return tuple(
            (site.module if layers.count(site.layer) > 1 and site.module is not None else site.layer, head)
            for site, heads in self.heads.items()
            for head in range(heads)
        )

    def columns(self, name: HeadName) -> list[int]:
        """The indices of a head in `names()`, by number or by path; several if its module runs several times."""
        every = ((site, head) for site, heads in self.heads.items() for head in range(heads))
        return [place for place, (site, head) in enumerate(every) if site.is_named(name[0]) and head == name[1]]

    def check_all_seen(self) -> None:
        """Raise `ProblemError` if a head is named in a layer that did not attend."""
        for layer, head in self.named:
            if not any(site.is_named(layer) for site in self.heads):
                seen = sorted({site.layer for site in self.heads})
                raise ProblemError(
                    f"head {(layer, head)} does not exist: no layer {layer!r} attended, only layers "
                    f"{', '.join(map(str, seen))}. Layers count from 0, or are paths of modules, as in observe(model)."
                )


@contextmanager
def edit_outputs(
    model: nn.Module | None, change: Callable[[Site, Call], Tensor | None], named: Heads = ()
) -> Generator[Sites]:
    """Within the block, `change` may replace the output of each attention call; None leaves a call as it is.

    Args:
        model: its modules number the layers, as in `observe`; calls outside of them, as those of another model, are
            left as they are. None numbers all calls in their order, from 0 at the start of the block: run the function
            once per block.
        change: takes the site and the call, and returns the replacement of `call.out`, or None. It may compute the call
            again, as with another mask: calls that it makes are not passed to it.
        named: the heads that `change` is about; heads that do not exist are an error.

    Raises:
        ProblemError: a named head does not exist, or the model ran and none of its attention was regard's.

    >>> from regard.nn import Decoder
    >>> model, ids = Decoder(19, 32, layers=2, heads=4), torch.tensor([[3, 1, 4]])
    >>> with edit_outputs(model, lambda site, call: call.out / 2 if site.layer == 1 else None) as sites:
    ...     logits = model(ids)
    >>> list(sites.heads.values()), torch.equal(logits, model(ids))
    ([4, 4], False)
    """
    sites = Sites(named)

    def at(call: Call) -> Tensor:
        if (place := tracker.next()) is None:
            return call.out
        site = Site(*place)
        sites.add(site, call.out.shape[1])
        out = change(site, call)
        return call.out if out is None else out

    with track_layers(model) as tracker, replace_outputs(at):
        yield sites
    if model is not None and tracker.forwards and not sites.heads:
        raise ProblemError(
            f"{type(model).__name__} ran and none of its attention is regard's, so nothing could be changed. Call "
            "use_regard(model) of regard.integrate first. Calls outside of the forward of a module need model=None."
        )
    if sites.heads:
        sites.check_all_seen()


def heads_of(model: nn.Module | None, run: Callable[[], Any]) -> tuple[HeadName, ...]:
    """The names of all heads that attend while `run` runs, layer by layer.

    >>> from regard.nn import Decoder
    >>> model = Decoder(19, 32, layers=2, heads=2)
    >>> heads_of(model, lambda: model(torch.tensor([[3, 1, 4]])))
    ((0, 0), (0, 1), (1, 0), (1, 1))
    """
    with torch.no_grad(), edit_outputs(model, lambda site, call: None) as sites:
        run()
    if not sites.heads:
        raise ProblemError("run called no attention of regard's: there are no heads.")
    return sites.names()


def whole_layer(attending: str) -> str:
    """The path of the whole layer of an attending module: up to its first number, or all of it without a number.

    >>> whole_layer("model.layers.3.self_attn"), whole_layer("attention")
    ('model.layers.3', 'attention')
    """
    number = re.search(r"(^|\.)\d+(?=\.|$)", attending)
    return attending if number is None else attending[: number.end()]


def module_at(model: nn.Module, path: str) -> nn.Module:
    """The module at a path in the form of `Site.module`. Raises `ProblemError` if there is none."""
    for name, module in model.named_modules():
        if ".".join(part for part in name.split(".") if part != "_orig_mod") == path:
            return module
    raise ProblemError(f"{type(model).__name__} has no module {path!r}: paths are those of model.named_modules().")


def by_layer(heads: Iterable[HeadName]) -> Mapping[Layer, list[int]]:
    """The indices of the heads of each layer in a list of heads: {layer: indices}."""
    places: dict[Layer, list[int]] = {}
    for place, (layer, _) in enumerate(heads):
        places.setdefault(layer, []).append(place)
    return places
