"""The name of the argument by which models of transformers take a KV cache, and of the output that has it.

It is `cache` since transformers 5.24 and `past_key_values` before; code outside of transformers may have either.

```python
model(ids, **as_argument(model, cache), use_cache=True)
```
"""

import functools
import inspect
from typing import Any

NAMES = ("cache", "past_key_values")
"""The newer name first."""

ATTENTION_NAMES = (*NAMES, "layer_past")
"""The names of the same argument of an attention module."""


def as_argument(model: Any, cache: Any) -> dict[str, Any]:
    """The cache as a keyword of a model, or of its `generate`.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=0, hidden_size=64, vocab_size=3))
    >>> list(as_argument(model, None)) == [usual_name()]
    True
    """
    name = next((name for name in NAMES if takes(model.forward, name)), None)
    return {name or usual_name(): cache}


def takes(function: Any, name: str) -> bool:
    """Whether a function has a parameter of this name."""
    return name in inspect.signature(function).parameters


@functools.cache
def usual_name() -> str:
    """The name in the installed transformers."""
    from transformers.masking_utils import create_causal_mask  # here: regard.inspect loads without transformers

    return next(name for name in NAMES if takes(create_causal_mask, name))


def cache_of(output: Any) -> Any:
    """The cache in a model's output; None where there is none."""
    return next((output[name] for name in NAMES if name in output), None)
