"""Observing: calls are told apart by layer, looked at as they pass, and only what was asked for stays."""

import gc
import weakref

import pytest
import torch
from torch import nn

from regard import Causal, attend
from regard.attend import watching
from regard.inspect import observe


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.project = nn.Linear(dim, dim)

    def forward(self, x):
        q = self.project(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return attend(q, q, q, mask=Causal()).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Layers 0 to 2, of which the second is run twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(6) for _ in range(3)])

    def forward(self, x):
        for number in (0, 1, 1, 2):
            x = x + self.layers[number](x)
        return x


class Plain(Model):
    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


def layers(seen):
    return [(s.layer, s.module) for s in seen]


def test_layers_are_the_numbers_in_the_paths_of_modules():
    model = Plain()
    with observe(model) as seen:
        model(torch.randn(1, 5, 6))
        model(torch.randn(1, 5, 6))
    assert layers(seen) == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")] * 2


def test_a_module_that_runs_twice_in_a_forward_is_two_layers():
    model = Model()
    with observe(model) as seen:
        model(torch.randn(1, 5, 6))
    assert [layer for layer, _ in layers(seen)] == [0, 1, 2, 2]


def test_without_a_model_calls_are_numbered_as_they_come():
    x = torch.randn(1, 2, 5, 3)
    with observe() as seen:
        attend(x, x, x)
        attend(x, x, x, mask=Causal())
    assert layers(seen) == [(0, None), (1, None)]
    assert seen[0].value.previous.value.shape == (1, 2)
    assert seen[1].value.breadth.entropy.value.max() < seen[0].value.breadth.entropy.value.min()


def test_what_was_not_asked_for_is_let_go():
    model, queries = Plain(), []
    with watching(lambda call: queries.append(weakref.ref(call.q))), observe(model, lambda look: look.layer) as seen:
        model(torch.randn(1, 5, 6))
    gc.collect()
    assert [s.value for s in seen] == [0, 1, 2]
    assert [reference() for reference in queries] == [None] * 3


def test_after_the_block_nothing_is_observed_and_no_hook_is_left():
    model = Plain()
    with observe(model) as seen:
        pass
    model(torch.randn(1, 5, 6))
    assert seen == []
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_forward_that_fails_half_way_does_not_confuse_the_next():
    model = Plain()

    def fail(module, arguments):
        raise RuntimeError

    broken = model.layers[1].register_forward_pre_hook(fail)
    with observe(model, lambda look: None) as seen:
        with pytest.raises(RuntimeError):
            model(torch.randn(1, 5, 6))
        broken.remove()
        model(torch.randn(1, 5, 6))
    assert layers(seen) == [(0, "layers.0"), (0, "layers.0"), (1, "layers.1"), (2, "layers.2")]
