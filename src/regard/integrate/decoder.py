"""What a cache needs to know about the model that it is for."""

import functools
import importlib
import inspect
from typing import Any, NamedTuple
from weakref import ref

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import get_layer_types_and_kwargs

from regard.errors import ProblemError
from regard.integrate.cache_argument import ATTENTION_NAMES, NAMES, takes, usual_name
from regard.integrate.implementation import implementation_of, is_regard, names_in_forward
from regard.integrate.latent import latent_modules, why_expanded


class Decoder(NamedTuple):
    """The decoder whose keys and values a cache keeps.

    Attributes:
        name: of the model.
        config: of the decoder, with its sizes.
        source: the config with the decoder's attention implementation; `use_regard` changes that.
        is_latent: whether its attention expands latents (`expand_kv`).
        is_paired: whether the model has an encoder, whose keys and values its cache keeps as well.
        expanding: the modules that do, as long as the model lives; none where only its config is known.
    """

    name: str
    config: Any
    source: Any
    is_latent: bool
    is_paired: bool
    expanding: tuple[ref[Any], ...] = ()

    @property
    def is_read_by_regard(self) -> bool:
        """Whether regard computes its attention."""
        return is_regard(self.source)

    @property
    def why_expanded(self) -> str | None:
        """Why latents are expanded at every step; None: they are not."""
        if not self.is_read_by_regard:
            return f"its attention is {implementation_of(self.source)}: use_regard(model)"
        modules = (module() for module in self.expanding)
        return next((why for why in map(why_expanded, filter(None, modules)) if why is not None), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Decoder":
        """Itself: a copy of a cache is for the same model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The decoder, without the modules, which another process does not have."""
        return Decoder, (self.name, self.config, self.source, self.is_latent, self.is_paired)


def decoder_of(model: Any) -> Decoder:
    """The decoder of a model, or of a config.

    Raises:
        ProblemError: no model or config of transformers, or one that takes no cache of keys and values.
    """
    module = model if isinstance(model, nn.Module) else None
    config = getattr(model, "config", None) if module is not None else model
    if not isinstance(config, PreTrainedConfig):
        raise ProblemError(
            f"regard_cache(model) got {type(model).__name__}: expected a model of transformers (a PreTrainedModel) or "
            "its config. For a model of your own make a regard.cache.KVCache per layer."
        )
    text = config.get_text_config(decoder=True)
    source = config if config.is_encoder_decoder and type(text) is type(config) else text
    name = _name(config) if module is None else type(module).__name__
    _check_takes_caches(model, _class_that_takes_caches(module) if module is not None else _class_of(config), name)
    is_paired = config.is_encoder_decoder or source.is_encoder_decoder  # a decoder alone may not know of its encoder
    if module is None:
        is_latent = any(hasattr(kind, "expand_kv") for kind in classes_of(source))
        return Decoder(name, text, source, is_latent, is_paired)
    expanding = latent_modules(module)
    return Decoder(name, text, source, bool(expanding), is_paired, tuple(ref(x) for x in expanding))


CROSS = "cross_attention"
"""The kind of layers that attend to images alone, in a decoder whose one cache has all layers (Mllama)."""


def layers_of(config: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """(kinds, their sizes) of a decoder's layers: as transformers names them, or `CROSS`."""
    kinds: list[str]
    details: Any
    kinds, details = get_layer_types_and_kwargs(config)
    if isinstance(details, dict):  # up to transformers 5.18 the same for all layers
        details = [details] * len(kinds)
    own = getattr(config, "num_decoder_layers", None)  # T5's num_hidden_layers are those of its encoder
    crossing = getattr(config, "cross_attention_layers", None) or ()
    return [CROSS if i in crossing else kind for i, kind in enumerate(kinds[:own])], details[:own]


def config_of_layer(config: Any, layer: int) -> Any:
    """The config of one layer of a decoder; its own where layers have other sizes (Gemma 4), else that of all."""
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


@functools.cache
def _modules_in(file: str) -> tuple[type[nn.Module], ...]:
    try:
        found = vars(importlib.import_module(file)).values()
    except ImportError:
        return ()
    return tuple(x for x in found if inspect.isclass(x) and x.__module__ == file and issubclass(x, nn.Module))


def classes_of(config: Any) -> tuple[type[nn.Module], ...]:
    """The modules in the file of a model, by the model's config."""
    return _modules_in(type(config).__module__.replace(".configuration_", ".modeling_"))


def cache_writers(config: Any) -> tuple[type[nn.Module], ...]:
    """The attention classes in the file of a model that write keys and values into a cache."""
    return tuple(
        kind
        for kind in classes_of(config)
        if takes(kind.__init__, "layer_idx")
        and any(takes(kind.forward, name) for name in ATTENTION_NAMES)
        and "update" in names_in_forward(kind)[0]
    )


@functools.cache
def write_states(kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether one of these classes writes states into a cache; those of RecurrentGemma keep them as attributes."""
    names = {"update_conv_state", "update_recurrent_state"}
    methods = (inspect.unwrap(x) for kind in kinds for x in vars(kind).values() if callable(x))
    return any(inspect.isfunction(method) and names & {*method.__code__.co_names} for method in methods)


def _check_takes_caches(model: Any, kind: type[Any] | None, name: str) -> None:
    own = getattr(model, "_supports_default_dynamic_cache", None)  # there is no public way to ask
    if own is not None and not own():
        raise ProblemError(f"{name} has a cache of its own and takes no other: leave {usual_name()} out.")
    if kind is None or not takes(kind.forward, "input_ids"):  # a wrapper's forward names neither
        return
    if not any(takes(kind.forward, each) for each in NAMES):
        raise ProblemError(
            f"{name} takes no {usual_name()}: it keeps no keys and values, or in a way of its own. Leave "
            f"{usual_name()} out."
        )


def _class_that_takes_caches(module: nn.Module) -> type[nn.Module]:
    """The class whose forward names the cache: in a wrapper that passes keywords on, such as PEFT's, the model's."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if isinstance(module, PreTrainedModel) or not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return type(module)
    return next((type(part) for part in module.modules() if isinstance(part, PreTrainedModel)), type(module))


def _class_of(config: Any) -> type[Any] | None:
    """The model that transformers makes of a config; None where it knows none."""
    for mapping in (
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_MAPPING,
    ):
        known: Any = mapping
        if type(config) in known:
            return known[type(config)]
    return None


def _name(config: Any) -> str:
    return (config.architectures or [type(config).__name__.removesuffix("Config")])[0]
