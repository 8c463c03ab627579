"""What a model costs at a context and a batch: memory, FLOPs, bytes, times; and the same with other attention."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from os import PathLike
from typing import Any, cast

from regard.cost.expected import expected_pass
from regard.cost.fit import MOST, crossing, largest_batch, largest_context, weight_bytes
from regard.cost.machine import Machine
from regard.cost.machines import machine_or_none
from regard.cost.model import Latent, Layer, Model
from regard.cost.pairs import Pattern
from regard.cost.parameter_count import Parameters, parameters
from regard.cost.published import load_model
from regard.cost.storage import (
    Storage,
    cache_bytes,
    check_count,
    item_bytes,
    state_bytes,
    storage_or_name,
    token_bytes,
    type_name,
)
from regard.cost.traffic import Traffic, attention_traffic
from regard.cost.training import TrainingMemory, training_memory
from regard.cost.work import Parts, forward, prompt_call, step_call, training_step
from regard.errors import ProblemError

WINDOW, SINKS = 4096, 4
"""The window of the what-if row: that of Mistral 7B, with the sinks of StreamingLLM (arXiv:2309.17453, table 2)."""


@dataclass(frozen=True)
class ModelCost:
    """What a model costs. Bytes are bytes, times are seconds: of the roofline, which no machine beats.

    Attributes:
        model, machine: the shapes and the limits; without a machine there are no times and no fits.
        context, batch: tokens of a batch row, and rows.
        dtype: type of weights and activations.
        storage: how the cache stores keys and values.
    """

    model: Model
    context: int
    batch: int = 1
    dtype: str = "bfloat16"
    storage: Storage = Storage()  # noqa: RUF009 - frozen
    machine: Machine | None = None

    def __post_init__(self) -> None:
        Model.check(self.model)
        for name in ("context", "batch"):
            check_count(self, name, 1)
        object.__setattr__(self, "dtype", type_name(self.dtype))
        object.__setattr__(self, "storage", storage_or_name(self.storage, self.dtype))
        object.__setattr__(self, "machine", machine_or_none(self.machine))
        if self.model.positions and self.context > (self.model.context or self.context):
            raise ProblemError(
                f"{self.model.name} has {self.model.context:,} learned positions, and a context of {self.context:,} "
                f"tokens has more: expected at most {self.model.context:,}."
            )

    @cached_property
    def parameters(self) -> Parameters:
        """Parameters by part."""
        return parameters(self.model)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return weight_bytes(self.model, self.dtype)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of the KV cache of all rows, with the states of layers without attention."""
        return cache_bytes(self.model, self.context, batch=self.batch, storage=self.storage, dtype=self.dtype)

    @property
    def state_bytes(self) -> int:
        """Bytes of `cache_bytes` that are states of layers without attention."""
        return state_bytes(self.model, batch=self.batch, dtype=self.dtype)

    @property
    def token_bytes(self) -> int:
        """Bytes that one more token takes, before a window is full."""
        return token_bytes(self.model, self.storage, self.dtype)

    @cached_property
    def prompt(self) -> Parts:
        """The work of reading the whole context as a prompt."""
        return forward(self.model, prompt_call(self.context, batch=self.batch, dtype=self.dtype, storage=self.storage))

    @cached_property
    def step(self) -> Parts | None:
        """The work of one decoding step at the end of the context; None for an encoder, which does not decode."""
        call = step_call(self.context, batch=self.batch, dtype=self.dtype, storage=self.storage)
        return forward(self.model, call) if self.model.is_causal else None

    def training(self, *, recompute: bool = False) -> Parts:
        """The work of a training step on the batch."""
        return training_step(self.model, self.context, batch=self.batch, dtype=self.dtype, recompute=recompute)

    @cached_property
    def training_memory(self) -> TrainingMemory:
        """The memory of a training step on the batch."""
        return training_memory(self.model, self.context, batch=self.batch, dtype=self.dtype)

    @cached_property
    def traffic(self) -> Traffic | None:
        """Bytes that the attention of all layers moves for the prompt, by algorithm; None without a machine."""
        if self.machine is None:
            return None
        fast = self.machine.fast_memory
        source, item = self.model.source_length(self.context), item_bytes(self.dtype)
        each = [
            attention_traffic(
                a,
                queries=queries,
                keys=source if a.is_cross else queries,
                batch=self.batch,
                item=item,
                fast_memory=fast,
            )
            for layers, queries in ((self.model.layers, self.context), (self.model.encoder, source))
            for layer in layers
            for a in layer.attentions
        ]
        return Traffic(*(sum(column) for column in zip(*each, strict=True))) if each else Traffic(0, 0, 0)

    def seconds(self, parts: Parts | None) -> float | None:
        """The roofline of a pass: its parts one after the other; None without a machine, or an encoder's step."""
        if self.machine is None or parts is None:
            return None
        return sum(self.machine.seconds(work.flops, work.moved, self.dtype) for work in parts.each.values())

    def expected_seconds(self, parts: Parts | None, *, is_step: bool = False) -> float | None:
        """The expected time of a forward pass on a machine whose shares were measured (`this`); None on others."""
        return (
            None
            if self.machine is None or parts is None
            else expected_pass(parts, self.machine, self.dtype, is_step=is_step)
        )

    @cached_property
    def crossing(self) -> int | None:
        """The shortest prompt whose attention outweighs its projections, in tokens; None: none."""
        return crossing(self.model, lambda parts: parts.projections.flops)

    @cached_property
    def crossing_all(self) -> int | None:
        """The shortest prompt whose attention outweighs projections and MLPs, in tokens; None: none."""
        return crossing(self.model, lambda parts: parts.projections.flops + parts.mlp.flops)

    @property
    def fits(self) -> bool | None:
        """Whether weights and cache fit the machine; None without a machine."""
        context = self.largest_context
        return None if self.machine is None else context is None or context >= self.context

    @cached_property
    def largest_context(self) -> int | None:
        """The longest context that fits the machine at this batch; see `regard.cost.fit.largest_context`."""
        if self.machine is None:
            return None
        memory, limit = self.machine.memory, self.model.context if self.model.positions else None
        found = largest_context(self.model, memory, batch=self.batch, storage=self.storage, dtype=self.dtype)
        return limit if found is None else found if limit is None else min(found, limit)

    @cached_property
    def largest_batch(self) -> int | None:
        """The largest batch that fits the machine at this context; see `regard.cost.fit.largest_batch`."""
        if self.machine is None:
            return None
        return largest_batch(
            self.model, self.machine.memory, context=self.context, storage=self.storage, dtype=self.dtype
        )

    def what_if(self) -> Iterator[tuple[str, "ModelCost"]]:
        """The same model with other attention or another cache, by name, this one first.

        Only changes that change something and that the model can have are listed. Shapes of projections change with
        their heads; a model would have to be trained, or converted, to have them.
        """
        yield "as it is", self
        if not self.model.is_causal:
            return
        for name, change in HEADS.items():
            changed = change(self.model)
            if changed is not None and changed.attention is not None and changed.attention.kind == name:
                yield name, replace(self, model=changed)
        for kind in ("int8", "int4"):
            if self.storage.kind != kind and self.storage.takes_codes and self.cache_bytes > self.state_bytes:
                yield f"{kind} cache", replace(self, storage=replace(self.storage, kind=kind))
        windowed = self.model_with_window(WINDOW, SINKS)
        if windowed != self.model and self.context > WINDOW + SINKS:
            yield f"window {WINDOW:,} + {SINKS} sinks", replace(self, model=windowed)

    def model_with_window(self, window: int, sinks: int) -> Model:
        """The model whose layers see a window and the first tokens; see `with_window`."""
        return with_window(self.model, window, sinks)

    def to_dict(self) -> dict[str, Any]:
        """Everything as numbers with their units in the names, for JSON."""
        return {
            "model": self.model.name,
            "source": self.model.source,
            "notes": list(self.model.notes),
            "machine": None if self.machine is None else self.machine.name,
            "machine_source": None if self.machine is None else self.machine.source,
            "machine_checked": None if self.machine is None else self.machine.checked,
            "context_tokens": self.context,
            "batch": self.batch,
            "dtype": self.dtype,
            "cache": asdict(self.storage),
            "parameters": {**asdict(self.parameters), "total": self.parameters.total},
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "state_bytes": self.state_bytes,
            "cache_bytes_per_token": self.token_bytes,
            "prompt": self._pass(self.prompt) | {"expected_seconds": self.expected_seconds(self.prompt)},
            "step": None
            if self.step is None
            else self._pass(self.step) | {"expected_seconds": self.expected_seconds(self.step, is_step=True)},
            "training": self._pass(self.training()),
            "training_with_recomputation": self._pass(self.training(recompute=True)),
            "training_memory_bytes": asdict(self.training_memory),
            "attention_bytes_by_algorithm": None if self.traffic is None else self.traffic._asdict(),
            "attention_outweighs_projections_from_tokens": self.crossing,
            "attention_outweighs_projections_and_mlp_from_tokens": self.crossing_all,
            "fits": self.fits,
            "largest_context_tokens": self.largest_context,
            "largest_batch": self.largest_batch,
        }

    def _pass(self, parts: Parts) -> dict[str, Any]:
        named = {**parts.each, "total": parts.total}
        works = {name: {"flops": round(work.flops), "bytes": round(work.moved)} for name, work in named.items()}
        return {**works, "roofline_seconds": self.seconds(parts)}


# ---- changes --------------------------------------------------------------------------------------------------------


def with_window(model: Model, window: int, sinks: int) -> Model:
    """The model whose layers of causal attention that store more tokens see the last `window` and the first `sinks`."""
    pattern = Pattern(window=window, sinks=sinks)

    def change(layer: Layer) -> Layer:
        a = layer.attention
        if a is None or not a.pattern.causal or a.pattern.stored(MOST) <= pattern.stored(MOST):
            return layer
        return replace(layer, attention=replace(a, pattern=pattern))

    return replace(model, layers=tuple(change(layer) for layer in model.layers))


def with_kv_heads(model: Model, kv_heads: int | None) -> Model | None:
    """The model with this number of key heads in every layer (None: as many as query heads); None if it has them."""
    if model.attention is None:
        return None
    heads = model.attention.heads
    count = heads if kv_heads is None else kv_heads
    if heads % count or any(a.latent for x in model.layers for a in x.attentions):
        return None
    changed = model.with_attention(kv_heads=count)
    return None if changed == model else changed


def with_latent(model: Model) -> Model | None:
    """The model with multi-head latent attention of DeepSeek-V2's proportions; None if it has latents or attends twice.

    kv_rank = 4 head_dim and rope_dim = head_dim / 2: DeepSeek-AI 2024, arXiv:2405.04434, §3.1.2.
    """
    a = model.attention
    if a is None or a.latent is not None or a.calls > 1 or a.qk_dim % 2:
        return None
    latent = Latent(4 * a.qk_dim, a.qk_dim // 2, a.qk_dim)
    return model.with_attention(latent=latent, kv_heads=a.heads, qk_dim=3 * a.qk_dim // 2, norm="", shares_cache=False)


HEADS: dict[str, Callable[[Model], Model | None]] = {
    "MHA": lambda model: with_kv_heads(model, None),
    "GQA-8": lambda model: with_kv_heads(model, 8),
    "MQA": lambda model: with_kv_heads(model, 1),
    "MLA": with_latent,
}
"""Changes of heads by the name of the result; each gives None where it changes nothing or cannot be."""


def cost(
    model: Model | str | PathLike[str],
    *,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "bfloat16",
    storage: Storage | str | None = None,
    machine: Machine | str | None = None,
) -> ModelCost:
    """What a model costs.

    Args:
        model: its shapes, the name of a published model, or a folder with a config.json.
        context: tokens of a batch row; None: the longest that the model was made for.
        batch: rows.
        dtype: type of weights and activations, by the name of torch or a short one such as "bf16".
        storage: how the cache stores keys and values; a name such as "int8" or "bf16", as of `regard cost --cache`, or
            None, or "dense", for `dtype`.
        machine: its limits, or its name; None: no times.

    Raises:
        ProblemError: a name is not known, an argument is of another type, or a size is out of range.

    >>> c = cost("llama-2-70b", context=32768, machine="8xh100")
    >>> c.cache_bytes / 2**30, c.fits
    (10.0, True)
    """
    model = load_model(model) if isinstance(model, str | PathLike) else model
    if not isinstance(cast(object, model), Model):
        raise ProblemError(
            f"model is {model!r}: expected the name of a published model, a folder with a config.json, or a "
            "regard.cost.Model."
        )
    machine = machine_or_none(machine)
    dtype = type_name(dtype)
    storage = storage_or_name(storage, dtype)
    tokens = model.context if context is None else context
    if tokens is None:
        raise ProblemError(f"{model.name} has no longest context: give context, in tokens.")
    return ModelCost(model, tokens, batch, dtype, storage, machine)
