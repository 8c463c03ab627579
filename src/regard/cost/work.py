"""FLOPs and bytes of one pass of a model: of a prompt, of a decoding step, or of a training step.

Bytes are the least that must be moved: weights, keys and values, and the input and output of every matrix product, each
once. Masked pairs cost nothing; a mixture of experts reads the experts that some token takes.
"""

from dataclasses import dataclass, fields, replace

from regard.cost.model import Attention, Layer, Mlp, Model
from regard.cost.parameter_count import attention_weights, mlp_weights
from regard.cost.products import attention_flops, attention_gradient_flops, latent_flops
from regard.cost.recurrent import Recurrent
from regard.cost.storage import Storage, bytes_of_tokens, item_bytes, stays_plain


@dataclass(frozen=True)
class Work:
    """FLOPs, and bytes read and written."""

    flops: float = 0
    moved: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.moved + other.moved)

    def __mul__(self, count: float) -> "Work":
        return Work(count * self.flops, count * self.moved)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte."""
        return self.flops / self.moved if self.moved else 0.0


@dataclass(frozen=True)
class Parts:
    """The work of a pass by part.

    Attributes:
        projections: of attention and of layers with states.
        attention: its two products.
        recurrent: updates and outputs of states.
        mlp: MLPs, and the routers of experts.
        logits: the output over the vocabulary.
    """

    projections: Work = Work()
    attention: Work = Work()
    recurrent: Work = Work()
    mlp: Work = Work()
    logits: Work = Work()

    def __add__(self, other: "Parts") -> "Parts":
        return Parts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __mul__(self, count: float) -> "Parts":
        return Parts(*(getattr(self, f.name) * count for f in fields(self)))

    @property
    def each(self) -> dict[str, Work]:
        """The parts by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    @property
    def total(self) -> Work:
        """All parts together."""
        return self.projections + self.attention + self.recurrent + self.mlp + self.logits


@dataclass(frozen=True)
class Call:
    """What a pass computes: `queries` new tokens of each batch row, after `past` tokens.

    Attributes:
        storage: how the cache stores keys and values; None: plain.
        source: tokens of the encoder, for a model with one.
        runs_encoder: whether the encoder runs as well.
        outputs: tokens of each row whose logits are computed.
    """

    batch: int
    queries: int
    past: int = 0
    dtype: str = "bfloat16"
    storage: Storage | None = None
    source: int = 0
    runs_encoder: bool = False
    outputs: int = 1

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)


def prompt_call(context: int, *, batch: int = 1, dtype: str = "bfloat16", storage: Storage | None = None) -> Call:
    """Prefill: a whole prompt at once, and the logits of its last token; an encoder reads as many tokens."""
    return Call(batch, context, dtype=dtype, storage=storage, source=context, runs_encoder=True)


def step_call(context: int, *, batch: int = 1, dtype: str = "bfloat16", storage: Storage | None = None) -> Call:
    """Decoding: one new token at the end of a context."""
    return Call(batch, 1, past=context - 1, dtype=dtype, storage=storage, source=context)


def forward(model: Model, call: Call) -> Parts:
    """The work of a forward pass.

    >>> from regard.cost import find_model
    >>> forward(find_model("llama-2-7b"), prompt_call(4096)).attention.flops / 1e12
    4.399120252928
    """
    parts, source = Parts(), model.source_length(call.source)
    plain = replace(call, storage=None)
    for layer, count in model.counted_layers.items():
        own = plain if stays_plain(model, layer.attention) else call
        parts += _layer(layer, model.d_model, own, call.queries, source) * count
    if call.runs_encoder:
        for layer, count in model.counted_encoder.items():
            parts += _layer(layer, model.d_model, replace(call, past=0), source, source) * count
    if model.has_output:
        rows = call.batch * call.outputs
        parts += Parts(logits=_product(model.d_model * model.vocab, rows, model.d_model + model.vocab, call.item))
    return parts


def _layer(layer: Layer, d_model: int, call: Call, queries: int, source: int) -> Parts:
    parts, tokens = Parts(), call.batch * queries
    for a in layer.attentions:
        parts += _attend(a, d_model, call, queries, source if a.is_cross else queries + call.past)
    if layer.recurrent:
        parts += _recur(layer.recurrent, d_model, call, tokens)
    return parts + Parts(mlp=_feed(layer.mlp, d_model, tokens, call.item)) if layer.mlp else parts


def _recur(r: Recurrent, d_model: int, call: Call, tokens: int) -> Parts:
    """Its projections, and its states: read and written once for each batch row."""
    states = 2 * call.batch * r.bytes(call.item)
    return Parts(
        projections=_product(r.weights, tokens, 2 * d_model + r.width, call.item),
        recurrent=Work(tokens * r.flops, states + tokens * r.width * call.item),
    )


def _attend(a: Attention, d_model: int, call: Call, queries: int, keys: int) -> Parts:
    weights, tokens, b = attention_weights(a, d_model), call.batch * queries, call.batch
    pairs = a.pattern.pairs(queries=queries, keys=keys)
    projected = 0 if a.is_cross and not call.runs_encoder else b * (keys if a.is_cross else queries)
    width = a.heads * (a.qk_dim + a.v_dim)
    projections = _product(weights.queries + weights.out, tokens, 2 * d_model + width + _between(a), call.item)
    if projected:
        projections += _product(weights.keys, projected, d_model + a.cached, call.item)
    seen = a.pattern.keys_seen(queries=queries, keys=keys)
    read = _cached(a, keys, seen, call)
    if a.latent is None:
        flops = attention_flops(a.calls * b * a.heads * pairs, a.qk_dim, a.v_dim)
        rows = a.heads * (a.qk_dim + a.calls * a.v_dim)
    else:
        expanded, absorbed, up = _latent(a, queries, keys, pairs)
        is_absorbed = absorbed < expanded
        expansions = queries if is_absorbed else keys
        projections += _product(weights.expand, b * expansions, _expanded(a, is_absorbed=is_absorbed), call.item)
        flops = b * (min(expanded, absorbed) - up * expansions)
        rows = a.heads * (2 * a.latent.kv_rank + a.latent.rope_dim) if is_absorbed else width
        read = read if is_absorbed else seen * width * call.item  # the keys and values of all heads
    return Parts(projections, Work(flops, tokens * rows * call.item + b * read))


def _between(a: Attention) -> int:
    """Elements of one token between products of the queries: its gates, and its latent, written and read."""
    gates = {"": 0, "element": a.heads * a.v_dim, "head": a.heads}[a.gate]
    return gates + 2 * ((a.latent.q_rank or 0) if a.latent else 0)


def _expanded(a: Attention, *, is_absorbed: bool) -> int:
    """Elements that the products with the expansion read and write: of a query if absorbed, else of a key."""
    assert a.latent is not None
    rank, dims = a.latent.kv_rank, a.latent.nope_dim + a.v_dim
    return a.heads * (2 * rank + dims) if is_absorbed else rank + a.heads * dims


def _latent(a: Attention, queries: int, keys: int, pairs: int) -> tuple[int, int, int]:
    """(expanded, absorbed, FLOPs of expanding one token): the first two include the expansion."""
    assert a.latent is not None
    c = a.latent
    dims = (c.kv_rank, c.nope_dim, c.rope_dim, a.v_dim)
    up = 2 * c.kv_rank * a.heads * (c.nope_dim + a.v_dim)
    return *latent_flops(queries=queries, keys=keys, pairs=pairs, heads=a.heads, dims=dims), up


def _cached(a: Attention, keys: int, seen: int, call: Call) -> float:
    """Bytes of the keys and values that are seen, of one batch row, as the cache stores them."""
    a = replace(a, shares_cache=False)  # a layer without a cache of its own reads that of another, as it is stored
    plain = a.cached * call.item * seen
    if call.storage is None or not a.pattern.causal or a.is_cross:
        return plain
    stored = bytes_of_tokens(a, keys, call.storage, call.item)
    return stored * seen / max(1, a.pattern.stored(keys)) if stored else plain


def _feed(m: Mlp, d_model: int, tokens: int, item: int) -> Work:
    expert, always = mlp_weights(m, d_model)
    used = m.experts * (1 - (1 - m.active / m.experts) ** tokens)  # experts that some token takes, on average
    hidden = (m.matrices * m.width) * m.active + m.matrices * m.shared
    flops = 2 * tokens * (m.active * expert + always)
    return Work(flops, ((used * expert + always) + tokens * (2 * d_model + hidden)) * item)


def _product(weights: int, rows: int, width: int, item: int) -> Work:
    """A product of `rows` rows with weights: each row is read and written, `width` elements in all."""
    return Work(2 * rows * weights, (weights + rows * width) * item)


# ---- training -------------------------------------------------------------------------------------------------------


def training_step(
    model: Model, context: int, *, batch: int = 1, dtype: str = "bfloat16", recompute: bool = False
) -> Parts:
    """A training step: forward and backward, and with `recompute` the layers once more, for their activations.

    The backward pass of a matrix product takes two products of its size; that of attention takes five for two, as it
    computes the scores again.
    """
    call = Call(batch, context, dtype=dtype, source=context, runs_encoder=True, outputs=context)
    once = forward(model, call)
    source = model.source_length(context)
    gradient = sum(
        _gradient(a, batch, queries, source if a.is_cross else queries)
        for layers, queries in ((model.layers, context), (model.encoder, source))
        for layer in layers
        for a in layer.attentions
    )
    passes = 3 + recompute
    return Parts(
        projections=once.projections * passes,
        attention=Work(once.attention.flops * (1 + recompute) + gradient, once.attention.moved * (passes + 1)),
        recurrent=once.recurrent * passes,
        mlp=once.mlp * passes,
        logits=once.logits * 3,
    )


def _gradient(a: Attention, batch: int, queries: int, keys: int) -> int:
    pairs = a.calls * batch * a.heads * a.pattern.pairs(queries=queries, keys=keys)
    return attention_gradient_flops(pairs, a.qk_dim, a.v_dim)
