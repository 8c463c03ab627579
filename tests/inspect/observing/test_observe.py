"""Observing: calls are looked at as they pass, only what was asked for stays, and nothing of it outlives the block."""

import gc
import weakref
from inspect import unwrap

import numpy as np
import pytest
import torch
from torch import nn

from regard import Causal, attend
from regard import attend as front_door
from regard.calls import observe_calls
from regard.dispatch import ready
from regard.errors import ProblemError
from regard.inspect.observing.observe import Look, observe
from regard.scores import Additive


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return attend(q, q, q, mask=Causal()).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Layers 0 to 2."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(6) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def layers(seen):
    return [(s.layer, s.module) for s in seen]


def test_calls_are_kept_by_layer_and_module():
    model = Model()
    with observe(model) as seen:
        model(torch.randn(1, 5, 6))
        model(torch.randn(1, 7, 6))
    assert layers(seen) == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")] * 2
    assert [kept.weights.shape for kept in seen] == [(1, 2, 5, 5)] * 3 + [(1, 2, 7, 7)] * 3


def test_calls_of_another_model_are_not_those_of_the_model():
    model, other, x = Model(), Model(), torch.randn(1, 5, 6)
    with observe(model) as seen, observe(model, lambda look: None, layers=[0, 1]) as looked:
        other(x)
        model(x)
        other(x)
    assert layers(seen) == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")]
    assert layers(looked) == layers(seen)[:2]


def test_a_model_that_attends_in_no_forward_is_an_error_also_beside_another():
    model = nn.Linear(6, 6)
    message = r"Linear ran and none of its attention .* observe\(\) without a model"
    with pytest.raises(ProblemError, match=message), observe(model):
        Model()(model(torch.randn(1, 5, 6)))


def test_without_a_model_calls_are_numbered_as_they_come():
    x = torch.randn(1, 2, 5, 3)
    with observe() as seen:
        attend(x, x, x)
        attend(x, x, x, mask=Causal())
    assert layers(seen) == [(0, None), (1, None)]
    assert seen[1].weights.mask == Causal()


def test_what_is_asked_of_each_call_is_what_stays():
    model = Model()
    with observe(model, lambda look: (type(look), look.weights.shape[2])) as seen:
        model(torch.randn(1, 5, 6))
    assert [(s.layer, s.module, s.value) for s in seen] == [(i, f"layers.{i}", (Look, 5)) for i in range(3)]


@pytest.mark.parametrize(("wanted", "there"), [(1, [1]), ([0, 2], [0, 2]), (range(2), [0, 1]), ((), [])], ids=str)
def test_only_the_layers_asked_for_are_looked_at(wanted, there):
    model = Model()
    with observe(model, layers=wanted) as seen, observe(model, lambda look: None, layers=wanted) as looked:
        model(torch.randn(1, 5, 6))
    assert [s.layer for s in seen] == [s.layer for s in looked] == there


def test_layers_may_be_named_by_whatever_counts_as_an_integer():
    model = Model()
    with observe(model, layers=np.int64(1)) as one, observe(model, layers=[np.int32(0), torch.tensor(2)]) as two:
        model(torch.randn(1, 5, 6))
    with observe(model, layers=torch.tensor(1)) as also_one, observe(model, layers=[1, torch.tensor(1)]) as twice:
        model(torch.randn(1, 5, 6))
    assert [s.layer for s in one] == [s.layer for s in also_one] == [s.layer for s in twice] == [1]
    assert [s.layer for s in two] == [0, 2]


@pytest.mark.parametrize("layers", [1.5, "1", [0, 1.0], [True], [None], slice(0, 2), [slice(0, 2)], [[0], [1]]])
def test_what_is_no_number_of_a_layer_is_an_error(layers):
    with pytest.raises(ProblemError, match=r"layers is .*: expected the number of a layer or of several"):
        observe(Model(), layers=layers)


def test_a_layer_that_did_not_attend_is_an_error():
    model = Model()
    message = r"layers \[3, 9\] did not attend: layers \[0, 1, 2\] did"
    with pytest.raises(ProblemError, match=message), observe(model, layers=[1, 9, 3]):
        model(torch.randn(1, 5, 6))


def test_one_layer_lives_at_a_time():
    model, alive = Model(), []
    references = []

    def each(look):
        gc.collect()
        alive.append(sum(reference() is not None for reference in references))
        references.extend(weakref.ref(t) for t in (look, look.call.q, look.call.k, look.weights.q, look.call.out))
        return float(look.weights.rows(0, 1).sum())

    with torch.no_grad(), observe(model, each) as seen:
        model(torch.randn(1, 5, 6))
        gc.collect()
        assert [reference() for reference in references] == [None] * 15
    assert alive == [0, 0, 0]
    assert [s.value for s in seen] == pytest.approx([2, 2, 2])


def test_what_is_kept_takes_q_k_and_lse_and_no_more():
    model = Model()
    references = []
    with torch.no_grad(), observe_calls(lambda call: references.append(weakref.ref(call.out))), observe(model) as seen:
        model(torch.randn(1, 5, 6))
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    sizes = [w.untyped_storage().nbytes() // 4 for w in (seen[0].weights.q, seen[0].weights.k, seen[0].weights.lse)]
    assert sizes == [30, 30, 10]


def test_outside_the_block_nothing_is_seen_and_attend_takes_no_lse(monkeypatch):
    scope = unwrap(front_door).__globals__
    asked, prepare = [], scope["prepare"]

    def spy(*args, **kwargs):
        asked.append(args[0].lse)
        return prepare(*args, **kwargs)

    monkeypatch.setitem(scope, "prepare", spy)
    monkeypatch.setattr(ready, "run", lambda *call: (None, None))  # a ready call is not prepared
    model, x = Model(), torch.randn(1, 5, 6)
    model(x)
    with observe(model) as seen:
        model(x)
    model(x)
    assert asked == [False] * 3 + [True] * 3 + [False] * 3
    assert len(seen) == 3
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_observing_changes_no_bit_of_what_the_model_gives():
    model, x = Model(), torch.randn(2, 37, 6)
    plain = model(x)
    with observe(model, values=True):
        assert torch.equal(model(x), plain)


def test_gradients_flow_as_if_nobody_looked():
    model, x = Model(), torch.randn(1, 5, 6)
    first = next(model.parameters())
    (plain,) = torch.autograd.grad(model(x).sum(), first)
    with observe(model) as seen:
        (watched,) = torch.autograd.grad(model(x).sum(), first)
    torch.testing.assert_close(watched, plain)
    assert not any(kept.weights.q.requires_grad for kept in seen)


def test_observers_may_be_nested():
    x = torch.randn(1, 2, 5, 3)
    with observe() as outer:
        attend(x, x, x)
        with observe(each=lambda look: look.layer) as inner:
            attend(x, x, x)
    assert layers(outer) == [(0, None), (1, None)]
    assert [s.value for s in inner] == [0]


def test_an_error_in_each_is_the_caller_s_and_ends_the_observation():
    model, x = Model(), torch.randn(1, 5, 6)
    with pytest.raises(ZeroDivisionError), observe(model, lambda look: 1 // look.layer) as seen:
        model(x)
    model(x)
    assert seen == []


def test_what_compares_by_no_dot_product_can_be_looked_at_but_not_kept():
    x = torch.randn(1, 2, 5, 3)
    additive = Additive(torch.randn(4, 3), torch.randn(4, 3), torch.randn(4))
    with observe(each=lambda look: look.call.lse.shape) as seen:
        attend(x, x, x, score=additive)
    assert seen[0].value == (1, 2, 5)
    with pytest.raises(ProblemError, match="dot products only"), observe():
        attend(x, x, x, score=additive)


@pytest.mark.parametrize("how", [{"values": True}, {"to": "cpu"}], ids=str)
def test_how_calls_are_kept_is_not_printed_where_none_is(how):
    with pytest.raises(ProblemError, match="say how calls are recorded"):
        observe(None, lambda look: None, **how)


class Elsewhere(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x)


def test_a_model_whose_attention_is_not_regard_s_is_an_error():
    model = Elsewhere()
    with pytest.raises(ProblemError, match=r"Elsewhere ran and none of its attention .* use_regard"), observe(model):
        model(torch.randn(1, 2, 5, 3))


def test_a_block_in_which_nothing_runs_is_fine():
    with observe(Model()) as seen:
        pass
    assert seen == []


def test_a_model_compiled_before_is_seen():
    model, x = Model(), torch.randn(1, 5, 6)
    compiled = torch.compile(model, backend="eager")
    compiled(x)
    with observe(compiled) as seen, observe(model) as within:
        compiled(x)
    assert layers(seen) == layers(within) == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")]


def test_a_bare_function_compiled_before_is_seen():
    compiled = torch.compile(lambda x: attend(x, x, x), backend="eager", fullgraph=True)
    compiled(torch.randn(1, 2, 5, 3))
    with observe() as seen:
        compiled(torch.randn(1, 2, 5, 3))
    assert len(seen) == 1


def test_a_traced_graph_of_a_model_is_not_seen_and_says_so():
    exported = torch.export.export(Model(), (torch.randn(1, 5, 6),)).module()
    with pytest.raises(ProblemError, match="none of its attention was observed"), observe(exported):
        exported(torch.randn(1, 5, 6))


@pytest.mark.parametrize(
    ("given", "says"),
    [(5, "model is 5: .*; say layers="), ([0, 2], r"model is \[0, 2\]: .*; say layers="), (print, "; say each=")],
)
def test_what_is_no_model_is_answered_with_the_argument_that_it_may_be(given, says):
    with pytest.raises(ProblemError, match=says):
        observe(given)


@pytest.mark.parametrize(("each", "reason"), [(3, "3"), ("weights", "'weights'"), (0, "0")])
def test_each_is_a_function(each, reason):
    with pytest.raises(ProblemError, match=f"each is {reason}: expected a function of a Look, as lambda"):
        observe(Model(), each)


def test_a_call_inside_of_vmap_is_not_recorded():
    q = torch.randn(2, 1, 2, 5, 4)
    with observe(), pytest.raises(ProblemError, match=r"inside of torch\.vmap cannot be recorded"):
        torch.vmap(lambda q: attend(q, q, q))(q)
