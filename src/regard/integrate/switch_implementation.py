"""Setting the attention implementation of a model of transformers, for good or within a block."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from regard.integrate.implementation import (
    INTERFACE,
    attends_by_itself,
    implementation_of,
    names_in_forward,
    note_asking,
)


def set_implementation(model: Any, name: str) -> None:
    """Set the attention implementation of a model and of the models in it.

    transformers searches the file of a class for a call of its interface, and where it finds none it leaves the class
    as it is, with a warning in the log: that of a notebook, which has no file, or one that looks its function up in
    another way. Such a class is marked as one that can be set if its compiled code names the interface. A config whose
    model in transformers attends by itself is noted if the attention classes of this model, a user's, ask.
    """
    for part in model.modules():
        can_set = getattr(part, "_can_set_attn_implementation", None)
        if can_set is None:
            continue
        if not can_set() and _asks_interface(part):
            type(part)._can_set_attn_implementation_cached_value = True
        if attends_by_itself(type(part.config).__module__) and _asks_throughout(part):
            note_asking(part.config)
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
    before = [(config, implementation_of(config)) for config in _configs(model)]
    try:
        yield
    finally:
        for config, name in before:
            config._attn_implementation_internal = name  # the property would set inner configs too


def _configs(model: nn.Module) -> Iterable[Any]:
    """The configs of a model and of the models in it, with the configs in these; each once."""
    found = dict[int, Any]()
    waiting: list[Any] = [part.config for part in model.modules() if hasattr(part, "set_attn_implementation")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found:
            found[id(config)] = config
            inner = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [each for each in inner if each is not None]
    return found.values()


def _asks_interface(part: nn.Module) -> bool:
    return _any_asks(_with_config(part, part.config))


def _asks_throughout(part: nn.Module) -> bool:
    """Whether all of its attention asks the interface: each attention module, or one inside it."""
    attending = [x for x in _with_config(part, part.config) if "Attention" in type(x).__name__]
    return _asks_interface(part) and all(_any_asks(each.modules()) for each in attending)


def _any_asks(modules: Iterable[nn.Module]) -> bool:
    return any(INTERFACE in names_in_forward(kind)[0] for kind in {type(module) for module in modules})


def _with_config(module: nn.Module, config: Any) -> Iterator[nn.Module]:
    """The modules in a module, except for models with a config of their own."""
    yield module
    for child in module.children():
        if not hasattr(child, "set_attn_implementation") or child.config is config:
            yield from _with_config(child, config)
