"""The attention implementation "regard": its name, and the keywords that models pass to their attention function."""

import inspect
import sys
from types import CodeType
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import nn

from regard.errors import RefusalError
from regard.integrate.cache_argument import usual_name

NAME = "regard"
"""transformers looks for "flash" and "sdpa" inside names of attention implementations: not in this one."""

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The object in which models look their attention function up."""

WITHOUT_EFFECT = {
    "position_ids": "positions are in the queries and keys (RoPE) and in the mask already",
    "position_embeddings": "the same",
    "sliding_window": "the mask carries the window; stock eager and sdpa ignore it as well",
    "use_cache": "the keys have been through the cache",
    "past_key_values": "the same",
    "max_length_q": "the length of the longest packed sequence, for flash-attention's kernel",
    "max_length_k": "the same",
    "deterministic": "a switch of flash-attention's backward; ours is",
    "num_items_in_batch": "the trainer's, for the loss",
    "return_dict": "the form of the model's result",
    "output_hidden_states": "the same",
    "output_router_logits": "the same, of experts",
}
"""Keywords that models pass to their attention function and that change nothing in it, and why."""

UNSUPPORTED = {
    "indices": "keys chosen by an indexer (DeepSeek sparse attention)",
    "block_indices": "blocks of keys chosen by an indexer",
}
"""Keywords that change the result: refused, never ignored, by an attention function that has no such parameter."""

SINK_BESIDE_WEIGHTS = frozenset({"granite_swa", "granitemoe_swa"})
"""Models whose eager attention applies the sink to its output, and returns weights that sum to 1."""

UNMASKED_SEE_ALL = frozenset({"bridgetower_text_model"})
"""Models with attention that says `is_causal`, and whose eager attention without a mask sees all keys all the same.

The tokens of an image in BridgeTower attend to one another with a layer made for text; with torch's kernel they are
causal."""

if usual_name() == "cache":
    WITHOUT_EFFECT["cache"] = WITHOUT_EFFECT["use_cache"]
else:
    UNSUPPORTED["cache"] = "a paged cache, of continuous batching"


def implementation_of(config: Any) -> str:
    """The name of a model's attention implementation. Models themselves read this attribute of their config."""
    return config._attn_implementation


def is_regard(config: Any) -> bool:
    """Whether regard computes the attention of the model that has this config."""
    return implementation_of(config) == NAME


def check_keywords(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse keywords that a model's own eager attention applies and regard's does not; models pass on unknown ones.

    Raises:
        RefusalError: there is one.
    """
    for name, value in kwargs.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in UNSUPPORTED or name in _read_by_eager(type(module).__module__):
            raise not_supported(type(module), name)


def not_supported(module: type[nn.Module], name: str) -> RefusalError:
    """The error for a keyword of an attention class that regard does not apply."""
    what = UNSUPPORTED.get(name, "its own eager attention applies it")
    return RefusalError(
        f"{module.__name__} passes {name}= to its attention ({what}), which regard does not apply. Use "
        'model.set_attn_implementation("eager") for this model.'
    )


@torch.compiler.assume_constant_result  # dynamo would trace into `inspect`
def _read_by_eager(file: str) -> tuple[str, ...]:
    """The named parameters of `eager_attention_forward` in a model's file, which defines its attention."""
    eager = getattr(sys.modules.get(file), "eager_attention_forward", None)
    parameters = inspect.signature(eager).parameters.values() if eager is not None else ()
    return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


def names_in_forward(kind: type[nn.Module]) -> tuple[set[str], set[str]]:
    """(globals and attributes, keywords of calls) that a module's forward names, in its compiled code.

    No public attribute of a model says whether it calls its attention function, or with which keywords; a trial run
    would need inputs for every kind of model. For a name that is missed, the attention function refuses at the call.
    """
    names, keywords, codes = set[str](), set[str](), [getattr(inspect.unwrap(kind.forward), "__code__", None)]
    for code in codes:
        for constant in () if code is None else code.co_consts:
            if isinstance(constant, CodeType):  # a function inside it
                codes.append(constant)
            else:  # the keywords of a call are constants: a tuple of strings, or strings before `**kwargs`
                each = cast("tuple[Any, ...]", constant) if isinstance(constant, tuple) else (constant,)
                keywords |= {name for name in each if isinstance(name, str)}
        names |= set() if code is None else set(code.co_names)
    return names, keywords


@torch.compiler.assume_constant_result
def attends_by_itself(config_file: str) -> bool:
    """Whether the file of one of transformers' models has attention classes, and none from a file with the interface.

    False for the config of a user, whose files may be laid out in any way. For a model of a user with transformers'
    config see `is_known_to_ask`.

    Args:
        config_file: the module of the config's class, such as `transformers.models.mpt.configuration_mpt`.
    """
    folder, _, name = config_file.rpartition("configuration_")
    is_known = folder.startswith("transformers.models.")
    file = vars(sys.modules[found]) if is_known and (found := f"{folder}modeling_{name}") in sys.modules else {}
    if INTERFACE in file:  # of most models
        return False
    kinds = [x for x in file.values() if isinstance(x, type) and issubclass(x, nn.Module) and "Attention" in x.__name__]
    files = {sys.modules.get(base.__module__) for kind in kinds for base in kind.__mro__}  # of bases as well
    return bool(kinds) and not any(INTERFACE in vars(each) for each in files if each is not None)


_asking = WeakValueDictionary[int, Any]()  # configs by their id, for they have no hash


def note_asking(config: Any) -> None:
    """Note that the model of this config asks the interface, though transformers' own model of this kind does not."""
    _asking[id(config)] = config


@torch.compiler.assume_constant_result
def is_known_to_ask(identity: int) -> bool:
    """Whether the attention classes of a config's model, of a user's own, were found to ask the interface.

    Args:
        identity: the `id` of the config: torch 2.11 takes numbers and strings alone as arguments here.
    """
    return identity in _asking
