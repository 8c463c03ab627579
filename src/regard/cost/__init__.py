"""What attention costs: arithmetic over a problem and its schedule, or over the shapes of a whole model.

>>> from regard.cost import cost
>>> c = cost("llama-2-70b", context=32768, machine="8xh100")
>>> c.cache_bytes / 2**30, c.model.layers[0].attention.kind
(10.0, 'GQA-8')

`call_cost(explain(q, k, v))` is the cost of one call. Nothing is run, and for a model nothing of torch is imported.

```
call         call.py (`call_cost`), attention.py (FLOPs and bytes by the schedule), expected.py (the expected time)
model        model.py (its shapes), model_cost.py (`cost`), work.py (FLOPs and bytes of a pass), parameter_count.py,
             training.py (memory), fit.py (the longest context and the largest batch), traffic.py (slow memory)
formulas     pairs.py (kept pairs in closed form), products.py (FLOPs of attention), recurrent.py (states)
KV cache     storage.py, storage_names.py
shapes       published.py (models.toml), config.py (a config.json), fields.py (both, as one constructor)
config.json  config_fields.py, entries.py, layer_patterns.py, mixtures.py (its entries), families.py, family_rules.py
             (what an entry means in a family: families.toml, refused.toml)
machines     machine.py (limits, roofline), machines.py (machines.toml), this_machine.py (the one at hand)
files        tables.py (TOML), near_names.py (errors for unknown names)
```
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.cost.call import CallCost, call_cost
    from regard.cost.machine import Machine
    from regard.cost.machines import find_machine, machine_names
    from regard.cost.model import Attention, Latent, Layer, Mlp, Model
    from regard.cost.model_cost import ModelCost, cost
    from regard.cost.pairs import Pattern
    from regard.cost.parameter_count import parameters
    from regard.cost.published import find_model, load_model, model_names
    from regard.cost.storage import Storage, cache_bytes
    from regard.cost.training import training_memory

__all__ = [
    "Attention",
    "CallCost",
    "Latent",
    "Layer",
    "Machine",
    "Mlp",
    "Model",
    "ModelCost",
    "Pattern",
    "Storage",
    "cache_bytes",
    "call_cost",
    "cost",
    "find_machine",
    "find_model",
    "load_model",
    "machine_names",
    "model_names",
    "parameters",
    "training_memory",
]

MODULES = {
    "call": ("CallCost", "call_cost"),
    "machine": ("Machine",),
    "machines": ("find_machine", "machine_names"),
    "model": ("Attention", "Latent", "Layer", "Mlp", "Model"),
    "model_cost": ("ModelCost", "cost"),
    "pairs": ("Pattern",),
    "parameter_count": ("parameters",),
    "published": ("find_model", "load_model", "model_names"),
    "storage": ("Storage", "cache_bytes"),
    "training": ("training_memory",),
}
"""The public names of each module: imported when the first is used, as `import regard` needs none of them."""


def __getattr__(name: str) -> Any:
    module = next((module for module, names in MODULES.items() if name in names), None)
    if module is None:
        raise AttributeError(f"module 'regard.cost' has no attribute {name!r}")
    return getattr(import_module(f"regard.cost.{module}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
