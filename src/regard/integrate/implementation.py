"""The name under which transformers knows regard's attention, and which models use it."""

from typing import Any

NAME = "regard"
"""transformers looks for "flash" and "sdpa" inside names of attention implementations: not in this one."""


def implementation_of(config: Any) -> str:
    """The name of a model's attention implementation. Models themselves read this attribute of their config."""
    return config._attn_implementation


def is_regard(config: Any) -> bool:
    """Whether regard computes the attention of the model that has this config."""
    return implementation_of(config) == NAME
