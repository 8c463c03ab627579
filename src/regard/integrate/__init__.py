"""regard inside transformers: the attention and the KV cache of its models, and a model to try them on.

```python
from regard.integrate import load, regard_cache, use_regard

model, tokenizer, label = load()  # or a model of your own
use_regard(model)
model.generate(**inputs, cache=regard_cache(model, codec=Int8()))
```

`regard.inspect` and the commands import this package, `import regard` does not. transformers is imported when one of
these names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.integrate.cache import regard_cache
    from regard.integrate.cache_load import load_cache
    from regard.integrate.checkpoint import load
    from regard.integrate.continuous import continuous_batching
    from regard.integrate.transformers import use_regard

__all__ = ["continuous_batching", "load", "load_cache", "regard_cache", "use_regard"]

_HOMES = {
    "continuous_batching": "regard.integrate.continuous",
    "load": "regard.integrate.checkpoint",
    "load_cache": "regard.integrate.cache_load",
    "regard_cache": "regard.integrate.cache",
    "use_regard": "regard.integrate.transformers",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"{name} needs transformers, which is not installed: pip install 'regard[models]'.", name=error.name
        ) from None


def __dir__() -> list[str]:
    return sorted(__all__)
