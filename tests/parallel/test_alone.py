"""What one process shows: a group of one rank, errors that name what to do, compiled functions."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from regard import Causal, ProblemError, RefusalError, Rope, TensorBias, attend, observe_calls
from regard.cache import KVCache, Rolling
from regard.errors import KeywordError
from regard.extend import Bias, spec
from regard.nn import LatentAttention
from regard.parallel import (
    Layout,
    ShardedCache,
    attend_on_mesh,
    attend_sharded,
    context_parallel,
    ring_attend,
    ulysses_attend,
)
from regard.parallel.context import Shard as ContextShard
from regard.parallel.ranks import Ranks
from tests.parallel.comparing import some


def qkv() -> list[Tensor]:
    return list(some().values())[:3]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_a_group_of_one_rank_gives_the_bits_of_attend(function: Callable[..., Tensor]):
    assert torch.equal(function(*qkv(), mask=Causal()), attend(*qkv(), mask=Causal()))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it of every tensor that it compiles with
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_compiled_autograd_leaves_the_gradients_of_calls_over_ranks(function: Callable[..., Tensor]):
    """It compiled the messages to other ranks, which raised an error."""
    leaves = [t.clone().requires_grad_() for t in qkv()]
    expected = torch.autograd.grad(attend(*leaves, mask=Causal()).square().sum(), leaves)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        function(*leaves, mask=Causal()).square().sum().backward()
    torch.testing.assert_close([t.grad for t in leaves], list(expected))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_a_second_derivative_is_an_error_and_not_left_out(function: Callable[..., Tensor]):
    q, k, v = qkv()
    q = q.clone().requires_grad_()
    out = function(q, k, v, mask=Causal())
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RefusalError, match="attention over ranks can be differentiated once"):
        (out.sum() + grad.square().sum()).backward()
    with pytest.raises(RefusalError, match="attention over ranks can be differentiated once"):
        torch.autograd.grad(grad.sum(), q)


SHARDED = partial(attend_sharded, layout=Layout.contiguous(53, 1))
BY_NAME = {"ring_attend": ring_attend, "ulysses_attend": ulysses_attend, "attend_sharded": SHARDED}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("which", ["q", "k", "v", "bias"])
def test_a_tangent_is_refused_in_words(name: str, which: str):
    given: dict[str, Any] = dict(zip("qkv", qkv(), strict=True))
    tokens = given["q"].shape[2]
    given["bias"] = torch.zeros(tokens, tokens)
    with forward_ad.dual_level():
        given[which] = forward_ad.make_dual(given[which], torch.ones_like(given[which]))
        given["bias"] = TensorBias(given["bias"])
        with pytest.raises(RefusalError, match=rf"{name} got a tensor with a tangent .* with backward\(\)"):
            BY_NAME[name](**given)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_torch_func_is_refused_in_words(name: str, transform: str):
    q, k, v = qkv()
    calls: dict[str, Callable[[], Any]] = {
        "grad": lambda: torch.func.grad(lambda q: BY_NAME[name](q, k, v).sum())(q),
        "vmap": lambda: torch.vmap(lambda q: BY_NAME[name](q, k, v))(q[None]),
        "jvp": lambda: torch.func.jvp(lambda q: BY_NAME[name](q, k, v), (q,), (q,)),
    }
    with pytest.raises(RefusalError, match=rf"{name} inside of torch.func \(grad, vmap, jvp .* as batch rows"):
        calls[transform]()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_gradients_with_tangents_are_refused_in_words(function: Callable[..., Tensor]):
    q, k, v = qkv()
    q = q.clone().requires_grad_()
    with forward_ad.dual_level():
        out = function(q, k, v)
        dout = forward_ad.make_dual(torch.ones_like(out), torch.ones_like(out))
        with pytest.raises(RefusalError, match="the backward pass of attention over ranks got a tensor with a tangent"):
            torch.autograd.grad(out, q, dout)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_a_sink_may_have_a_tangent_which_no_rank_sends(function: Callable[..., Tensor]):
    q, k, v = qkv()
    found = list[Tensor]()
    for each in (function, attend):
        with forward_ad.dual_level():
            sink = forward_ad.make_dual(torch.zeros(q.shape[1]), torch.ones(q.shape[1]))
            found.append(forward_ad.unpack_dual(each(q, k, v, sink=sink)).tangent)
    torch.testing.assert_close(*found)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # torch's own, where a graph goes on after a break
@pytest.mark.parametrize("function", [ring_attend, ulysses_attend])
def test_a_compiled_function_may_call_it(function: Callable[..., Tensor]):
    compiled: Any = torch.compile(lambda q, k, v: 2 * function(q, k, v, mask=Causal()), backend="eager")
    leaves = [t.clone().requires_grad_() for t in qkv()]
    out = compiled(*leaves)
    out.sum().backward()
    assert torch.equal(out, 2 * attend(*qkv(), mask=Causal()))
    assert all(t.grad is not None for t in leaves)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("function", [ring_attend, partial(attend_sharded, layout=Layout.contiguous(53, 1))])
def test_autocast_is_that_of_attend(function: Callable[..., Tensor]):
    with torch.autocast("cpu", torch.bfloat16):
        out = function(*qkv(), mask=Causal())
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, attend(*qkv(), mask=Causal()), atol=0.01, rtol=0.01)


def test_a_group_that_is_made_again_does_not_read_what_the_one_before_wrote():
    store, found = dist.HashStore(), list[tuple[bool, bool]]()  # pyright: ignore[reportPrivateImportUsage]
    for _ in range(2):
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        first, second = (Ranks(None, 1.0, "ring_attend") for _ in range(2))
        before = first.store.has("a key")
        first.store.write("a key", "a text")
        found.append((before, second.store.has("a key")))
        dist.destroy_process_group()
    assert found == [(False, True)] * 2


def test_without_a_group_it_says_what_to_call():
    with pytest.raises(ProblemError, match=r"call torch\.distributed\.init_process_group first"):
        ring_attend(*qkv())
    with (
        pytest.raises(ProblemError, match=r"^context_parallel needs a process group: call torch\.distributed\.init_"),
        context_parallel(None),
    ):
        pass


@pytest.mark.usefixtures("alone")
def test_calls_that_cannot_be_observed_are_refused():
    with observe_calls(lambda call: None), pytest.raises(RefusalError, match="ring_attend inside of observe_calls"):
        ring_attend(*qkv())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("timeout", [np.int64(20), np.float32(20), Fraction(41, 2)])
def test_a_timeout_is_any_real_number(timeout: Any):
    assert torch.equal(ring_attend(*qkv(), timeout=timeout), attend(*qkv()))


@pytest.mark.usefixtures("alone")
def test_wrong_arguments_are_named():
    q, k, v = qkv()
    with pytest.raises(KeywordError, match=r"mask=Causal\(\)"):
        ring_attend(q, k, v, is_causal=True)  # pyright: ignore[reportCallIssue]
    with pytest.raises(ProblemError, match="layout is for 2 ranks, and the group has 1"):
        ring_attend(q, k, v, layout=Layout.contiguous(53, 2))
    with pytest.raises(ProblemError, match="keys of another sequence than the queries need key_layout"):
        ring_attend(q[:, :, :5], k, v)
    with pytest.raises(ProblemError, match="timeout is 0: expected seconds"):
        ring_attend(q, k, v, timeout=0)
    with pytest.raises(ProblemError, match="timeout is '5': expected seconds"):
        ring_attend(q, k, v, timeout="5")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="timeout is True: expected seconds"):
        ring_attend(q, k, v, timeout=True)
    with pytest.raises(ProblemError, match=r"this process \(rank 0\) is not in the group that ring_attend got"):
        ring_attend(q, k, v, group=dist.GroupMember.NON_GROUP_MEMBER)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match=r"group is DeviceMesh: expected a process group.*mesh.get_group"):
        ring_attend(q, k, v, group=init_device_mesh("cpu", (1,)))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="mesh is NoneType: expected a DeviceMesh"):
        attend_on_mesh(q, k, v, mesh=None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match=r"offset is torch.int64 \[2\]: expected an int"):
        ring_attend(q, k, v, offset=torch.tensor([0, 1]))  # pyright: ignore[reportArgumentType]
    for layout in (None, "zigzag"):
        with pytest.raises(ProblemError, match=f"layout is {layout!r}: expected a Layout"):
            attend_sharded(q, k, v, layout=layout)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="layout is 'zigzag': expected a Layout"):
        ShardedCache().append(k, v, layout="zigzag")  # pyright: ignore[reportArgumentType]
    for function in (ring_attend, ulysses_attend, partial(attend_sharded, layout=Layout.contiguous(53, 1))):
        with pytest.raises(ProblemError, match="q is ndarray: expected a tensor"):
            function(q.numpy(), k, v)
    with pytest.raises(ProblemError, match="k is NoneType: expected a tensor"):
        attend_sharded(q, None, v, layout=Layout.contiguous(53, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="is for inference, and a tensor requires a gradient"):
        attend_sharded(q.clone().requires_grad_(), k, v, layout=Layout.contiguous(53, 1))
    with pytest.raises(ProblemError, match="k has 53 tokens on rank 0 of the group, and layout gives it 54 of 54"):
        attend_sharded(q, k, v, layout=Layout.contiguous(54, 1))
    with pytest.raises(ProblemError, match="expected an empty one that keeps every token"):
        ShardedCache(KVCache(Rolling(window=8)))
    with pytest.raises(ProblemError, match=r"^cache is str: expected the KVCache that stores this rank's tokens"):
        ShardedCache("paged")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ProblemError, match="attend over an empty ShardedCache"):
        ShardedCache().attend(q)
    with pytest.raises(ProblemError, match=r"crop\(3\): expected 0 to 0"):
        ShardedCache().crop(3)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("layout", [None, Layout.contiguous(53, 1)])
def test_what_is_appended_is_checked_as_in_a_cache_of_one_process(layout: Layout | None):
    _, k, v = qkv()
    wrong: list[Any] = [(k.numpy(), v), (k, v.numpy()), (k[0], v[0]), (k, None), (k, v[:, :, :9])]
    for pair in wrong:
        with pytest.raises(ProblemError) as expected:
            KVCache().append(*pair)
        cache = ShardedCache()
        with pytest.raises(ProblemError, match=f"^{re.escape(str(expected.value))}$"):
            cache.append(*pair, layout=layout)
        assert cache.tokens == 0


@pytest.mark.usefixtures("alone")
def test_tokens_that_are_appended_one_at_a_time_are_remembered_as_one_run():
    """A list with an entry for each would make every step slower than the last."""
    cache = ShardedCache(block=4)
    for at in range(9):
        cache.append(*(t[:, :, at : at + 1] for t in qkv()[1:]))
    assert cache._runs == [(range(9), 0)]  # pyright: ignore[reportPrivateUsage]
    cache.crop(5)
    cache.append(*(t[:, :, 5:8] for t in qkv()[1:]))
    assert (cache.tokens, cache.counts) == (8, (8,))
    assert torch.equal(
        cache.attend(qkv()[0][:, :, 7:8]), attend(qkv()[0][:, :, 7:8], *(t[:, :, :8] for t in qkv()[1:]))
    )


@spec
class ByModule(Bias):
    """Reads a weight of a module, and one of its fields."""

    rate: Tensor
    module: torch.nn.Module

    def value(self, b: Any, h: Any, q: Any, k: Any) -> Tensor:
        return self.rate * self.module((q - k).float()[..., None])[..., 0]


@pytest.mark.usefixtures("alone")
def test_a_weight_that_a_bias_reads_and_has_not_is_refused_where_it_learns():
    module, rate = torch.nn.Linear(1, 1), torch.ones((), requires_grad=True)
    with pytest.raises(RefusalError, match=r"ByModule\(.*is none of its fields.*Make it a field of the bias\.$"):
        ring_attend(*qkv(), bias=ByModule(rate, module))
    with torch.no_grad():
        ring_attend(*qkv(), bias=ByModule(rate, module))
    ring_attend(*qkv(), bias=ByModule(rate, module.requires_grad_(requires_grad=False))).sum().backward()
    assert rate.grad is not None


@pytest.mark.usefixtures("alone")
def test_latent_attention_takes_projections_by_columns():
    mesh = init_device_mesh("cpu", (1,))
    module = LatentAttention(24, 4, kv_rank=6, nope_dim=5, rope_dim=4, v_dim=3, position=Rope(4))
    x = torch.randn(2, 7, 24)
    expected, names = module(x), ("q_proj", "k_up", "v_up")
    plan: dict[str, Any] = {**{name: ColwiseParallel() for name in names}, "o_proj": RowwiseParallel()}
    torch.testing.assert_close(parallelize_module(module, mesh, plan)(x), expected)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Shard(2)])
def test_dtensors_are_rotated_by_their_positions_in_the_whole(placement: Any, interleaved: bool):
    mesh, x = init_device_mesh("cpu", (1,)), torch.randn(2, 4, 7, 8)
    rope = Rope(8, interleaved=interleaved, fraction=0.5)
    for positions in (None, 5, torch.arange(3, 10), torch.arange(14).view(2, 7)):
        sharded: Any = distribute_tensor(x, mesh, [placement]).requires_grad_()
        found: Any = rope.rotate(sharded, positions)
        found.sum().backward()
        assert found.placements == (placement,)
        torch.testing.assert_close(found.full_tensor(), rope.rotate(x, positions))
        whole = x.clone().requires_grad_()
        rope.rotate(whole, positions).sum().backward()
        torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad)


@pytest.mark.usefixtures("alone")
def test_derivatives_of_what_is_gathered_are_refused_in_words_where_there_are_none():
    shard, x = ContextShard(Layout.contiguous(5, 1), 0, None), torch.randn(1, 5, 3, requires_grad=True)
    (grad,) = torch.autograd.grad(shard.unshard(x.square()).square().sum(), x, create_graph=True)
    torch.testing.assert_close(grad, 4 * x**3)
    with pytest.raises(RefusalError, match="the gradient of unshard was differentiated, and a second derivative would"):
        grad.sum().backward()
    for function, name in ((shard.unshard, "unshard"), (shard.sum, "the sum over ranks")):
        with forward_ad.dual_level(), pytest.raises(RefusalError, match=f"{name} got a tensor with a tangent"):
            function(forward_ad.make_dual(x.detach(), torch.ones_like(x)))
