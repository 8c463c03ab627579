"""Held words: their tensors are the module's, wherever the module goes."""

import copy
import pickle
from dataclasses import field
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.prune import l1_unstructured

from regard import Alibi, Causal, Documents, KeyLengths, ProblemError, T5Bias, TensorBias, TensorMask, attend
from regard.extend import Bias, spec
from regard.nn import SpecModule


def trained(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Scores(nn.Module):
    """The least module with a held bias."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.bias = SpecModule(T5Bias(table))

    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, bias=self.bias.spec)


def test_a_frozen_parameter_can_be_trained_later():
    held = SpecModule(T5Bias(nn.Parameter(torch.zeros(32, 2), requires_grad=False)))
    held.requires_grad_(True)
    assert held.spec.table.requires_grad


def test_a_pruned_table_is_trained():
    module, q = Scores(trained(32, 3)), torch.randn(1, 3, 5, 4)
    l1_unstructured(module.bias, "table", 0.5)
    steps = torch.optim.SGD(module.parameters(), 0.1)
    for _ in range(2):
        steps.zero_grad()
        module(q).square().sum().backward()
        steps.step()
    kept = cast(Tensor, module.bias.table_orig) * cast(Tensor, module.bias.table_mask)
    torch.testing.assert_close(module(q), attend(q, q, q, bias=T5Bias(kept)), rtol=0, atol=0)


def test_what_requires_gradients_is_a_parameter_and_the_rest_a_buffer():
    table = trained(32, 3)
    held = SpecModule(T5Bias(table) + TensorBias(torch.zeros(5, 5)))
    assert dict(held.named_parameters())["a_table"] is table
    assert [name for name, _ in held.named_buffers()] == ["b_tensor"]
    leaf = torch.zeros(32, 3, requires_grad=True)
    assert next(SpecModule(T5Bias(leaf)).parameters()).data_ptr() == leaf.data_ptr()


def test_a_spec_without_tensors_is_returned_as_it_is():
    word = Causal()
    assert SpecModule(word).spec is word
    assert list(SpecModule(Alibi(3)).state_dict()) == []


def test_the_spec_is_made_of_the_present_tensors():
    module = Scores(trained(32, 3))
    assert module.bias.spec.table.dtype == torch.float32
    module.to(torch.float64)
    assert module.bias.spec.table.dtype == torch.float64
    assert module.bias.spec.table is module.bias.table
    assert module.bias.spec == module.bias.spec
    assert SpecModule(KeyLengths(torch.tensor([3]))).to("meta").spec.lengths.is_meta


@spec
class OwnRate(Bias):
    """A rate of each head for distances, and one for the token itself: both paths are `rate_0`."""

    rate: tuple[torch.Tensor, ...]
    rate_0: torch.Tensor

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.rate[0][h] * (q - k) + self.rate_0[h] * (q == k)


def test_tensors_of_one_path_have_two_names():
    module = SpecModule(OwnRate((trained(3),), trained(3)))
    assert [name for name, _ in module.named_parameters()] == ["rate_0", "rate_0_"]
    assert module.spec.rate[0] is module.rate_0
    assert module.spec.rate_0 is module.rate_0_
    other = SpecModule(OwnRate((trained(3),), trained(3)))
    other.load_state_dict(module.state_dict())
    assert other.spec == module.spec


@pytest.mark.parametrize("name", ["half", "type", "forward", "training", "spec"])
@pytest.mark.parametrize("learned", [True, False])
def test_a_field_may_have_the_name_of_an_attribute_of_modules(name: str, learned: bool):
    word: Any = spec(type("Word", (Bias,), {"__annotations__": {name: torch.Tensor}}))
    module = SpecModule(word(torch.randn(3, requires_grad=learned)))
    assert list(module.state_dict()) == [f"{name}_"]
    assert getattr(module.double().spec, name) is getattr(module, f"{name}_")
    assert module.training is True


def test_a_copy_has_a_table_of_its_own():
    module = Scores(trained(32, 3))
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(other.bias.spec.table, module.bias.spec.table)
        assert other.bias.spec.table is not module.bias.spec.table
        assert isinstance(other.bias.spec.table, nn.Parameter)


def test_a_state_dict_brings_the_table():
    one, other, q = Scores(trained(32, 3)), Scores(trained(32, 3)), torch.randn(1, 3, 7, 8)
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(q), other(q))


def test_a_table_in_a_module_learns():
    """Towards a table that the scores were made with; the same again after deepcopy and .to(float64)."""
    q, truth = torch.randn(1, 3, 13, 8), Scores(trained(32, 3))
    goal = truth(q).detach()
    for dtype in (torch.float32, torch.float64):
        module = copy.deepcopy(Scores(nn.Parameter(torch.zeros(32, 3)))).to(dtype)
        optimiser, losses = torch.optim.Adam(module.parameters(), lr=0.1), []
        for _ in range(30):
            loss = (module(q.to(dtype)) - goal.to(dtype)).square().mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        assert losses[-1] < losses[0] / 20


def test_layers_can_share_one():
    shared = SpecModule(T5Bias(trained(32, 3)))
    one, other = Scores(trained(32, 3)), Scores(trained(32, 3))
    one.bias = other.bias = shared
    both = copy.deepcopy(nn.ModuleList([one, other]))
    assert len(list(both.parameters())) == 1
    assert both[0].bias is both[1].bias


def test_a_tensor_that_occurs_twice_is_kept_once():
    ids, table = torch.tensor([0, 0, 1]), trained(32, 3)
    assert list(SpecModule(Documents(ids) | ~Documents(ids)).state_dict()) == ["a_ids"]
    one, other = SpecModule(T5Bias(table) + T5Bias(table)).spec.terms()
    assert one.tensors()[0] is other.tensors()[0]


class Two(NamedTuple):
    near: torch.Tensor
    far: torch.Tensor


@spec
class Rates(Bias):
    rates: tuple[torch.Tensor, ...]
    scale: float = field(default=1.0, kw_only=True)

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        distance = (q - k).abs()
        return -self.scale * (self.rates[0][h] * distance + self.rates[1][h] * torch.log1p(distance.float()))


@pytest.mark.parametrize("pair", [lambda *rates: rates, Two], ids=["tuple", "NamedTuple"])
def test_the_tensors_of_a_tuple_are_named_by_their_place(pair: Any):
    near, far = trained(3), trained(3)
    held = SpecModule(Rates(pair(near, far), scale=0.5))
    assert dict(held.named_parameters()) == {"rates_0": near, "rates_1": far}
    assert list(SpecModule(Rates(pair(near, far)) + Alibi(3)).state_dict()) == ["a_rates_0", "a_rates_1"]
    assert held.spec == Rates(pair(near, far), scale=0.5)
    assert type(held.spec.rates) is type(pair(near, far))
    assert held.to(torch.float64).spec.rates[1].dtype == torch.float64


def test_a_tuple_with_a_field_by_name_is_traced_whole_and_learns():
    held, q = SpecModule(Rates((trained(3), trained(3)), scale=0.5)), torch.randn(1, 3, 7, 8)

    def run(q: torch.Tensor) -> torch.Tensor:
        return attend(q, q, q, bias=held.spec)

    for one in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        held.zero_grad()
        out: torch.Tensor = one(q)
        torch.testing.assert_close(out, attend(q, q, q, bias=held.spec, backend="reference"))
        out.square().sum().backward()
        assert all(parameter.grad is not None for parameter in held.parameters())


def test_another_tensor_can_stand_in_for_a_parameter():
    module, q, other = Scores(trained(32, 3)), torch.randn(1, 3, 7, 8), torch.randn(32, 3)
    module(q)
    found = torch.func.functional_call(module, {"bias.table": other}, (q,))
    assert torch.equal(found, attend(q, q, q, bias=T5Bias(other)))


def test_what_was_computed_from_others_is_refused():
    with pytest.raises(ProblemError, match=r"table was computed from other tensors.*detach"):
        SpecModule(T5Bias(trained(32, 3) * 2))


@spec
class Hidden(TensorMask):
    """A table of what is hidden."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask", ~self.mask)


@spec
class Triangle(TensorMask):
    def __init__(self, tokens: int) -> None:
        super().__init__(torch.ones(tokens, tokens, dtype=torch.bool).tril())


@spec
class Turned(TensorBias):
    """It has an attribute that it derives."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "turned", self.tensor.mT)

    def value(self, b: Any, h: Any, q: Any, k: Any) -> torch.Tensor:
        return self.__dict__["turned"][q, k]


TABLE = torch.rand(7, 7) > 0.6
USERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "changes a field": ({"mask": Hidden(TABLE)}, {"mask": TensorMask(~TABLE)}),
    "has other arguments": ({"mask": Triangle(7)}, {"mask": Causal()}),
    "derives an attribute": ({"bias": Turned(TABLE.float())}, {"bias": TensorBias(TABLE.T.float())}),
}


@pytest.mark.parametrize("name", USERS)
def test_a_spec_whose_constructor_is_a_users_stays_as_it_is_in_modules_and_traces(name: str):
    q, (own, plain) = torch.randn(1, 2, 7, 8), USERS[name]
    expected = attend(q, q, q, **plain)
    stored = {kind: SpecModule(part).spec for kind, part in own.items()}
    torch.testing.assert_close(attend(q, q, q, **stored), expected)
    traced = torch.compile(lambda q: attend(q, q, q, **own), fullgraph=True, backend="eager")
    torch.testing.assert_close(traced(q), expected)


def test_only_specs_become_modules():
    with pytest.raises(ProblemError, match=r"takes a spec.*got Tensor"):
        SpecModule(torch.zeros(3))


def test_it_is_traced_whole():
    module, q = Scores(trained(32, 3)), torch.randn(1, 3, 7, 8)
    traced = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(traced(q), module(q))
    traced(q).sum().backward()
    assert module.bias.spec.table.grad is not None


def test_a_tensor_given_to_several_layers_is_trained_once():
    bias = T5Bias(torch.zeros(8, 4, requires_grad=True))
    layers = [SpecModule(bias) for _ in range(3)]
    (table,) = torch.nn.ModuleList(layers).parameters()
    table.data.add_(1)
    assert all(bool((layer.spec.table == 1).all()) for layer in layers)


@pytest.mark.parametrize(
    "change",
    [nn.Module.bfloat16, lambda m: m.requires_grad_(False), lambda m: m.to("meta")],
    ids=["converted", "frozen", "moved"],
)
def test_a_tensor_is_taken_as_given_though_another_module_has_changed_it(change):
    table = torch.randn(32, 3, requires_grad=True)
    earlier = change(SpecModule(T5Bias(table)))
    later, last = SpecModule(T5Bias(table)), SpecModule(T5Bias(table))
    assert later.table is not earlier.table
    assert later.table is last.table
    assert later.table.requires_grad
    assert (later.table.dtype, later.table.data_ptr()) == (table.dtype, table.data_ptr())
