"""regard: the attention mechanism as a library.

Describe in one line which tokens may attend to which, and how; regard computes the attention exactly, reports its cost
before it runs, and shows afterwards what it did.

What most programs use is here, listed in `public.py`. The rest is grouped:

- `regard.rope`: scalings of rotary embeddings. `regard.scores`: other scores than the dot product, kernel regression.
- `regard.cache`: layouts, codecs and eviction policies of KV caches. `regard.nn`: modules.
- `regard.extend`: what masks, biases, backends and eviction policies of your own are made of.
- `regard.flex`: FlexAttention's functions. `regard.linear`: linear (kernel) attention.
- `regard.parallel`: sequences that are sharded over machines.
- `regard.inspect`: what heads do. `regard.integrate`: transformers.
- `regard.cost`: what a model or a call costs. `regard.evaluate`: whether a model and a cache hold at length.

Names are imported when the first of them is used (PEP 562), and torch with them: the command `regard` reads its
arguments before that.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from regard.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """A module of the package, or a public name."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        try:
            return import_module(f"regard.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"regard.{name}" and "." not in name:  # another package is missing
                raise
        public = import_module("regard.public")
        globals().update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
        if name not in globals():
            raise AttributeError(f"module 'regard' has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        packages = ("cache", "cost", "evaluate", "flex", "inspect", "integrate", "linear", "nn", "parallel")
        groups = ("extend", "rope", "scores")
        return sorted({"__version__", *packages, *groups, *__getattr__("__all__")})
