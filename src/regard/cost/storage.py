"""Bytes of a KV cache: what `KVCache.bytes` is for the same tokens, computed without one; with pages, whole pages.

| storage | bytes of a token, for each key head |
|---|---|
| plain | (qk_dim + v_dim) item |
| latent | (kv_rank + rope_dim) item, once for all heads |
| int8, fp8 | qk_dim + v_dim codes, 2 qk_dim / group + 2 of scales |
| int4 | half a byte for each code, 4 qk_dim / group + 4 v_dim / group of scales and zero points |

The first and the latest tokens of codes stay plain (`regard.storage.codec.Codec`). In a model that has layers of full
attention too, layers with a window or chunks keep the model's type (`regard.integrate.cache.RegardCache`), whether the
others store codes or floats of another type. With a page size, the last page of a row counts whole: at least
`KVCache.bytes`, which counts its tokens, and at most `KVCache.allocated_bytes`, which counts free pages too. Layers
with a window or chunks are in no pages, as `Rolling` is the layout of a window. A pass reads tokens, and no free places
of a page. `Paged` encodes whole pages, so scales of keys are shared by gcd(page, group) tokens. Of codes in a window it
is an estimate: in `Rolling` a few groups more, or fewer, stay plain. Keys and values of cross-attention are always
plain and in no pages, as in `regard.integrate.cache_paired.PairedCache`.
"""

import math
from dataclasses import dataclass, replace

from regard.cost.model import Attention, Model
from regard.cost.near_names import unknown_name
from regard.cost.storage_names import CODECS, DENSE, FLOATS, float_name
from regard.errors import ProblemError
from regard.integers import as_integer

ITEMS = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
"""Bytes of an element, by type."""

SCALE = 2
"""Bytes of a scale or of a zero point: bf16."""

TILE = 16
"""Tokens that are adjacent in codes of keys (`regard.storage.codec.TILE`): pages and groups are multiples."""

VALUE_CHUNK = 32
"""int4 codes of values come in chunks of 32 channels (`regard.storage.codec.CHUNK`)."""


@dataclass(frozen=True)
class Storage:
    """How a cache stores keys and values.

    Args:
        kind: a type of `ITEMS`, or a codec: int8, int4, fp8. A name of both means the codec. Short names such as
            bf16 are read as those of torch.
        group, residual, sinks: of the codec, as of `regard.cache.Int8`.
        page: tokens of a page, which counts whole, with a codec a multiple of 16; None: no pages.

    Raises:
        ProblemError: the kind is not known, or a number is out of range.
    """

    kind: str = "bfloat16"
    group: int = 32
    residual: int = 32
    sinks: int = 4
    page: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", float_name(str(self.kind)))
        if self.kind not in (*ITEMS, *CODECS):
            raise unknown_name("storage", str(self.kind), sorted({*ITEMS, *FLOATS, *CODECS}))
        for name, least in (("group", None), ("residual", 0), ("sinks", 0)):
            check_count(self, name, least)
        if self.page is not None:
            check_count(self, "page", 1)
        if self.group < TILE or self.group % TILE:
            raise ProblemError(f"group {self.group}: expected a multiple of {TILE} tokens, {TILE} or more.")
        if self.page is not None and self.is_coded and not self.takes_codes:
            raise ProblemError(
                f"pages of {self.page} tokens with {self.kind}: the codes of {TILE} tokens are interleaved, so a page "
                f"must be a multiple of {TILE} tokens: {self.page + -self.page % TILE} would do."
            )

    @property
    def is_coded(self) -> bool:
        """Whether keys and values are codes."""
        return self.kind in CODECS

    @property
    def takes_codes(self) -> bool:
        """Whether its pages, if it has any, can hold codes."""
        return self.page is None or self.page % TILE == 0

    @property
    def key_group(self) -> int:
        """Tokens that share the scales of keys: a group ends where a page ends."""
        return self.group if self.page is None else math.gcd(self.page, self.group)


def type_name(dtype: object) -> str:
    """The name of a type in `ITEMS`, from that name, a short one, or torch's own type.

    Raises:
        ProblemError: the name is not known.

    >>> type_name("bf16")
    'bfloat16'
    """
    name = float_name(str(dtype))
    if name not in ITEMS:
        raise unknown_name("dtype", str(dtype), sorted({*ITEMS, *FLOATS}))
    return name


def item_bytes(dtype: object) -> int:
    """Bytes of an element of a type, which `type_name` reads.

    Raises:
        ProblemError: the name is not known.

    >>> item_bytes("bf16")
    2
    """
    return ITEMS[type_name(dtype)]


def check_count(owner: object, name: str, least: int | None) -> None:
    """Replace the field of a frozen dataclass by the same number as a Python int.

    Raises:
        ProblemError: not an integer, or less than `least`.
    """
    object.__setattr__(owner, name, whole_count(getattr(owner, name), name, least))


def whole_count(value: object, name: str, least: int | None) -> int:
    """The number as a Python int.

    Raises:
        ProblemError: not an integer, or less than `least`.
    """
    count = as_integer(value)
    if count is None:
        raise ProblemError(f"{name} {value!r}: expected a whole number.")
    if least is not None and count < least:
        raise ProblemError(f"{name} {count}: expected {least} or more.")
    return count


def storage_or_name(storage: object, dtype: str) -> Storage:
    """The storage that is given as itself or by its name; of `dtype` for None and "dense".

    Raises:
        ProblemError: the name is not known, or it is of another type.

    >>> storage_or_name("int8", "bfloat16").kind, storage_or_name(None, "bfloat16").kind
    ('int8', 'bfloat16')
    """
    if storage is None or isinstance(storage, str):
        return Storage(dtype if storage in (None, DENSE) else storage)
    if not isinstance(storage, Storage):
        raise ProblemError(f"storage is {storage!r}: expected a name such as 'int8', a regard.cost.Storage, or None.")
    return storage


def stays_plain(model: Model, a: Attention | None) -> bool:
    """Whether a layer keeps the model's type: one with a window, or chunks, beside layers of full attention.

    As in `regard_cache`, whatever the codec or the float type of the cache: these layers store few tokens.
    """
    return a is not None and a.pattern.is_local and model.has_local_and_full


def stored_bytes(a: Attention, context: int, storage: Storage, item: int, *, is_plain: bool = False) -> int:
    """Bytes of the keys and values of one layer and one batch row, and of the free places of its last page.

    Args:
        context: tokens that the layer has seen; a window stores fewer.
        item: bytes of an element of the model's type.
        is_plain: whether the layer keeps the model's type; see `stays_plain`.
    """
    tokens, storage = bytes_of_tokens(a, context, storage, item, is_plain=is_plain), storage_of(a, storage)
    if not tokens or storage.page is None:
        return tokens
    return tokens + -context % storage.page * a.cached * (item if storage.is_coded else item_bytes(storage.kind))


def bytes_of_tokens(a: Attention, context: int, storage: Storage, item: int, *, is_plain: bool = False) -> int:
    """Bytes of the tokens of one layer and one batch row; the arguments are those of `stored_bytes`."""
    if a.shares_cache or not (a.pattern.causal or a.is_cross):
        return 0
    if a.is_cross:
        return context * a.cached * item
    tokens, storage = a.pattern.stored(context), storage_of(a, storage)
    if is_plain or not storage.is_coded:
        return tokens * a.cached * (item if is_plain else item_bytes(storage.kind))
    plain, coded = split_tokens(tokens, storage)
    dims = [(a.latent.cached, True)] if a.latent else [(a.qk_dim, True), (a.v_dim, False)]
    codes = sum(coded_bytes(coded, dim, storage, is_key=is_key) for dim, is_key in dims)
    return plain * a.cached * item + codes * (1 if a.latent else a.kv_heads)


def storage_of(a: Attention, storage: Storage) -> Storage:
    """How a layer is stored: one with a window or chunks, and cross-attention, in no pages."""
    is_whole = a.pattern.window is None and a.pattern.chunk is None and not a.is_cross
    return storage if is_whole or storage.page is None else replace(storage, page=None)


def split_tokens(tokens: int, storage: Storage) -> tuple[int, int]:
    """(tokens that stay plain, tokens that are codes): codes come in whole groups, or pages, between the plain ones."""
    unit = storage.page or storage.group
    first = min(tokens, -(-storage.sinks // unit) * unit)
    coded = max(0, tokens - first - storage.residual) // unit * unit
    return tokens - coded, coded


def coded_bytes(tokens: int, dim: int, storage: Storage, *, is_key: bool) -> int:
    """Bytes of codes, scales and zero points of one head.

    >>> coded_bytes(32, 128, Storage("int8"), is_key=True), coded_bytes(32, 128, Storage("int4"), is_key=False)
    (4352, 2560)
    """
    parts = 2 if storage.kind == "int4" else 1  # int4 has zero points
    halves = (dim + 1) // 2 if is_key else -(-dim // VALUE_CHUNK) * VALUE_CHUNK // 2
    codes = halves if storage.kind == "int4" else dim
    if is_key:
        return tokens * codes + tokens // storage.key_group * dim * SCALE * parts
    scales = -(-dim // min(storage.group, dim)) if storage.kind == "int4" else 1
    return tokens * (codes + scales * SCALE * parts)


def cache_bytes(
    model: Model, context: int, *, batch: int = 1, storage: Storage | str | None = None, dtype: str = "bfloat16"
) -> int:
    """Bytes of the KV cache of a model, with the states of its layers without attention.

    Raises:
        ProblemError: it is no `Model`, a name is not known, or a number is no whole one.

    >>> from regard.cost import find_model
    >>> cache_bytes(find_model("llama-2-70b"), 32768) / 2**30
    10.0
    """
    Model.check(model)
    context, batch = whole_count(context, "context", 0), whole_count(batch, "batch", 0)
    dtype = type_name(dtype)
    storage = storage_or_name(storage, dtype)
    item, source = item_bytes(dtype), model.source_length(context)
    each = (
        stored_bytes(a, source if a.is_cross else context, storage, item, is_plain=stays_plain(model, a))
        for layer in model.layers
        for a in layer.attentions
    )
    return batch * sum(each) + state_bytes(model, batch=batch, dtype=dtype)


def state_bytes(model: Model, *, batch: int = 1, dtype: str = "bfloat16") -> int:
    """Bytes of the states of layers without attention, whatever the context; see `regard.cost.recurrent`.

    >>> from regard.cost import find_model
    >>> state_bytes(find_model("llama-2-70b"))
    0
    """
    item, layers = item_bytes(dtype), (layer.recurrent for layer in model.layers if layer.recurrent)
    return batch * sum(layer.bytes(item) for layer in layers)


def token_bytes(model: Model, storage: Storage | None = None, dtype: str = "bfloat16") -> int:
    """Bytes that one more token takes in the caches of all layers before a window is full; of codes, on average.

    >>> from regard.cost import find_model
    >>> token_bytes(find_model("deepseek-v3")), token_bytes(find_model("gpt3"))
    (70272, 4718592)
    """
    item, storage = item_bytes(dtype), storage or Storage(type_name(dtype))
    growing = [a for x in model.layers for a in x.attentions if a.pattern.causal and not a.shares_cache]
    return sum(a.cached * item if stays_plain(model, a) else _stored_token(a, storage) for a in growing)


def _stored_token(a: Attention, storage: Storage) -> int:
    storage = storage_of(a, storage)
    if not storage.is_coded:
        return a.cached * item_bytes(storage.kind)
    dims = [(a.latent.cached, True)] if a.latent else [(a.qk_dim, True), (a.v_dim, False)]
    group = sum(coded_bytes(storage.group, dim, storage, is_key=is_key) for dim, is_key in dims)
    return group * (1 if a.latent else a.kv_heads) // storage.group
