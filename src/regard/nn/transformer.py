"""Small whole models for experiments and examples: `Decoder`, `Encoder`, and both as a `Transformer`, of `Block`s.

Pre-norm transformers (Vaswani et al. 2017, arXiv:1706.03762, §3; Xiong et al. 2020, arXiv:2002.04745, for the place of
the norms) with RMSNorm and GELU. The masks, biases and positions are passed to `MultiHeadAttention`.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.cache.store import Policy
from regard.describe.bias import Bias
from regard.describe.mask import Mask
from regard.describe.mask_by_rule import Causal
from regard.describe.not_a_spec import received
from regard.describe.position import Absolute, Position
from regard.describe.suggestions import suggest_keywords
from regard.describe.whole_number import whole
from regard.errors import ProblemError
from regard.nn.caches import Caches, caches_for
from regard.nn.checks import check_flags, check_input
from regard.nn.latent import LatentAttention
from regard.nn.multi_head import MultiHeadAttention
from regard.nn.norm import RMSNorm
from regard.nn.rollback import RollbackOnFailure
from regard.nn.shared_tensors import Shared, SharesTensors
from regard.nn.spec_attributes import SpecAttributes
from regard.nn.spec_module import SpecModule, as_module, spec_of
from regard.nn.token_positions import token_positions
from regard.soft_dict import COLDEST
from regard.storage.codec import Codec
from regard.storage.stored import Layout
from regard.wide import wide_of

Attention = Callable[..., MultiHeadAttention | LatentAttention]  # (d_model, heads, **options)


class Block(nn.Module):
    """`x + attention(norm(x))`, then with a context `x + cross(norm(x), context)`, then `x + mlp(norm(x))`.

    Args:
        attention: self-attention.
        cross: attention to the context; None for none.
        hidden: width of the MLP; None: 4 d_model.
        skip: whether there are skip connections. Without them and without MLPs a stack of blocks is the pure attention
            network whose tokens become equal at a double exponential rate. Dong et al. 2021, arXiv:2103.03404, §2.
        mlp: whether there is an MLP.

    Raises:
        ProblemError: `attention` or `cross` is no module with a width `d_model`.

    Norms and MLP are made on the device and in the dtype of the attention's weights.

    >>> from regard import Causal
    >>> block = Block(MultiHeadAttention(64, heads=8, mask=Causal()))
    >>> block(torch.randn(1, 10, 64)).shape
    torch.Size([1, 10, 64])
    """

    @suggest_keywords
    def __init__(
        self, attention: MultiHeadAttention | LatentAttention, cross: MultiHeadAttention | None = None, *,
        hidden: int | None = None, skip: bool = True, mlp: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        check_flags(skip=skip, mlp=mlp)
        _check_attention("attention", attention)
        if cross is not None:
            _check_attention("cross", cross)
        d_model, place = attention.d_model, _place_of(getattr(attention, "o_proj", attention))
        self.skip, self.attention, self.cross = skip, attention, cross
        self.attention_norm = RMSNorm(d_model, **place)
        self.cross_norm = None if cross is None else RMSNorm(d_model, **place)
        self.mlp_norm = RMSNorm(d_model, **place) if mlp else None
        w = 4 * d_model if hidden is None else whole(hidden, "hidden", "dimensions", least=1)
        up, down = nn.Linear(d_model, w, bias=False, **place), nn.Linear(w, d_model, bias=False, **place)
        self.mlp = nn.Sequential(up, nn.GELU(), down) if mlp else None

    @suggest_keywords
    def forward(
        self, x: Float[Tensor, "batch tokens d_model"],
        context: Float[Tensor, "batch context_tokens context_dim"] | None = None, *, mask: Mask | None = None,
        context_mask: Mask | None = None, caches: Caches | None = None,
    ) -> Float[Tensor, "batch tokens d_model"]:  # fmt: skip
        """[batch, tokens, d_model]; a block with `cross` needs a context, and no other accepts one."""
        if (context is None) != (self.cross is None):
            has, do = ("no", "leave it out") if self.cross is None else ("a", "pass [batch, tokens, context_dim]")
            raise ProblemError(f"this block has {has} cross-attention, which uses the context: {do}.")
        own, cross = (None, None) if caches is None else caches
        first = own.tokens_seen if own is not None else 0
        x = self._step(x, self.attention(self.attention_norm(x), mask=mask, cache=own))
        if self.cross is not None and self.cross_norm is not None:
            x = self._step(x, self.cross(self.cross_norm(x), context, mask=context_mask, positions=first, cache=cross))
        return x if self.mlp is None or self.mlp_norm is None else self._step(x, self.mlp(self.mlp_norm(x)))

    def _step(self, x: Tensor, change: Tensor) -> Tensor:
        return x + change if self.skip else change


def _check_attention(name: str, module: object) -> None:
    """Raise `ProblemError` unless a block can call the module and read its width."""
    if not isinstance(module, nn.Module) or not hasattr(module, "d_model"):
        raise ProblemError(
            f"{name} is {received(module)}: expected a module with a width `d_model`, such as MultiHeadAttention."
        )


class Encoder(SharesTensors, SpecAttributes):
    """Embeddings, blocks and a norm: tokens to vectors; every token sees every other unless a mask hides it.

    Embeddings are drawn from N(0, 1 / d_model) and multiplied by sqrt(d_model) (Vaswani et al. §3.4). Weights of the
    blocks are drawn from N(0, 1 / inputs); the output projections are divided by sqrt(their number), as in
    GPT-2, so that the variance does not grow with the depth.

    Args:
        vocabulary, d_model: the size of the vocabulary, and the width.
        layers: blocks, 0 or more, each with `heads` query heads and `kv_heads` key heads (None: heads).
        position: `Rope` of a head's width, `Sinusoidal` or `Learned` of d_model, `Alibi`, `T5Bias` (one table for all
            layers), or None; no bias with `LatentAttention`. Tensors that require gradients are trained:
            `T5Bias(torch.zeros(32, heads, requires_grad=True))`.
        mask: which token may see which, in every call.
        context_dim: width of the context for cross-attention in every block; None for none.
        hidden, skip, mlp: as in `Block`.
        attention: creates a layer's attention, such as `partial(MultiHeadAttention, qk_norm=True)`; the arguments here
            override its own. The model is made on the device and in the dtype of its weights.

    `position` and `mask` may be a `SpecModule`.

    >>> from regard import KeyLengths
    >>> Encoder(19, 32, layers=2, heads=4)(torch.randint(19, (2, 7)), mask=KeyLengths(torch.tensor([7, 5]))).shape
    torch.Size([2, 7, 32])
    """

    position: SpecModule[Absolute] | None
    _spec_names = ("position",)

    @suggest_keywords
    def __init__(
        self, vocabulary: int, d_model: int, layers: int, heads: int, *, kv_heads: int | None = None,
        position: Position | Bias | SpecModule[Position] | SpecModule[Bias] | None = None,
        mask: Mask | SpecModule[Mask] | None = None, context_dim: int | None = None,
        hidden: int | None = None, skip: bool = True, mlp: bool = True, attention: Attention = MultiHeadAttention,
    ) -> None:  # fmt: skip
        super().__init__()
        vocabulary = whole(vocabulary, "vocabulary", "tokens", least=1)
        d_model = whole(d_model, "d_model", "dimensions", least=1)
        self.d_model, self.embedding = d_model, nn.Embedding(vocabulary, d_model)
        spec = position.spec if isinstance(position, SpecModule) else position
        if not (spec is None or isinstance(spec, Position | Bias)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ProblemError(f"position is {position!r}: expected a Position or a Bias; a mask goes to mask=.")
        layers = whole(layers, "layers", "blocks", least=0)
        context_dim = None if context_dim is None else whole(context_dim, "context_dim", "dimensions", least=1)
        is_absolute = isinstance(spec, Absolute)
        self.position = as_module(cast("Absolute | SpecModule[Absolute]", position)) if is_absolute else None
        rope = position if isinstance(spec, Position) and not is_absolute else None
        # Not one module in all layers: torch.func.functional_call would leave the weights of the call in it.
        bias = spec if isinstance(spec, Bias) else None
        is_latent = getattr(attention, "func", attention) is LatentAttention  # which has no bias or cross-attention
        if is_latent and bias is not None:
            raise ProblemError(
                f"position is a bias, {type(spec).__name__}, and LatentAttention has none: expected a position, "
                "such as Rope(rope_dim), or None."
            )
        options = {"kv_heads": kv_heads, "mask": mask, "position": rope, "bias": bias}
        options = {name: value for name, value in options.items() if value is not None}
        own: Callable[..., Any] = partial(attention, d_model, heads, **options)
        across = partial(MultiHeadAttention, d_model, heads, kv_heads=kv_heads) if is_latent else own
        cross = partial(across, context_dim=context_dim, mask=None, position=None, bias=None)
        made: Iterable[Any] = ((own(), cross() if context_dim is not None else None) for _ in range(layers))
        self.blocks = nn.ModuleList(Block(*pair, hidden=hidden, skip=skip, mlp=mlp) for pair in made)
        place = _place_of(cast(Block, self.blocks[0]).attention_norm) if layers else {}
        self.embedding.to(**place)
        self.norm = RMSNorm(d_model, **place)
        self._draw(layers * (1 + (context_dim is not None) + mlp) if skip else 1)

    def _check_spec(self, name: str, spec: object) -> None:
        if not isinstance(spec, Absolute | None):
            raise ProblemError(
                f"{name} is {received(spec)}: expected a position that is added to embeddings, or None; the others are "
                "those of each block's attention, blocks[i].attention.position or .bias."
            )

    def _shared_tensors(self) -> list[Shared]:
        """The tables of the biases of layers next to one another."""
        biases = [getattr(getattr(block, "attention", None), "bias", None) for block in self.blocks]
        return [Shared.of(*pair) for pair in itertools.pairwise(b for b in biases if isinstance(b, SpecModule))]

    def _draw(self, writes: int) -> None:
        nn.init.normal_(self.embedding.weight, std=self.d_model**-0.5)
        for name, linear in self.blocks.named_modules():
            if isinstance(linear, nn.Linear):
                share = writes if name.endswith((".o_proj", ".mlp.2")) else 1
                nn.init.normal_(linear.weight, std=(linear.in_features * share) ** -0.5)

    @suggest_keywords
    def forward(
        self, tokens: Int[Tensor, "batch tokens"],
        context: Float[Tensor, "batch context_tokens context_dim"] | None = None, *, mask: Mask | None = None,
        context_mask: Mask | None = None, caches: Sequence[Caches] | None = None,
    ) -> Float[Tensor, "batch tokens d_model"]:  # fmt: skip
        """[batch, tokens, d_model]; `mask` is combined with the model's by `&`; `tokens` follow those in the caches."""
        _check_tokens(tokens)
        if caches is not None:
            _check_caches(caches, len(self.blocks))
        x = self._embedded(tokens) * self.d_model**0.5
        if (position := spec_of("position", self.position)) is not None:
            shard = token_positions()
            first = caches[0].own.tokens_seen if caches else None
            x = position.add(x, first if shard is None else shard.positions)
        with RollbackOnFailure(*(cache for pair in caches or () for cache in pair)):
            for block, pair in zip(self.blocks, caches or [None] * len(self.blocks), strict=True):
                x = block(x, context, mask=mask, context_mask=context_mask, caches=pair)
        return self.norm(x)

    def _embedded(self, tokens: Tensor) -> Tensor:
        try:
            return self.embedding(tokens)
        except IndexError:  # on a CPU; a GPU has an error of its own
            low, high = (int(bound) for bound in tokens.aminmax())
            if 0 <= low <= high < self.embedding.num_embeddings:
                raise
            raise ProblemError(
                f"tokens are {low} to {high}: expected 0 to {self.embedding.num_embeddings - 1}, the vocabulary."
            ) from None


class Decoder(SharesTensors):
    """A causal language model: tokens to logits of the next token.

    The arguments are those of `Encoder`, and `tied`: whether logits are products with the embeddings; an untrained
    model then predicts the same token again. Otherwise the unembedding is drawn as in `nn.Linear`, uniformly, with a
    standard deviation of 1 / sqrt(3 d_model). `mask` is combined with `Causal()` by `&`: `mask=Window(64)`.

    >>> from regard import Alibi, Window
    >>> model = Decoder(19, 32, layers=2, heads=4, kv_heads=2, position=Alibi(4), mask=Window(5))
    >>> model(torch.randint(19, (2, 7))).shape
    torch.Size([2, 7, 19])
    >>> model.generate(torch.tensor([[3, 1, 4]]), 5).shape
    torch.Size([1, 5])
    """

    @suggest_keywords
    def __init__(
        self, vocabulary: int, d_model: int, layers: int, heads: int, *, kv_heads: int | None = None,
        position: Position | Bias | SpecModule[Position] | SpecModule[Bias] | None = None,
        mask: Mask | SpecModule[Mask] | None = None, context_dim: int | None = None,
        tied: bool = False, hidden: int | None = None, skip: bool = True, mlp: bool = True,
        attention: Attention = MultiHeadAttention,
    ) -> None:  # fmt: skip
        super().__init__()
        check_flags(tied=tied)
        own = mask.spec if isinstance(mask, SpecModule) else mask
        self.body = Encoder(
            vocabulary, d_model, layers, heads, kv_heads=kv_heads, position=position,
            mask=Causal() if own is None else Causal() & own, context_dim=context_dim, hidden=hidden, skip=skip,
            mlp=mlp, attention=attention,
        )  # fmt: skip
        self.unembedding = nn.Linear(d_model, vocabulary, bias=False, **_place_of(self.body.norm))
        if tied:
            self.unembedding.weight = self.body.embedding.weight

    def _shared_tensors(self) -> list[Shared]:
        """The weight of embeddings and unembeddings, if it is tied."""
        return [Shared.of(self.body.embedding, self.unembedding)]

    @suggest_keywords
    def forward(
        self, tokens: Int[Tensor, "batch tokens"],
        context: Float[Tensor, "batch context_tokens context_dim"] | None = None, *, mask: Mask | None = None,
        context_mask: Mask | None = None, caches: Sequence[Caches] | None = None,
    ) -> Float[Tensor, "batch tokens vocabulary"]:  # fmt: skip
        """[batch, tokens, vocabulary]; `tokens` follow those in the caches."""
        return self.unembedding(self.body(tokens, context, mask=mask, context_mask=context_mask, caches=caches))

    def caches(
        self, layout: Layout | None = None, codec: Codec | torch.dtype | None = None, evict: Policy | None = None
    ) -> list[Caches]:
        """Empty caches of each block, as `KVCache`; `Rolling` and `ExpectedAttention` get the block's rope."""
        return caches_for((block.attention for block in self.body.blocks), layout, codec, evict)

    @suggest_keywords
    @torch.no_grad()
    def generate(
        self, tokens: Int[Tensor, "batch tokens"], count: int, *, temperature: float = 0.0,
        context: Float[Tensor, "batch context_tokens context_dim"] | None = None, context_mask: Mask | None = None,
        generator: torch.Generator | None = None, caches: Sequence[Caches] | None = None,
    ) -> Int[Tensor, "batch count"]:  # fmt: skip
        """The most probable next tokens (sampled if temperature > 0), for prompts of one length after the caches'."""
        _check_tokens(tokens)
        if not tokens.shape[1]:
            raise ProblemError(f"tokens are {list(tokens.shape)}: expected a prompt of at least one token.")
        count = whole(count, "count", least=0)
        temperature = _as_float(temperature)
        caches, generated = self.caches() if caches is None else caches, [tokens[:, :0]]
        for _ in range(count):
            logits = self(tokens, context, context_mask=context_mask, caches=caches)[:, -1]
            drawn = _drawn(logits, temperature, generator)
            tokens = drawn if caches else torch.cat([tokens, drawn], dim=1)  # without blocks no cache counts tokens
            context = None if context is None else context[:, :0]  # the caches contain it after the first step
            generated.append(drawn)
        return torch.cat(generated, dim=1)


class Transformer(nn.Module):
    """An encoder, and a decoder with cross-attention to its output; Vaswani et al. 2017, §3.

    >>> model = Transformer(Encoder(19, 32, 2, 4), Decoder(23, 32, 2, 4, context_dim=32))
    >>> model(torch.randint(19, (2, 7)), torch.randint(23, (2, 5))).shape
    torch.Size([2, 5, 23])
    """

    def __init__(self, encoder: Encoder, decoder: Decoder) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    @suggest_keywords
    def forward(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"], *, mask: Mask | None = None
    ) -> Float[Tensor, "batch target vocabulary"]:
        """Logits of the token after each target token; `mask` hides source tokens, such as `KeyLengths`."""
        return self.decoder(target, self.encoder(source, mask=mask), context_mask=mask)

    @suggest_keywords
    @torch.no_grad()
    def generate(
        self, source: Int[Tensor, "batch source"], target: Int[Tensor, "batch target"], count: int, *,
        temperature: float = 0.0, mask: Mask | None = None, generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch count"]:  # fmt: skip
        """The next tokens of the target, as `Decoder.generate`."""
        return self.decoder.generate(
            target, count, temperature=temperature, context=self.encoder(source, mask=mask), context_mask=mask,
            generator=generator,
        )  # fmt: skip


def _place_of(part: nn.Module) -> dict[str, Any]:
    """The `device` and the `dtype` of the first float Parameter; none if there is none (a quantised projection).

    An adapter round a projection has no weight of its own, so its Parameters are read.
    """
    weight = next((p for p in part.parameters() if p.is_floating_point()), None)
    return {} if weight is None else {"device": weight.device, "dtype": weight.dtype}


def _check_tokens(tokens: Tensor) -> None:
    check_input("tokens", tokens, "of ints [batch, tokens]")
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise ProblemError(f"tokens are {tokens.dtype} {list(tokens.shape)}: expected ints [batch, tokens].")


def _check_caches(caches: Sequence[object], blocks: int) -> None:
    kinds = [type(pair).__name__ for pair in caches if not isinstance(pair, Caches)]
    if kinds or len(caches) != blocks:
        given = f"caches has a {kinds[0]}" if kinds else f"caches has length {len(caches)}"
        raise ProblemError(
            f"{given}: expected a Caches for each of the {blocks} blocks, as Decoder.caches() makes them."
        )


def _as_float(temperature: object) -> float:
    """The temperature as a float, from a number of Python or NumPy or a tensor of one element."""
    expected = "expected 0 for the most probable token, or more"
    try:
        found = None if isinstance(temperature, bool | str | bytes) else float(cast(float, temperature))
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor of several elements
        found = None
    if found is None:
        raise ProblemError(
            f"temperature is of class {type(temperature).__name__} and has no value as a float: {expected}."
        )
    if not found >= 0:
        raise ProblemError(f"temperature is {found}: {expected}.")
    return found


def _drawn(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=1, keepdim=True)
    logits = logits.to(wide_of(logits.dtype))
    apart = logits - logits.amax(dim=1, keepdim=True)  # at most 0: a low temperature gives -inf and no NaN
    return torch.multinomial(torch.softmax(apart / max(temperature, COLDEST), dim=1), 1, generator=generator)
