"""A bias of a class outside regard: added by every backend, whatever it depends on."""

from typing import Any

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual
from torch.utils.checkpoint import checkpoint

from regard import Alibi, Causal, ProblemError, RefusalError, TensorBias, attend, explain
from regard.dispatch.choose import forget_plans
from regard.extend import Bias, spec
from regard.scores import Cosine
from tests.native.engines import ALL, PLAIN

Q, K, V = torch.randn(2, 3, 7, 8), torch.randn(2, 3, 11, 8), torch.randn(2, 3, 11, 8)


@spec
class Every(Bias):
    """`rate[h]` for each third key, plus 0.1 for each batch row."""

    rate: torch.Tensor

    def value(self, b, h, q, k):
        return self.rate[h] * (k % 3 == 0) + 0.1 * b


@spec
class Sometimes(Bias):
    """`rate[h]` times the distance, or times the key."""

    rate: torch.Tensor
    far: bool

    def value(self, b, h, q, k):
        return self.rate[h] * (q - k if self.far else k + 0 * q)

    def per_distance(self):
        return self.far


@spec
class LookedUp(Bias):
    """`rate[h, bucket[distance]]`."""

    rate: torch.Tensor
    bucket: torch.Tensor
    by_distance: bool

    def value(self, b, h, q, k):
        return self.rate[h, self.bucket[abs(q - k)]]

    def per_distance(self):
        return self.by_distance


@spec
class Wrong(Bias):
    """Of no shape of a call."""

    def value(self, b, h, q, k):
        return torch.zeros(5)


@pytest.mark.parametrize("engine", [None, "reference", PLAIN, *ALL])
def test_it_is_added_alone_and_beside_others(engine):
    rate = torch.tensor([1.0, -2.0, 3.0])
    table = Every(rate).value(*(torch.arange(n).view(-1, *[1] * i) for n, i in ((2, 3), (3, 2), (7, 1), (11, 0))))
    for mask in (None, Causal()):
        for others in (None, Alibi(3), TensorBias(torch.randn(1, 3, 7, 11))):
            bias, same = Every(rate), TensorBias(table.expand(2, 3, 7, 11))
            bias, same = (bias, same) if others is None else (bias + others, same + others)
            expected = attend(Q, K, V, mask=mask, bias=same, backend="reference64")
            assert torch.allclose(attend(Q, K, V, mask=mask, bias=bias, backend=engine), expected, atol=1e-5)


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("by_distance", [True, False])
def test_its_integers_stay_indices(engine, by_distance):
    rate, bucket = torch.randn(3, 4, requires_grad=True), torch.arange(11) % 4
    found = attend(Q, K, V, bias=LookedUp(rate, bucket, by_distance), backend=engine)
    table = rate[:, bucket[(torch.arange(4, 11)[:, None] - torch.arange(11)).abs()]]
    expected = attend(Q, K, V, bias=TensorBias(table[None]), backend="reference64")
    assert torch.allclose(found, expected, atol=1e-5)
    grads = (torch.autograd.grad(out.square().sum(), rate)[0] for out in (found, expected))
    torch.testing.assert_close(*grads, atol=1e-4, rtol=1e-4)


def test_gradients_flow_into_its_tensors():
    rates = [torch.tensor([1.0, -2.0, 3.0], requires_grad=True) for _ in range(2)]
    for rate, backend in zip(rates, (None, "reference"), strict=True):
        attend(Q, K, V, bias=Every(rate), backend=backend).square().sum().backward()
    assert torch.allclose(rates[0].grad, rates[1].grad, atol=1e-4)
    assert rates[0].grad.abs().min() > 0


def test_one_of_another_shape_is_refused():
    with pytest.raises(ProblemError, match=r"Wrong\(\): value\(b, h, q, k\) returned \[5\].*\[2, 3, 7, 11\]"):
        attend(Q, K, V, bias=Wrong())


def test_the_plan_says_that_it_is_computed_for_every_pair():
    rate = torch.tensor([1.0, -2.0, 3.0])
    message = "Every is computed for every query and key, as it has no per_distance"
    assert [str(s) for s in explain(Q, K, V, bias=Every(rate), backend=ALL[0]).steps] == [f"add_biases: {message}"]
    plan = explain(Q, K, V, bias=Alibi(3) + Every(rate) + TensorBias(torch.randn(11)), backend=ALL[0])
    assert [str(s) for s in plan.steps] == [f"add_biases: {message}; the 2 tensors of the bias are added into one"]
    assert explain(Q, K, V, bias=Alibi(3), backend=ALL[0]).steps == ()


def test_what_depends_on_the_distance_in_some_instances_alone_is_known_for_each():
    rate = torch.tensor([1.0, -2.0, 3.0])
    for far in (True, False):
        bias = Sometimes(rate, far)
        assert len(explain(Q, K, V, bias=bias, backend=ALL[0]).steps) == (not far)
        expected = attend(Q, K, V, bias=bias, backend="reference64")
        assert torch.allclose(attend(Q, K, V, bias=bias, backend=ALL[0]), expected, atol=1e-5)


@spec
class ByModule(Bias):
    """A multilayer perceptron of the distance, as in Swin v2 and FIRE: its weights are no fields."""

    module: torch.nn.Module
    by_distance: bool

    def value(self, b, h, q, k):
        return self.module(torch.log1p(abs(q - k))[..., None])[..., 0] * (1 + h)

    def per_distance(self):
        return self.by_distance


@spec
class Learned(Cosine):
    """A dot product of queries that a module multiplies: its weights are no fields."""

    module: torch.nn.Module

    def prepare(self, q, k):
        return self.module(q), k, None


@pytest.mark.parametrize("by_distance", [True, False])
@pytest.mark.parametrize("learns", ["queries", "nothing else"])
@pytest.mark.parametrize("engine", [None, "reference", PLAIN, *ALL])
def test_weights_that_are_no_fields_learn(engine, learns, by_distance):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
    q = Q.clone().requires_grad_(learns == "queries")
    bias = ByModule(module, by_distance)

    def gradients(out: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(out.square().sum(), list(module.parameters())))

    at = torch.arange(4, 11)[:, None], torch.arange(11)
    table = bias.value(0, torch.arange(3)[:, None, None], *at)
    right = gradients((Q @ K.mT / 8**0.5 + table).softmax(-1) @ V)
    for _ in range(2):  # the plan is new, and then known
        for one, other in zip(gradients(attend(q, K, V, bias=bias, backend=engine)), right, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_weights_that_are_frozen_and_thawed_learn_when_they_do():
    module = torch.nn.Linear(1, 1)
    for learns in (False, True, False, True):
        module.requires_grad_(learns)
        assert attend(Q, K, V, bias=ByModule(module, True)).requires_grad == learns
        with torch.no_grad():
            assert not attend(Q, K, V, bias=ByModule(module, True)).requires_grad


def test_weights_that_a_score_reads_learn():
    module = torch.nn.Linear(8, 8)
    out = attend(Q, K, V, score=Learned(module))
    (found,) = torch.autograd.grad(out.square().sum(), [module.weight])
    right = (module(Q) @ K.mT).softmax(-1) @ V
    (expected,) = torch.autograd.grad(right.square().sum(), [module.weight])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("kind", ["score", "bias", "bias by distance"])
def test_weights_that_are_no_fields_have_their_tangents(kind, learns):
    module = torch.nn.Linear(8, 8) if kind == "score" else torch.nn.Linear(1, 1)
    weight = module.requires_grad_(learns).weight
    if kind == "score":
        words = {"score": Learned(module)}
    else:
        words = {"bias": ByModule(module, kind == "bias by distance") + Alibi(3)}
    assert not explain(Q, K, V, **words).problem.transformed
    with dual_level():
        assert not explain(Q, K, V, **words).problem.transformed  # none of the weights has a tangent
        del module.weight
        module.weight = make_dual(weight.detach(), torch.ones_like(weight))
        found = unpack_dual(attend(Q, K, V, **words)).tangent
        expected = unpack_dual(attend(make_dual(Q, torch.zeros_like(Q)), K, V, **words)).tangent
        with pytest.raises(RefusalError, match="forward-mode"):
            attend(Q, K, V, **words, backend=ALL[0])
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(found, expected)


@spec
class Looking(ByModule):
    """Of a value that looks at the axes of its positions, and has a module that counts its calls."""

    def value(self, b, h, q, k):
        assert (q - k).shape[-1] > 1
        return super().value(b, h, q, k)


@pytest.mark.parametrize("by_distance", [True, False])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_recomputed_call_gives_weights_that_are_no_fields_their_gradients(is_known, by_distance):
    forget_plans()
    module = torch.nn.Linear(1, 1)
    bias = Looking(module, by_distance)

    def call(q: torch.Tensor) -> torch.Tensor:
        return attend(q, K, V, bias=bias)

    if is_known:
        call(Q)
    expected = torch.autograd.grad(call(Q).square().sum(), list(module.parameters()))
    again = checkpoint(call, Q, use_reentrant=False)
    for one, other in zip(torch.autograd.grad(again.square().sum(), list(module.parameters())), expected, strict=True):
        assert torch.equal(one, other)


def test_no_value_is_computed_to_know_whether_it_learns():
    seen: list[torch.Size] = []
    module = torch.nn.Linear(1, 1)
    module.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    q = torch.empty(2, 3, 7, 8, device="meta")
    explain(q, q, q, bias=ByModule(module, True))
    assert not seen
    attend(Q, K, V, bias=ByModule(module, True))
    assert len(seen) == 1


GLOBAL = torch.ones(3)


@spec
class Held(Bias):
    """Reads what a field holds, and a variable of its module."""

    held: Any

    def value(self, b, h, q, k):
        return self.held[0] * GLOBAL[h]


def test_what_may_learn_is_known_without_computing_a_value():
    rate, learned = torch.ones(3), torch.ones(3, requires_grad=True)
    assert not (Sometimes(rate, True) + Alibi(3)).may_learn()
    assert (Sometimes(learned, True) + Alibi(3)).may_learn()
    assert not ByModule(torch.nn.Linear(1, 1).requires_grad_(False), True).may_learn()
    for learned_by_module in (True, False):
        term = ByModule(torch.nn.Linear(1, 1).requires_grad_(learned_by_module), True)
        assert [s.may_learn() for s in (term, term + Alibi(3), Alibi(3) + term, Held([term]))] == [
            learned_by_module
        ] * 4
    assert [Held(held).may_learn() for held in ([rate], [learned], {0: learned}, iter([rate]))] == [
        False,
        True,
        True,
        True,
    ]
    GLOBAL.requires_grad_(True)
    assert Held([rate]).may_learn()
    GLOBAL.requires_grad_(False)
