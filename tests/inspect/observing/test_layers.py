"""Layers and modules of calls, from the hooks of a forward pass; and nothing that stays on the model."""

import threading
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from torch import nn

from regard import Causal, attend
from regard.inspect.observing.layers import layer_number, track_layers


class Attention(nn.Module):
    """Attends, as often as asked, and tells `place` where."""

    def __init__(self, called, times=1):
        super().__init__()
        self.called, self.times = called, times

    def forward(self, x):
        for _ in range(self.times):
            self.called()
        return x


class Model(nn.Module):
    """Runs the modules of `layers` in a given order."""

    def __init__(self, layers, order):
        super().__init__()
        self.layers, self.order = layers, order

    def forward(self, x):
        for number in self.order:
            x = self.layers[number](x)
        return x


def places(make, order, times=1, forwards=1):
    """Where the calls of a model are, in order."""
    found = []
    model = make(lambda: Attention(lambda: found.append(here.next()), times), order)
    with track_layers(model) as here:
        for _ in range(forwards):
            model(torch.zeros(1))
    return found


def listed(attention, order):
    return Model(nn.ModuleList([attention() for _ in range(3)]), order)


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("model.layers.3.self_attn", 3),
        ("encoder.block.0.layer.1.SelfAttention", 0),
        ("bert2.encoder.layer.5.attention", 5),
        ("h2o.layers.11", 11),
        ("layer4.attention", 4),
        ("12", 12),
        ("encoder.attention", None),
        ("", None),
    ],
)
def test_the_number_of_a_path_is_the_first_that_stands_alone_else_the_first_digits(path, number):
    assert layer_number(path) == number


def test_layers_are_the_numbers_in_the_paths_of_modules():
    assert places(listed, (0, 1, 2)) == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")]


def test_each_forward_pass_begins_anew():
    assert [layer for layer, _ in places(listed, (0, 1, 2), forwards=2)] == [0, 1, 2, 0, 1, 2]


def test_a_module_that_runs_again_in_a_forward_is_another_layer():
    assert [layer for layer, _ in places(listed, (0, 1, 1, 2))] == [0, 1, 2, 2]


def test_a_module_that_attends_twice_in_one_run_is_one_layer():
    assert [layer for layer, _ in places(listed, (0, 1), times=2)] == [0, 0, 1, 1]


def test_modules_without_numbers_count_on():
    def named(attention, order):
        return Model(nn.ModuleDict({name: attention() for name in order}), order)

    found = places(named, ("first", "second"), times=2)
    assert found == [(0, "layers.first"), (1, "layers.first"), (2, "layers.second"), (3, "layers.second")]


def test_forward_passes_are_counted():
    model = listed(lambda: Attention(lambda: None), (0, 1))
    with track_layers(model) as here:
        for _ in range(3):
            model(torch.zeros(1))
        assert here.forwards == 3


def test_without_a_model_calls_are_counted():
    with track_layers(None) as here:
        assert [here.next(), here.next()] == [(0, None), (1, None)]
        assert not here.forwards


def test_a_call_outside_of_the_model_is_in_no_layer():
    found = []
    model = listed(lambda: Attention(lambda: found.append(here.next())), (0, 1, 2))
    with track_layers(model) as here:
        assert here.next() is None
        model(torch.zeros(1))
        assert here.next() is None
    assert found == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")]


def test_another_thread_that_runs_the_model_meanwhile_changes_nothing():
    found, half_way, done = [], threading.Event(), threading.Event()

    def called():
        if threading.current_thread() is other:
            half_way.set()
            assert done.wait(timeout=60)
        else:
            if other.ident is None:
                other.start()
                assert half_way.wait(timeout=60)
            found.append(here.next())

    model = listed(lambda: Attention(called), (0, 1, 2))
    other = threading.Thread(target=model.layers[1], args=(torch.zeros(1),))
    with track_layers(model) as here:
        model(torch.zeros(1))
        assert here.forwards == 1
        done.set()
        other.join()
    assert found == [(0, "layers.0"), (1, "layers.1"), (2, "layers.2")]


@pytest.mark.parametrize("part", [lambda model: model, lambda model: model.layers[1]], ids=["model", "layer"])
def test_a_forward_that_is_interrupted_does_not_confuse_the_next(part):
    found = []
    model = listed(lambda: Attention(lambda: found.append(here.next())), (0, 1, 1, 2))

    def interrupt(module, arguments, output):
        raise KeyboardInterrupt  # torch calls no hooks then

    def run():
        part(model)(torch.zeros(1))
        model(torch.zeros(1))

    with track_layers(model) as here:
        hook = model.layers[1].register_forward_hook(interrupt, prepend=True)
        with pytest.raises(KeyboardInterrupt):
            run()
        hook.remove()
        found.clear()
        run()
        assert here.forwards == 3
    interrupted = found.copy()
    found.clear()
    with track_layers(model) as here:
        run()
    assert found == interrupted


class InHalves(Model):
    """Runs on each half of a long input first."""

    def forward(self, x):
        if len(x) > 1:
            x = torch.cat([self(half) for half in x.chunk(2)])
        return super().forward(x)


@pytest.mark.parametrize(
    "within", [lambda model: model, lambda model: nn.Sequential(OrderedDict(inner=model))], ids=["itself", "in another"]
)
def test_a_model_that_runs_itself_loses_no_calls(within):
    found = []
    layers = nn.ModuleList([Attention(lambda: found.append(here.next())) for _ in range(2)])
    model = within(InHalves(layers, (0, 1)))
    with track_layers(model) as here:
        model(torch.zeros(2))
        assert here.forwards == 1
        assert here.next() is None
    assert [layer for layer, _ in found] == [0, 1, 2, 3, 4, 5]
    assert [path.rpartition("layers.")[2] for _, path in found] == ["0", "1"] * 3


def test_a_model_that_runs_itself_and_is_interrupted_does_not_confuse_the_next():
    found = []
    layers = nn.ModuleList([Attention(lambda: found.append(here.next())) for _ in range(2)])
    model = InHalves(layers, (0, 1))

    def interrupt(module, arguments):
        raise KeyboardInterrupt

    with track_layers(model) as here:
        hook = layers[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(2))
        hook.remove()
        found.clear()
        model(torch.zeros(2))
        assert here.forwards == 2
    assert [layer for layer, _ in found] == [0, 1, 2, 3, 4, 5]


def test_a_forward_that_fails_half_way_does_not_confuse_the_next():
    found = []
    model = listed(lambda: Attention(lambda: found.append(here.next())), (0, 1, 2))

    def fail(module, arguments):
        raise RuntimeError

    broken = model.layers[1].register_forward_pre_hook(fail)
    with track_layers(model) as here:
        with pytest.raises(RuntimeError):
            model(torch.zeros(1))
        broken.remove()
        model(torch.zeros(1))
    assert [layer for layer, _ in found] == [0, 0, 1, 2]


class Forgiving(Model):
    """Goes on where a layer fails."""

    def forward(self, x):
        for number in self.order:
            with suppress(RuntimeError):
                x = self.layers[number](x)
        return x


def test_a_layer_that_fails_and_is_forgiven_does_not_end_the_forward():
    found = []
    model = Forgiving(nn.ModuleList([Attention(lambda: found.append(here.next())) for _ in range(3)]), (0, 1, 0, 2))

    def fail(module, arguments):
        raise RuntimeError

    model.layers[1].register_forward_pre_hook(fail)
    with track_layers(model) as here:
        model(torch.zeros(1))
    assert [layer for layer, _ in found] == [0, 1, 2]  # the second run of layer 0 counts on


def hooks(model):
    return [hook for m in model.modules() for hook in (*m._forward_hooks.values(), *m._forward_pre_hooks.values())]


def test_no_hook_stays_also_after_an_error():
    model = listed(lambda: Attention(lambda: None), (0, 1))
    with track_layers(model):
        assert len(hooks(model)) == 2 * len(list(model.modules()))
    assert hooks(model) == []
    with pytest.raises(KeyError), track_layers(model):
        raise KeyError
    assert hooks(model) == []


class Compiled(nn.Module):
    def forward(self, x):
        return attend(x, x, x, mask=Causal())


def test_what_was_compiled_runs_uncompiled_within_and_its_paths_are_those_it_had():
    found: list[tuple[int, str | None]] = []
    model = nn.Sequential(Compiled(), Compiled())
    compiled = torch.compile(model, backend="eager")
    x = torch.randn(1, 2, 5, 4)
    compiled(x)
    model[1].register_forward_hook(lambda *_: found.append(here.next()))
    with track_layers(compiled) as here:
        compiled(x)
    assert found == [(1, "1")]


def test_afterwards_it_is_compiled_again():
    ran = []

    def backend(graph, inputs):
        return lambda *arguments: (ran.append(1), graph(*arguments))[1]

    compiled, x = torch.compile(Compiled(), backend=backend), torch.randn(1, 2, 5, 4)
    compiled(x)
    with track_layers(compiled):
        compiled(x)
    assert len(ran) == 1
    compiled(x)
    assert len(ran) == 2
