"""Small whole models: what stands later changes nothing, caches change nothing, and they learn."""

import copy
import math
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard import Alibi, Causal, KeyLengths, ProblemError, T5Bias, Window, observe_calls
from regard.cache import KVCache
from regard.describe.position import Learned, Rope, Sinusoidal
from regard.nn import Block, Decoder, Encoder, LatentAttention, MultiHeadAttention, SpecModule, Transformer

VOCABULARY, WIDTH, HEADS = 19, 24, 6

POSITIONS: dict[str, Any] = {
    "none": lambda: None,
    "sinusoidal": lambda: Sinusoidal(WIDTH),
    "learned": lambda: Learned(nn.Parameter(torch.randn(29, WIDTH))),
    "rope": lambda: Rope(WIDTH // HEADS, base=100.0),
    "alibi": lambda: Alibi(HEADS),
    "t5": lambda: T5Bias(nn.Parameter(torch.randn(32, HEADS)), bidirectional=False),
}


LATENT = {"kv_rank": 7, "nope_dim": 5, "rope_dim": 0, "v_dim": 4}


def decoder(position: str = "rope", **words: Any) -> Decoder:
    return Decoder(VOCABULARY, WIDTH, 2, HEADS, **({"kv_heads": 2, "position": POSITIONS[position]()} | words))


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(VOCABULARY, shape)


@pytest.mark.parametrize("position", POSITIONS)
def test_a_later_token_changes_no_bit_of_what_stands_before_it(position: str):
    model, tokens = decoder(position), some_tokens(2, 13)
    for at in (1, 5, 12):
        other = tokens.clone()
        other[:, at] = (other[:, at] + 1) % VOCABULARY
        before, after = model(tokens), model(other)
        assert torch.equal(before[:, :at], after[:, :at])
        assert not torch.equal(before[:, at], after[:, at])


def recomputed(model: Decoder, tokens: Tensor, count: int, *context: Tensor) -> Tensor:
    start = tokens.shape[1]
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens, *context)[:, -1:].argmax(dim=2)], dim=1)
    return tokens[:, start:]


@pytest.mark.parametrize("position", ["sinusoidal", "learned"])
def test_generation_without_blocks_is_recomputation(position: str):
    model, prompt = Decoder(VOCABULARY, WIDTH, 0, HEADS, position=POSITIONS[position]()), some_tokens(2, 5)
    assert torch.equal(model.generate(prompt, 6), recomputed(model, prompt, 6))
    assert torch.equal(model.generate(prompt, 6, context=torch.randn(2, 3, 7)), recomputed(model, prompt, 6))


@pytest.mark.parametrize("position", POSITIONS)
def test_generation_with_caches_is_recomputation(position: str):
    model, tokens = decoder(position, mask=Window(7)), some_tokens(3, 5)
    assert torch.equal(model.generate(tokens, 11), recomputed(model, tokens, 11))


def latent(d_model: int, heads: int, **words: Any) -> LatentAttention:
    sizes = {"kv_rank": 7, "nope_dim": 5, "rope_dim": 4, "v_dim": 3}
    return LatentAttention(d_model, heads, mask=words["mask"], position=words["position"], **sizes)


def test_latent_attention_can_take_the_place():
    model, tokens = decoder("rope", attention=latent), some_tokens(3, 5)
    assert torch.equal(model.generate(tokens, 11), recomputed(model, tokens, 11))


def test_generation_computes_one_token_at_a_time():
    queries: list[int] = []
    with observe_calls(lambda call: queries.append(call.q.shape[2])):
        decoder().generate(some_tokens(1, 5), 3)
    assert queries == [5, 5, 1, 1, 1, 1]


def test_drawn_tokens_follow_temperature_and_generator():
    model, tokens = decoder(), some_tokens(1, 5)
    drawn = [model.generate(tokens, 9, temperature=2.0, generator=torch.Generator().manual_seed(i)) for i in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert torch.equal(model.generate(tokens, 9, temperature=1e-4), model.generate(tokens, 9))
    with pytest.raises(ProblemError, match=r"temperature is -1"):
        model.generate(tokens, 1, temperature=-1)


@pytest.mark.parametrize("position", POSITIONS)
def test_every_kind_of_position_trains_and_reaches_every_parameter(position: str):
    model, tokens = decoder(position, attention=partial(MultiHeadAttention, gate=True, sink=True)), some_tokens(3, 13)
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(7):
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        losses.append(float(loss.detach()))
        assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []
        optimiser.step()
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.exhaustive
def test_a_tiny_decoder_learns_to_copy():
    """A row of tokens, a mark, and the row again: what follows the mark can be known only by looking back."""

    def batch(rows: int) -> Tensor:
        row = torch.randint(1, VOCABULARY, (rows, 5))
        return torch.cat([row, torch.zeros(rows, 1, dtype=torch.int64), row], dim=1)

    model = Decoder(VOCABULARY, 32, 2, 4, position=Rope(8), hidden=64)
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(350):
        tokens = batch(32)
        loss = F.cross_entropy(model(tokens[:, :-1])[:, 5:].flatten(0, 1), tokens[:, 6:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    tokens = batch(29)
    assert (model.generate(tokens[:, :6], 5) == tokens[:, 6:]).float().mean() > 0.95


@pytest.mark.parametrize("position", ["none", "sinusoidal", "rope", "alibi"])
def test_padding_changes_nothing(position: str):
    model, tokens = Encoder(VOCABULARY, WIDTH, 2, HEADS, position=POSITIONS[position]()), some_tokens(2, 7)
    padded = torch.cat([tokens, some_tokens(2, 6)], dim=1)
    found = model(padded, mask=KeyLengths(torch.tensor([7, 7])))[:, :7]
    assert torch.allclose(found, model(tokens), atol=2e-6)
    assert not torch.allclose(model(padded)[:, :7], model(tokens), atol=1e-3)


def whole() -> Transformer:
    encoder = Encoder(VOCABULARY, 18, 2, 3, position=Rope(6, fraction=0.7))
    return Transformer(encoder, decoder(context_dim=18))


def test_a_decoder_sees_its_source_and_not_what_is_masked_of_it():
    model, source, target = whole(), some_tokens(2, 7), some_tokens(2, 5)
    mask, other = KeyLengths(torch.tensor([7, 4])), source.clone()
    other[1, 4:] = (other[1, 4:] + 1) % VOCABULARY
    assert torch.equal(model(source, target, mask=mask), model(other, target, mask=mask))
    other[1, 3] = (other[1, 3] + 1) % VOCABULARY
    before, after = model(source, target, mask=mask), model(other, target, mask=mask)
    assert torch.equal(before[0], after[0])
    assert not torch.isclose(before[1], after[1]).all(dim=1).any()


def test_generation_from_a_source_is_recomputation():
    model, source, target = whole(), some_tokens(2, 7), some_tokens(2, 3)
    mask, calls = KeyLengths(torch.tensor([7, 4])), []
    with observe_calls(calls.append):
        found = model.generate(source, target, 5, mask=mask)
    assert [call.k.shape[2] for call in calls[2:8]] == [3, 7, 3, 7, 4, 7]
    tokens = target
    for _ in range(5):
        tokens = torch.cat([tokens, model(source, tokens, mask=mask)[:, -1:].argmax(dim=2)], dim=1)
    assert torch.equal(found, tokens[:, 3:])


def residual(x: Tensor) -> float:
    """How far the tokens are from being all alike, relative to their size: Dong et al. 2021, §2."""
    return float(((x - x.mean(dim=1, keepdim=True)).norm() / x.norm()).detach())


def residuals(**words: bool) -> list[float]:
    """After each block of an encoder as it is drawn."""
    torch.manual_seed(0)
    model, found = Encoder(VOCABULARY, WIDTH, 4, HEADS, position=Sinusoidal(WIDTH), **words).double(), []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, x: found.append(residual(x)))
    model(some_tokens(1, 23))
    return found


def test_pure_attention_makes_tokens_alike_and_skips_keep_them_apart():
    """Dong et al. 2021, arXiv:2103.03404, §2.1: the residual falls like its own cube, layer by layer."""
    pure = residuals(skip=False, mlp=False)
    assert all(later < earlier**2.5 for earlier, later in pairwise(pure))
    assert pure[-1] < 1e-9
    assert min(residuals(mlp=False)) > 0.5


@pytest.mark.parametrize("attention", [MultiHeadAttention, partial(LatentAttention, **LATENT)])
def test_a_model_has_the_dtype_and_the_device_of_its_attention(attention: Any):
    table = T5Bias(nn.Parameter(torch.randn(32, HEADS)))  # float32, and no part of what decides
    position = table if attention is MultiHeadAttention else None
    model = Decoder(VOCABULARY, WIDTH, 2, HEADS, position=position, attention=partial(attention, dtype=torch.bfloat16))
    assert model(some_tokens(2, 7)).dtype == torch.bfloat16
    block = Block(attention(WIDTH, HEADS, device="meta"))
    assert block(torch.empty(2, 7, WIDTH, device="meta")).is_meta


class Wrapped(nn.Module):
    """A module without a weight, as an adapter, or an attention of a user."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.d_model = inner, WIDTH

    def forward(self, x: Tensor, **words: Any) -> Tensor:
        return self.inner(x, **words)


@pytest.mark.parametrize("whole", [False, True])
def test_a_block_of_a_wrapped_attention_or_projection_is_made_where_that_is(whole: bool):
    attention: Any = MultiHeadAttention(WIDTH, HEADS, dtype=torch.bfloat16)
    attention.o_proj = Wrapped(attention.o_proj)
    block = Block(Wrapped(attention) if whole else attention)
    assert block(torch.randn(2, 7, WIDTH, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_blocks_are_traced_whole():
    model, tokens = decoder("t5"), some_tokens(2, 13)
    traced = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(traced(tokens), model(tokens), atol=1e-6)


def test_layers_share_what_they_learn_of_positions():
    names = [name for name, _ in decoder("t5").named_parameters()]
    assert [name for name in names if name.endswith("table")] == ["body.blocks.0.attention.bias.table"]
    assert "body.position.weight" in [name for name, _ in decoder("learned").named_parameters()]


def test_embeddings_are_tied_if_asked_for():
    tied, own = decoder(tied=True), decoder()
    assert tied.unembedding.weight is tied.body.embedding.weight
    assert sum(p.numel() for p in own.parameters()) - sum(p.numel() for p in tied.parameters()) == VOCABULARY * WIDTH


def test_logits_start_with_a_variance_near_one():
    for layers in (1, 8):
        model = Decoder(VOCABULARY, 96, layers, HEADS, position=Rope(16), tied=False)
        nn.init.normal_(model.unembedding.weight, std=96**-0.5)
        assert 0.5 < float(model(some_tokens(7, 31)).std().detach()) < 2


def test_a_context_belongs_to_a_block_that_looks_at_one():
    x = torch.randn(1, 3, WIDTH)
    block = Block(MultiHeadAttention(WIDTH, HEADS), MultiHeadAttention(WIDTH, HEADS))
    with pytest.raises(ProblemError, match="has a cross-attention"):
        block(x)
    with pytest.raises(ProblemError, match="has no cross-attention"):
        Block(MultiHeadAttention(WIDTH, HEADS))(x, x)


def test_what_is_no_position_is_not_passed_over():
    with pytest.raises(ProblemError, match=r"position is Window\(left=3\).*mask="):
        Decoder(VOCABULARY, WIDTH, 1, HEADS, position=Window(3))


def test_what_an_attention_was_given_beforehand_stays_by_default():
    grouped = partial(MultiHeadAttention, kv_heads=2, gate=True)
    model = Decoder(19, 32, 2, 4, context_dim=24, attention=grouped)
    blocks: Any = model.body.blocks
    for block in blocks:
        assert block.attention.kv_heads == block.cross.kv_heads == 2
        assert block.cross.gate_proj is not None
        assert block.cross.mask is None
    latent = partial(LatentAttention, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8)
    assert Decoder(19, 32, 1, 4, attention=latent)(torch.randint(19, (1, 5))).shape == (1, 5, 19)


def test_with_caches_a_mask_over_the_context_sees_queries_where_they_stand():
    torch.manual_seed(0)
    model, tokens, context = Decoder(19, 32, 2, 4, context_dim=24), torch.randint(19, (1, 7)), torch.randn(1, 7, 24)
    with torch.no_grad():
        whole = model(tokens, context, context_mask=Causal())
        caches, steps = model.caches(), []
        for i in range(7):
            given = context if i == 0 else context[:, :0]
            steps.append(model(tokens[:, i : i + 1], given, context_mask=Causal(), caches=caches))
    assert torch.allclose(torch.cat(steps, dim=1), whole, atol=1e-5)


def test_a_model_starts_at_chance():
    model, tokens = Decoder(1000, 256, 4, 4, position=Rope(64)), torch.randint(1000, (4, 64))
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(loss.item() - math.log(1000)) < 0.7


def test_latents_look_at_no_context_so_heads_do():
    latent = partial(LatentAttention, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8)
    model = Decoder(19, 32, 1, 4, context_dim=24, attention=latent)
    assert model(torch.randint(19, (1, 5)), torch.randn(1, 3, 24)).shape == (1, 5, 19)


@pytest.mark.parametrize("bias", [Alibi(4), T5Bias(torch.zeros(32, 4))])
def test_latents_have_no_bias_as_position(bias: Any):
    latent = partial(LatentAttention, kv_rank=8, nope_dim=8, rope_dim=4, v_dim=8)
    for model in (Decoder, Encoder):
        with pytest.raises(ProblemError, match=rf"{type(bias).__name__}, and LatentAttention has none: .*Rope"):
            model(19, 32, 1, 4, position=bias, attention=latent)


@pytest.mark.parametrize("tokens", [torch.randint(19, (5,)), torch.randn(1, 5)])
def test_tokens_that_are_none_are_refused(tokens: Tensor):
    with pytest.raises(ProblemError, match=r"expected ints \[batch, tokens\]"):
        Decoder(19, 32, 1, 4)(tokens)
    with pytest.raises(ProblemError, match=r"expected ints \[batch, tokens\]"):
        Decoder(19, 32, 1, 4).generate(tokens, 3)


@pytest.mark.parametrize("tokens", [[[3, 19]], [[-1, 5]]])
def test_tokens_beyond_the_vocabulary_are_refused_before_caches_change(tokens: list[list[int]]):
    model = Decoder(19, 16, layers=1, heads=2)
    caches = model.caches()
    with pytest.raises(ProblemError, match=r"^tokens are -?\d+ to \d+: expected 0 to 18, the vocabulary\.$"):
        model(torch.tensor(tokens), caches=caches)
    assert caches[0].own.tokens == 0


def test_another_error_of_an_embedding_stays_what_it_is():
    def fail(*_: object) -> None:
        raise IndexError("in the hook")

    model = Decoder(19, 16, layers=1, heads=2)
    model.body.embedding.register_forward_hook(fail)
    with pytest.raises(IndexError, match="in the hook"):
        model(torch.tensor([[3, 1]]))


def test_generation_that_makes_no_sense_is_refused():
    model, prompt = Decoder(19, 32, 1, 4), torch.zeros(1, 3, dtype=torch.int64)
    for tokens, count, temperature, message in (
        ([1, 2], 3, 0.0, r"tokens is list: expected a tensor of ints \[batch, tokens\]"),
        (prompt[:, :0], 3, 0.0, "a prompt of at least one token"),
        (prompt, -1, 0.0, "count is -1: expected at least 0"),
        (prompt, 2.0, 0.0, "count is 2.0: expected a whole number"),
        (prompt, 3, -1.0, "temperature is -1.0: expected 0"),
        (prompt, 0, math.nan, "temperature is nan: expected 0"),
        (prompt, 3, "0.5", "temperature is of class str and has no value as a float: expected 0"),
        (prompt, 3, True, "temperature is of class bool"),
        (prompt, 3, 10**400, "temperature is of class int and has no value as a float"),
        (prompt, 3, torch.ones(2), "temperature is of class Tensor"),
    ):
        with pytest.raises(ProblemError, match=message):
            model.generate(tokens, count, temperature=temperature)


@pytest.mark.parametrize("temperature", [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_a_temperature_may_be_any_number_that_float_takes(temperature: Any):
    model, prompt = Decoder(19, 32, 1, 4), torch.tensor([[3, 1, 4]])

    def drawn(temperature: Any) -> Tensor:
        return model.generate(prompt, 9, temperature=temperature, generator=torch.Generator().manual_seed(0))

    assert torch.equal(drawn(temperature), drawn(0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_temperature_near_0_takes_the_most_probable_token(dtype: torch.dtype):
    model, prompt = Decoder(19, 32, 1, 4).to(dtype), torch.tensor([[3, 1, 4]])
    expected = model.generate(prompt, 5)
    for temperature in (1e-7, 1e-40, 5e-324):
        assert torch.equal(model.generate(prompt, 5, temperature=temperature), expected)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"layers": -1}, "layers is -1: expected at least 0 blocks"),
        ({"layers": 2.0}, "layers is 2.0: expected a whole number of blocks"),
        ({"skip": "no"}, "skip is 'no': expected True or False"),
        ({"mlp": 0}, "mlp is 0: expected True or False"),
        ({"tied": "no"}, "tied is 'no': expected True or False"),
        ({"hidden": 0}, "hidden is 0: expected at least 1 dimensions"),
        ({"context_dim": 0}, "context_dim is 0: expected at least 1 dimensions"),
        ({"context_dim": 0, "layers": 0}, "context_dim is 0: expected at least 1 dimensions"),
        ({"vocabulary": 11.0}, "vocabulary is 11.0: expected a whole number of tokens"),
        ({"d_model": 32.0}, "d_model is 32.0: expected a whole number of dimensions"),
    ],
)
def test_a_model_that_makes_no_sense_is_not_made(words: dict[str, Any], message: str):
    with pytest.raises(ProblemError, match=message):
        Decoder(**{"vocabulary": 19, "d_model": 32, "layers": 1, "heads": 4} | words)


def test_caches_belong_to_the_blocks():
    model, tokens = Decoder(19, 32, 2, 4), torch.zeros(1, 3, dtype=torch.int64)
    for caches, message in (
        (model.caches()[:1], "caches has length 1: expected a Caches for each of the 2 blocks"),
        ([KVCache(), KVCache()], "caches has a KVCache: expected a Caches for each of the 2 blocks"),
    ):
        with torch.no_grad(), pytest.raises(ProblemError, match=message):
            model(tokens, caches=caches)


@pytest.mark.parametrize("position", [Rope(8), Learned(torch.randn(9, 32)), T5Bias(torch.randn(32, 4))])
def test_positions_and_masks_may_be_modules(position: Any):
    tokens, models = torch.randint(19, (2, 7)), []
    for given, mask in ((position, Window(3)), (SpecModule(position), SpecModule(Window(3)))):
        torch.manual_seed(0)
        models += [Decoder(19, 32, 2, 4, position=given, mask=mask), Encoder(19, 32, 2, 4, position=given, mask=mask)]
    for plain, module in zip(models[:2], models[2:], strict=True):
        assert torch.equal(plain(tokens), module(tokens))


@pytest.mark.parametrize("as_given", [lambda bias: bias, SpecModule])
def test_a_call_with_other_weights_leaves_the_table_of_the_layers(as_given: Any):
    model, tokens = Decoder(VOCABULARY, WIDTH, 2, HEADS, position=as_given(POSITIONS["t5"]())), some_tokens(2, 13)
    tables = [cast(Any, block).attention.bias.spec.table for block in model.body.blocks]
    assert tables[0] is tables[1]
    with torch.no_grad():
        before = model(tokens)
        doubled = {name: 2 * weight for name, weight in model.named_parameters()}
        assert not torch.allclose(torch.func.functional_call(model, doubled, (tokens,)), before)
        assert torch.equal(model(tokens), before)
    names = [name for name in model.state_dict() if name.endswith("table")]
    assert names == [f"body.blocks.{i}.attention.bias.table" for i in range(2)]


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize(
    "moved", [lambda m: m.half().float(), lambda m: m.to("meta").to_empty(device="cpu")], ids=["converted", "made anew"]
)
def test_layers_that_were_moved_or_converted_have_one_table(learned: bool, moved: Any):
    model = moved(Encoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(torch.zeros(32, HEADS, requires_grad=learned))))
    first, *others = (block.attention.bias.table for block in model.blocks)
    assert all(other is first for other in others)
    assert first.requires_grad == learned


def test_a_layer_that_was_given_a_table_of_its_own_keeps_it_when_the_model_is_converted():
    model = Encoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(torch.zeros(32, HEADS)))
    cast(Any, model.blocks[1]).attention.bias = SpecModule(T5Bias(torch.ones(32, HEADS)))
    cast(Any, model.blocks[2]).attention = nn.Linear(3, 3)  # in place of an attention class of the user with a bias
    first, own = (cast(Any, block).attention.bias.table for block in model.double().blocks[:2])
    assert (first.sum().item(), own.sum().item()) == (0.0, 32.0 * HEADS)


@pytest.mark.parametrize("learned", [True, False])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_that_were_given_the_tensors_of_a_state_have_one_table(learned: bool, device: str):
    table = torch.randn(32, HEADS, requires_grad=learned)
    state = Decoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(table)).state_dict()
    other = torch.zeros(32, HEADS, device=device, requires_grad=learned)
    with torch.device(device):
        model = Decoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(other))
    model.load_state_dict(state, assign=True)
    first, *others = (cast(Any, block).attention.bias.table for block in model.body.blocks)
    assert all(each is first for each in others)
    assert torch.equal(first, table)
    assert first.requires_grad == learned


@pytest.mark.parametrize("layer", range(3))
def test_layers_share_the_table_that_a_part_of_a_state_has(layer: int):
    model = Encoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(torch.zeros(32, HEADS)))
    part = {f"blocks.{layer}.attention.bias.table": torch.ones(32, HEADS)}
    model.load_state_dict(part, strict=False, assign=True)
    first, *others = (cast(Any, block).attention.bias.table for block in model.blocks)
    assert all(each is first for each in others)
    assert torch.equal(first, torch.ones(32, HEADS))


def test_a_layer_with_a_table_of_its_own_gets_that_of_a_state():
    model = Encoder(VOCABULARY, WIDTH, 2, HEADS, position=T5Bias(torch.zeros(32, HEADS)))
    cast(Any, model.blocks[1]).attention.bias = SpecModule(T5Bias(torch.ones(32, HEADS)))
    model.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    first, own = (cast(Any, block).attention.bias.table for block in model.blocks)
    assert (first.sum().item(), own.sum().item()) == (0.0, 32.0 * HEADS)


def is_tied(model: Decoder) -> bool:
    return model.unembedding.weight is model.body.embedding.weight


def test_tied_embeddings_stay_tied_when_they_are_loaded_or_moved():
    state = decoder(tied=True).state_dict()
    with torch.device("meta"):
        models = [decoder(tied=True) for _ in range(3)]
    models[0].load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
    models[1].to_empty(device="cpu").load_state_dict(state)
    whole = nn.ModuleDict({"decoder": models[2]}).to_empty(device="cpu")
    whole.load_state_dict({f"decoder.{name}": tensor.clone() for name, tensor in state.items()}, assign=True)
    for model in models:
        assert is_tied(model)
        assert torch.equal(model.unembedding.weight, state["body.embedding.weight"])
    own = decoder()
    own.load_state_dict(state, assign=True)
    assert not is_tied(decoder().double())


@pytest.mark.parametrize("name", ["body.embedding.weight", "unembedding.weight"])
@pytest.mark.parametrize("assign", [True, False])
def test_tied_embeddings_are_those_that_a_part_of_a_state_has(name: str, assign: bool):
    model, weight = decoder(tied=True), torch.randn(VOCABULARY, WIDTH)
    model.load_state_dict({name: weight}, strict=False, assign=assign)
    assert is_tied(model)
    assert torch.equal(model.unembedding.weight, weight)


@pytest.mark.parametrize("assign", [True, False])
def test_of_a_state_with_two_weights_tied_embeddings_take_the_last(assign: bool):
    model, state = decoder(tied=True), decoder().state_dict()
    model.load_state_dict(state, assign=assign)
    assert is_tied(model)
    assert torch.equal(model.body.embedding.weight, state["unembedding.weight"])


def test_a_block_of_another_class_is_moved_and_loaded_with_the_others():
    model = Encoder(VOCABULARY, WIDTH, 3, HEADS, position=T5Bias(torch.zeros(32, HEADS)))
    model.blocks[1] = nn.Linear(WIDTH, WIDTH)
    model.double().load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    first, _, last = model.blocks
    assert cast(Any, first).attention.bias.table is cast(Any, last).attention.bias.table


def test_the_position_of_an_encoder_can_be_assigned():
    made, tokens = Encoder(VOCABULARY, WIDTH, 2, HEADS, position=Sinusoidal(WIDTH)), torch.arange(5)[None]
    later = Encoder(VOCABULARY, WIDTH, 2, HEADS)
    cast(Any, later).position = Sinusoidal(WIDTH)
    later.load_state_dict(made.state_dict())
    assert torch.equal(later(tokens), made(tokens))
    with pytest.raises(ProblemError, match="expected a position that is added to embeddings"):
        cast(Any, later).position = Rope(8)


class WithPositionsOfItsOwn(Encoder):
    """What a subclass may write: a module in place of the spec, which its own `forward` calls."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH, 1, HEADS)
        cast(Any, self).position = nn.Embedding(13, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        x = self.embedding(tokens) + cast(Any, self.position)(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


def test_a_subclass_with_its_own_forward_may_have_a_module_as_position():
    model = WithPositionsOfItsOwn()
    model(some_tokens(2, 7)).sum().backward()
    assert model.state_dict()["position.weight"].shape == (13, WIDTH)
    assert cast(Any, model.position).weight.grad[:7].any()
    with pytest.raises(ProblemError, match="expected a position that is added to embeddings"):
        cast(Any, model).position = Rope(8)
    with pytest.raises(ProblemError, match="expected a position that is added to embeddings"):
        cast(Any, Encoder(VOCABULARY, WIDTH, 1, HEADS)).position = nn.Embedding(13, WIDTH)


def test_a_module_as_position_is_named_where_the_forward_of_the_encoder_reads_a_spec():
    model = WithPositionsOfItsOwn()
    with pytest.raises(ProblemError, match=r"^position is the module Embedding, .* assign a spec or None to position"):
        Encoder.forward(model, some_tokens(2, 7))


def test_a_block_says_which_part_is_no_attention():
    with pytest.raises(ProblemError, match=r"^attention is 3: expected a module with a width `d_model`"):
        Block(cast(Any, 3))
    with pytest.raises(ProblemError, match=r"^cross is 'a': expected a module with a width `d_model`"):
        Block(MultiHeadAttention(16, 2), cast(Any, "a"))
