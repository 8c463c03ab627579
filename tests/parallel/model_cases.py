"""What the processes of `workers.py` run to shard models: each compares its part with one process."""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from regard import (
    Alibi,
    Causal,
    KeyLengths,
    Learned,
    Mask,
    MaskFunction,
    ProblemError,
    RefusalError,
    Rope,
    Sinusoidal,
    TensorBias,
    Window,
    attend,
    attend_state,
    explain,
)
from regard.extend import spec
from regard.nn import Decoder, LatentAttention, MultiHeadAttention
from regard.parallel import context_parallel
from tests.integrate.zoo import with_cache


@spec
class WiderHeads(Mask):
    """A window per head; without `broadcast_shape`."""

    width: int

    def keep(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return (q >= k) & (q - k < self.width * (h + 1))


def llama(**more: Any) -> Any:
    """A small random model of transformers, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, **more,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def mistral(**more: Any) -> Any:
    """One with a sliding window."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, sliding_window=9, **more,
    )  # fmt: skip
    return MistralForCausalLM(config)


def opt() -> Any:
    """One that counts its positions from the attention mask."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=31, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    return OPTForCausalLM(config)


def roberta() -> Any:
    """One that counts its positions from the ids of padding: here the tokens 1, which the text has as well."""
    from transformers import RobertaConfig, RobertaForCausalLM

    torch.manual_seed(0)
    config = RobertaConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        is_decoder=True, max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return RobertaForCausalLM(config)


def gpt2() -> Any:
    """One whose class has no type of loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=31, n_embd=32, n_layer=2, n_head=4, n_positions=64, **dropouts))


def bert() -> Any:
    """Another one, that looks both ways."""
    from transformers import BertConfig, BertLMHeadModel

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertLMHeadModel(config)


def decoder(**more: Any) -> nn.Module:
    """One of `regard.nn`."""
    torch.manual_seed(0)
    return Decoder(31, 32, layers=2, heads=4, kv_heads=2, **more)


MODELS = {"llama": llama, "mistral": mistral, "opt": opt, "roberta": roberta, "gpt2": gpt2, "bert": bert}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients by name, and none from now on."""
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def check_gradients(model: nn.Module, whole: dict[str, Tensor]) -> None:
    """Their sum over the ranks is that of one process."""
    for name, mine in gradients(model).items():
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, whole[name], atol=2e-6, rtol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


def transformers_model(rank: int, size: int, *, name: str, tokens: int, layout: str, case: str) -> None:
    """Logits, loss and gradients of a model of transformers."""
    model = MODELS[name]()
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str, Tensor] = {"input_ids": torch.randint(31, (2, tokens), generator=generator)}
    labels = inputs["input_ids"].clone()
    keep = torch.ones(2, tokens, dtype=torch.bool)
    if case == "padding on the right":
        keep[1, -tokens // 3 :] = False
    elif case == "padding on the left, positions counted":
        keep[1, : tokens // 3] = False
    elif case == "padding on the left":
        keep[1, : tokens // 3] = False
        inputs["position_ids"] = (keep.cumsum(1) - 1).clamp(min=0)
    elif case == "packed":
        inputs["position_ids"] = (torch.arange(tokens) % (tokens // 3)).expand(2, -1)
        model.config.use_cache = False  # else transformers looks for no packed sequences
    if "padding" in case:
        inputs["attention_mask"] = keep.long()
        labels[~keep] = -100
    whole = model(**inputs, labels=labels)
    whole.loss.backward()
    expected = gradients(model)
    with context_parallel(layout=layout) as cp:
        out = model(**inputs, labels=labels)
        out.loss.backward()
    torch.testing.assert_close(out.loss, whole.loss, atol=1e-6, rtol=1e-6)
    assert out.logits.shape[1] == cp.shard.layout.counts[rank]
    logits = cp.unshard(out.logits)
    torch.testing.assert_close(logits[keep], whole.logits[keep], atol=1e-5, rtol=1e-4)
    check_gradients(model, expected)
    again = model(**inputs, labels=labels)  # in one process, as before
    assert torch.equal(again.logits, whole.logits)
    assert model.config._attn_implementation == "sdpa"


def regard_model(rank: int, size: int, *, more: dict[str, Any], layout: str, tokens: int) -> None:
    """Logits and gradients of a `Decoder`."""
    model = decoder(**more)
    ids = torch.randint(31, (2, tokens), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(2))
    (whole * weights).sum().backward()
    expected = gradients(model)
    with context_parallel(layout=layout) as cp:
        part = model(ids)
        logits = cp.unshard(part)
        (logits * weights).sum().backward()
    torch.testing.assert_close(logits, whole, atol=1e-5, rtol=1e-4)
    for name, mine in gradients(model).items():
        dist.all_reduce(mine)
        torch.testing.assert_close(mine, expected[name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def compiled_model(rank: int, size: int) -> None:
    """A model that torch.compile has compiled."""
    model, ids = decoder(), torch.randint(31, (1, 37), generator=torch.Generator().manual_seed(1))
    whole = model(ids)
    compiled = torch.compile(model)
    with context_parallel() as cp:
        part = compiled(ids)
        torch.testing.assert_close(cp.unshard(part), whole, atol=1e-5, rtol=1e-4)


def own_module(rank: int, size: int, *, tokens: int) -> None:
    """A module that calls torch's attention and regard's."""
    q, k, v = torch.randn(3, 2, 4, tokens, 8, generator=torch.Generator().manual_seed(1)).unbind()
    theirs = nn.functional.scaled_dot_product_attention
    whole = theirs(q, k, v, is_causal=True), attend(q, k, v, mask=Causal() & Window(7))
    with context_parallel() as cp, cp.sequence(tokens, mask=Causal()) as shard:
        mine = [shard.shard(t, 2) for t in (q, k, v)]
        found = (
            nn.functional.scaled_dot_product_attention(*mine, is_causal=True),
            attend(*mine, mask=Causal() & Window(7)),
        )
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(shard.unshard(one, 2), other, atol=1e-5, rtol=1e-4)


def whole_llama(tokens: int) -> tuple[Tensor, Any, dict[str, Tensor]]:
    """Two rows of tokens, what one process makes of them with their loss, and its gradients."""
    ids, model = torch.randint(31, (2, tokens), generator=torch.Generator().manual_seed(1)), llama()
    whole = model(ids, labels=ids)
    whole.loss.backward()
    return ids, whole, gradients(model)


def fsdp_and_sequence(rank: int, size: int, *, tokens: int) -> None:
    """2 x 2: parameters and batch rows are sharded over one dimension of the mesh, the sequence over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, whole, expected = whole_llama(tokens)
    model = llama()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    row = mesh["data"].get_local_rank()
    with context_parallel(mesh["sequence"]) as cp:
        out = model(input_ids=ids[row : row + 1], labels=ids[row : row + 1])
        out.loss.backward()  # FSDP takes the mean over the rows, and the ranks of a sequence are summed
    torch.testing.assert_close(cp.unshard(out.logits), whole.logits[row : row + 1], atol=1e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        mine = parameter.grad.to_local()
        dist.all_reduce(mine, group=mesh["sequence"].get_group())
        torch.testing.assert_close(parameter.grad.full_tensor(), expected[name], atol=2e-6, rtol=2e-5)


def heads_and_sequence(rank: int, size: int, *, tokens: int) -> None:
    """2 x 2: heads are sharded over one dimension of the mesh (tensor parallelism), the sequence over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("heads", "sequence"))
    ids, whole, expected = whole_llama(tokens)
    model = llama()
    columns, rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ("o_proj", "down_proj")
    for layer in model.model.layers:
        plan: Any = {f"self_attn.{name}": ColwiseParallel() for name in columns[:3]}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in columns[3:]}
        plan |= {f"self_attn.{rows[0]}": RowwiseParallel(), f"mlp.{rows[1]}": RowwiseParallel()}
        parallelize_module(layer, mesh["heads"], plan)
    with context_parallel(mesh["sequence"]) as cp:
        out = model(input_ids=ids, labels=ids)
        out.loss.backward()
    torch.testing.assert_close(out.loss, whole.loss, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(cp.unshard(out.logits), whole.logits, atol=1e-5, rtol=1e-4)
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        dist.all_reduce(grad, group=mesh["sequence"].get_group())
        torch.testing.assert_close(grad, expected[name], atol=2e-6, rtol=2e-5)


def latent_heads(rank: int, size: int, *, tokens: int) -> None:
    """Each rank has two heads of latent attention: its outputs, and gradients, are those of one process."""
    mesh, generator = init_device_mesh("cpu", (4,)), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    module = LatentAttention(24, 8, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3, position=Rope(4), mask=Causal())
    x = torch.randn(2, tokens, 24, generator=generator)
    expected = module(x)
    expected.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in module.named_parameters()}
    module.zero_grad()
    plan: Any = {**{name: ColwiseParallel() for name in ("q_proj", "k_up", "v_up")}, "o_proj": RowwiseParallel()}
    found = parallelize_module(module, mesh, plan)(x)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    found.square().sum().backward()
    for name in ("q_proj", "k_up", "v_up", "o_proj"):
        gradient = cast(Any, module).get_submodule(name).weight.grad.full_tensor()
        torch.testing.assert_close(gradient, gradients[f"{name}.weight"], atol=2e-5, rtol=2e-5)


def rotated(rank: int, size: int, *, placements: tuple[Any, ...], tokens: int) -> None:
    """DTensors are rotated by the positions in the whole sequence."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, rope = torch.randn(2, 4, tokens, 8, generator=torch.Generator().manual_seed(1)), Rope(8)
    for positions in (None, 3, torch.arange(2 * tokens).view(2, tokens)):
        whole, sharded = x.clone().requires_grad_(), cast(Any, distribute_tensor(x, mesh, placements).requires_grad_())
        expected, found = rope.rotate(whole, positions), cast(Any, rope.rotate(sharded, positions))
        assert found.placements == placements
        torch.testing.assert_close(found.full_tensor(), expected)
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


def positioned(rank: int, size: int, *, tokens: int) -> None:
    """Positions of the whole sequence are added to DTensors, and learned ones get their whole gradient."""
    mesh, generator = init_device_mesh("cpu", (4,)), torch.Generator().manual_seed(1)
    x, table = (torch.randn(shape, generator=generator) for shape in ((2, tokens, 6), (tokens + 3, 6)))
    for placement in (Shard(1), Shard(0), Replicate()):
        own, other = (table.clone().requires_grad_() for _ in range(2))
        sharded: Any = distribute_tensor(x, mesh, [placement])
        expected, found = Learned(own).add(x, 3), cast(Any, Learned(other).add(sharded, 3))
        torch.testing.assert_close(found.full_tensor(), expected)
        torch.testing.assert_close(cast(Any, Sinusoidal(6).add(sharded)).full_tensor(), Sinusoidal(6).add(x))
        expected.square().sum().backward()
        found.square().sum().backward()
        torch.testing.assert_close(other.grad, own.grad)
        spread = distribute_tensor(table, mesh, [Replicate()]).requires_grad_()
        found = cast(Any, Learned(spread).add(sharded, 3))
        torch.testing.assert_close(found.full_tensor(), expected)
        found.square().sum().backward()
        torch.testing.assert_close(cast(Any, spread.grad).full_tensor(), own.grad)


def placed(rank: int, size: int, *, placements: tuple[Any, ...], mask: Mask | None, tokens: int) -> None:
    """DTensors with these placements on a mesh of 2 x 2, and a sink that every rank has."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    generator = torch.Generator().manual_seed(1)
    shapes = (2, 4, tokens, 8), (2, 2, tokens, 8), (2, 2, tokens, 6)
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    sink = torch.randn(4, generator=generator).requires_grad_()
    expected = attend(*whole, mask=mask, sink=sink)
    dout = torch.randn(expected.shape, generator=generator)
    expected.backward(dout)
    shards = [distribute_tensor(t.detach(), mesh, placements).requires_grad_() for t in whole]
    column = distribute_tensor(sink.detach(), mesh, [Replicate(), Replicate()]).requires_grad_()
    out = attend(*shards, mask=mask, sink=column)
    assert isinstance(out, DTensor)
    assert torch.equal(cast(DTensor, attend(*shards, mask=mask, sink=sink)).to_local(), out.to_local())
    assert out.placements == placements
    torch.testing.assert_close(out.full_tensor(), expected, atol=1e-5, rtol=1e-4)
    out.backward(distribute_tensor(dout, mesh, placements))
    for shard, t in zip([*shards, column], [*whole, sink], strict=True):
        torch.testing.assert_close(cast(DTensor, shard.grad).full_tensor(), t.grad, atol=1e-5, rtol=1e-4)
    state = attend_state(*shards, mask=mask)
    torch.testing.assert_close(
        cast(DTensor, state.lse).full_tensor(), attend_state(*whole, mask=mask).lse, atol=1e-5, rtol=1e-4
    )
    for logits in (sink, column):
        found = cast(DTensor, state.with_sink(logits))
        assert found.placements == placements
        torch.testing.assert_close(found.full_tensor(), expected, atol=1e-5, rtol=1e-4)


def compiled(rank: int, size: int, *, tokens: int) -> None:
    """DTensors in a function that torch.compile has compiled."""
    mesh = init_device_mesh("cpu", (2, 2))
    q = torch.randn(1, 4, tokens, 8, generator=torch.Generator().manual_seed(1))
    function: Any = torch.compile(lambda q: attend(q, q, q, mask=Causal()) * 2, backend="eager")
    out = function(distribute_tensor(q, mesh, [Shard(2), Shard(1)]))
    torch.testing.assert_close(out.full_tensor(), attend(q, q, q, mask=Causal()) * 2, atol=1e-5, rtol=1e-4)


def refused(rank: int, size: int) -> list[str]:
    """The errors of DTensors that need more than a ring."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x = torch.randn(2, 4, 8, 8)

    def of(*placements: Any) -> DTensor:
        return distribute_tensor(x, mesh, placements)

    tokens, everywhere = of(Shard(2), Replicate()), of(Replicate(), Replicate())
    lengths = KeyLengths(torch.tensor([3, 8]))
    calls: list[Any] = [
        lambda: attend(tokens, everywhere, everywhere),
        lambda: attend(of(Shard(3), Replicate()), of(Shard(3), Replicate()), of(Shard(3), Replicate())),
        lambda: attend(tokens, x, x),
        lambda: attend(*[of(Shard(2), Shard(2))] * 3),
        lambda: attend(*[of(Shard(1), Replicate())] * 3, bias=Alibi(4)),
        lambda: attend(*[of(Shard(0), Replicate())] * 3, mask=lengths),
        lambda: attend(*[of(Shard(1), Replicate())] * 3, mask=WiderHeads(2)),
        lambda: attend(*[of(Shard(0), Replicate())] * 3, mask=MaskFunction(lambda b, h, q, k: q - k <= b)),
        lambda: attend(tokens, tokens, tokens, bias=TensorBias(everywhere)),
        lambda: explain(tokens, tokens, tokens),
    ]
    return [_error(call) for call in calls]


def refused_calls(rank: int, size: int) -> list[str]:
    """The errors of models and arguments that a part of a sequence gives another meaning."""
    from transformers import (
        BertConfig,
        BertModel,
        DynamicCache,
        LayoutLMConfig,
        LayoutLMForMaskedLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    small: dict[str, Any] = {"vocab_size": 31, "hidden_size": 32, "intermediate_size": 48}
    small |= {"num_hidden_layers": 1, "num_attention_heads": 4}
    model, ids = llama(), torch.randint(31, (1, 12))
    dynamic = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    t5 = T5ForConditionalGeneration(T5Config(vocab_size=31, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4))
    checkpointed = llama().train()
    checkpointed.gradient_checkpointing_enable()
    own, attention = decoder(), MultiHeadAttention(32, heads=4)
    x = torch.randn(1, 12, 32)
    calls: list[Any] = [
        lambda: model(ids, **with_cache(DynamicCache(config=model.config))),
        lambda: model(ids, output_attentions=True),
        lambda: model(ids, logits_to_keep=1),
        lambda: model(ids, attention_mask=torch.ones(1, 1, 12, 12, dtype=torch.bool)),
        lambda: model(ids[:, :1]),
        lambda: dynamic(ids),
        lambda: checkpointed(ids, labels=ids),
        lambda: BertModel(BertConfig(**small))(ids),
        lambda: LayoutLMForMaskedLM(LayoutLMConfig(**small))(ids),
        lambda: t5(ids, labels=ids),
        lambda: own(ids, caches=own.caches()),
        lambda: attention(x, x),
    ]
    with context_parallel():
        found = [_error(call) for call in calls]
        own(ids)

    def whole() -> None:
        with context_parallel():
            nn.Linear(3, 3)(torch.ones(3))

    found.append(_error(whole))
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "sequence"))
    entered = context_parallel(mesh), context_parallel(layout="odd")
    return [*found, *(_error(each.__enter__) for each in entered)]


def _error(call: Any) -> str:
    try:
        call()
    except (ProblemError, RefusalError) as error:
        return str(error)
    return "no error"
