"""Setting the attention implementation of a model of transformers, for good or within a block."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from regard.integrate.implementation import INTERFACE, implementation_of, names_in_forward


def set_implementation(model: Any, name: str) -> None:
    """Set the attention implementation of a model and of the models in it.

    transformers searches the file of a class for a call of its interface, and where it finds none it leaves the class
    as it is, with a warning in the log: that of a notebook, which has no file, or one that looks its function up in
    another way. Such a class is marked as one that can be set if its compiled code names the interface.
    """
    for part in model.modules():
        can_set = getattr(part, "_can_set_attn_implementation", None)
        if can_set is not None and not can_set() and _asks_interface(part):
            type(part)._can_set_attn_implementation_cached_value = True
    model.set_attn_implementation(name)


@contextmanager
def with_implementation(model: Any, name: str) -> Generator[None]:
    """Within the block, the model and the models in it have this attention implementation."""
    with keeping_implementation(model):
        set_implementation(model, name)
        yield


@contextmanager
def keeping_implementation(model: Any) -> Generator[None]:
    """After the block, the model and the models in it have the attention implementations that they had before."""
    before = _implementations(model.config)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _implementations(config: Any) -> dict[str, Any]:
    """The attention implementation of a config and of each config in it, as `set_attn_implementation` takes them."""
    inner = {name: getattr(config, name, None) for name in config.sub_configs}
    return {"": implementation_of(config)} | {
        name: _implementations(sub) for name, sub in inner.items() if sub is not None
    }


def _asks_interface(part: nn.Module) -> bool:
    kinds = {type(module) for module in _with_config(part, part.config)}
    return any(INTERFACE in names_in_forward(kind)[0] for kind in kinds)


def _with_config(module: nn.Module, config: Any) -> Iterator[nn.Module]:
    """The modules in a module, except for models with a config of their own."""
    yield module
    for child in module.children():
        if not hasattr(child, "set_attn_implementation") or child.config is config:
            yield from _with_config(child, config)
