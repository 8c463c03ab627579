"""What a cache must know of the model that it is for, found before anything is kept: whose attention reads the cache.

A model may hand its keys on as they come, compute with them first, or make them of latents; it may not write to a
cache of transformers at all. That is read off its classes here, once; `cache.py` chooses the layers by it.
"""

from typing import Any, NamedTuple
from weakref import ref

from torch import nn
from transformers import PreTrainedConfig

from regard.errors import ProblemError
from regard.integrate.latent import why_expanded
from regard.integrate.touches import attention_classes, touch
from regard.integrate.transformers import NAME


class Subject(NamedTuple):
    """What a cache is for.

    Attributes:
        name: of the model.
        config: of its decoder; sizes are read here.
        source: the config whose attention implementation is the decoder's; it changes with `use_regard`.
        touched: the first line that computes with what the cache gives, and its class; None: keys are handed on.
        is_latent: whether its attention expands latents (`expand_kv`).
        expanding: the modules that do, as long as the model lives; none where only its config is known.
    """

    name: str
    config: Any
    source: Any
    touched: str | None
    is_latent: bool
    expanding: tuple[ref[Any], ...] = ()

    @property
    def why_expanded(self) -> str | None:
        """Why latents are expanded at every step; None: queries go to them as they are."""
        if not self.is_watched:
            return f"its attention is {self.source._attn_implementation}: use_regard(model)"
        found = (module() for module in self.expanding)
        return next((why for why in map(why_expanded, filter(None, found)) if why is not None), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Subject":
        """Itself: a copy of a cache is for the same model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Without the modules, which another process does not have."""
        return Subject, (self.name, self.config, self.source, self.touched, self.is_latent)

    @property
    def is_watched(self) -> bool:
        """Whether regard computes its attention."""
        return self.source._attn_implementation == NAME

    @property
    def takes_handles(self) -> bool:
        """Whether what reads the cache takes handles in place of tensors."""
        return self.touched is None and self.is_watched


def subject_of(model: Any) -> Subject:
    """What a model or a config is, as far as its cache goes."""
    config = model.config if isinstance(model, nn.Module) and hasattr(model, "config") else model
    if not isinstance(config, PreTrainedConfig):
        raise ProblemError(
            f"regard_cache(model) got {type(model).__name__}: expected a model of transformers (a PreTrainedModel) or "
            "its config. For a model of your own make a regard.cache.KVCache per layer."
        )
    takes_caches = getattr(model, "_supports_default_dynamic_cache", None)
    if takes_caches is not None and not takes_caches():
        raise ProblemError(
            f"{type(model).__name__} has a cache of its own and takes no other: leave past_key_values out."
        )
    decoder = config.get_text_config(decoder=True)
    source = config if config.is_encoder_decoder and type(decoder) is type(config) else decoder
    classes = attention_classes(model if isinstance(model, nn.Module) else source)
    name = type(model).__name__ if isinstance(model, nn.Module) else _name(config)
    if not classes:
        raise ProblemError(
            f"{name} never writes to a transformers Cache: it keeps no keys and values, or in a way of its own. Leave "
            "past_key_values out."
        )
    is_latent = all(hasattr(kind, "expand_kv") for kind in classes)
    touches = [(kind.__name__, touch(kind)) for kind in classes]
    touched = next((f"{line} ({cls})" for cls, line in touches if line is not None), None)
    modules = model.modules() if is_latent and isinstance(model, nn.Module) else ()
    expanding = tuple(ref(module) for module in modules if isinstance(module, tuple(classes)))
    return Subject(name, decoder, source, touched, is_latent, expanding)


def _name(config: Any) -> str:
    return (config.architectures or [type(config).__name__.removesuffix("Config")])[0]
