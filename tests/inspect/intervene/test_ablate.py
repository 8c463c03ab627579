"""Taking heads out: exactly what zeroing the output projection's input does, and nothing where nothing is named."""

import itertools
from functools import partial

import pytest
import torch

from regard import Causal, attend
from regard.errors import ProblemError
from regard.inspect.intervene.ablate import ablated, ablation_effects, effect_order, greedy
from regard.inspect.intervene.importance import importance
from regard.inspect.intervene.integrated import integrated
from regard.inspect.intervene.loss import Effect, next_token_loss
from regard.inspect.intervene.prune import prune_curve
from regard.inspect.intervene.replacement import Resample, mean_outputs, outputs_of
from regard.integrate.transformers import use_regard
from tests.inspect.intervene.models import DRAWN, decoder, dropping, texts
from tests.integrate import zoo

FAMILIES = {
    "llama": ("model.layers.1.self_attn.o_proj", 8),
    "gpt_oss": ("model.layers.1.self_attn.o_proj", 16),
    "gpt2": ("transformer.h.1.attn.c_proj", 8),
    "gpt_neox": ("gpt_neox.layers.1.attention.dense", 8),
    "deepseek_v3": ("model.layers.1.self_attn.o_proj", 12),
    "bert": ("bert.encoder.layer.1.attention.output.dense", 8),
}


@pytest.fixture(params=FAMILIES)
def family(request):
    """(model, ids, its output projection in layer 1, the width of a head there)."""
    model = zoo.model(request.param)
    use_regard(model)
    path, width = FAMILIES[request.param]
    return model, zoo.tokens(), model.get_submodule(path), width


def zeroed(heads, width):
    def hook(module, arguments):
        x = arguments[0].clone()
        for head in heads:
            x[..., head * width : (head + 1) * width] = 0
        return (x, *arguments[1:])

    return hook


def logits(model, ids):
    with torch.no_grad():
        return model(ids).logits


def test_ablating_nothing_changes_no_bit(family):
    model, ids, _, _ = family
    before = logits(model, ids)
    with ablated(model, []):
        assert torch.equal(logits(model, ids), before)


@pytest.mark.parametrize("heads", [[0], [1, 3], [0, 1, 2, 3]])
def test_ablating_by_zero_is_zeroing_the_input_of_the_output_projection(family, heads):
    model, ids, projection, width = family
    with ablated(model, [(1, head) for head in heads]):
        ours = logits(model, ids)
    hook = projection.register_forward_pre_hook(zeroed(heads, width))
    theirs = logits(model, ids)
    hook.remove()
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, logits(model, ids))


def test_a_part_of_the_output_projections_output_is_no_head():
    model, ids = zoo.model("llama"), zoo.tokens()
    use_regard(model)
    with ablated(model, [(1, 2)]):
        ours = logits(model, ids)
    hook = model.model.layers[1].self_attn.o_proj.register_forward_hook(lambda m, a, out: zeroed([2], 8)(m, (out,))[0])
    behind = logits(model, ids)
    hook.remove()
    assert (ours - behind).abs().max() > 1e-3


def test_a_function_that_calls_attend_can_be_ablated():
    q = torch.randn(1, 2, 5, 3)

    def twice():
        return attend(attend(q, q, q, mask=Causal()), q, q)

    with ablated(None, [(1, 0)]):
        out = twice()
    assert torch.equal(out[:, 0], torch.zeros(1, 5, 3))
    assert torch.equal(out[:, 1], twice()[:, 1])


def test_a_group_is_more_than_its_heads():
    model, ids = decoder(), texts()
    with ablated(model, [(0, 1)]), ablated(model, [(1, 2)]):
        nested = model(ids)
    with ablated(model, [(0, 1), (1, 2)]):
        assert torch.equal(model(ids), nested)


def test_gradients_pass_the_heads_that_are_left():
    model, ids = decoder(), texts()
    with ablated(model, [(1, 0), (1, 1)]):  # both that share value head 0
        next_token_loss(model)(ids).sum().backward()
    by_head = model.body.blocks[1].attention.v_proj.weight.grad.unflatten(0, (2, -1)).abs().amax((1, 2))
    assert by_head[0] == 0 < by_head[1]


def test_generation_with_a_cache_is_ablated_at_every_step():
    model, prompt = decoder(), texts(batch=1)
    with ablated(model, [(0, 1), (1, 3)]):
        written = model.generate(prompt, 6)
        whole = model(torch.cat([prompt, written], 1))
    assert torch.equal(whole[:, prompt.shape[1] - 1 : -1].argmax(-1), written)
    assert not torch.equal(written, model.generate(prompt, 6))


def test_generation_of_transformers_is_ablated_at_every_step():
    model, prompt = zoo.model("llama"), zoo.tokens(rows=1)
    use_regard(model)
    mean = mean_outputs(model, [zoo.tokens()], model)
    with torch.no_grad(), ablated(model, [(0, 1), (1, 3)], mean):
        ids = model.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None)
        whole = model(ids).logits
    assert torch.equal(whole[:, prompt.shape[1] - 1 : -1].argmax(-1), ids[:, prompt.shape[1] :])


def test_effects_are_losses_with_less_those_without():
    model, batches = decoder(), [texts(), texts(batch=3)]
    loss_of = next_token_loss(model)
    (effect,) = ablation_effects(model, batches, loss_of, [[(0, 1), (1, 2)]])
    with torch.no_grad(), ablated(model, [(0, 1), (1, 2)]):
        without = torch.cat([loss_of(batch) for batch in batches])
    assert torch.equal(effect.losses, without.double())
    assert effect.change == pytest.approx((without - effect.base).mean().item())
    low, high = effect.interval()
    assert low <= effect.change <= high


def test_every_head_is_taken_out_once_by_default():
    model = decoder()
    effects = list(ablation_effects(model, [texts()], next_token_loss(model)))
    assert [effect.heads for effect in effects] == [((layer, head),) for layer in (0, 1) for head in range(4)]


def test_a_batch_can_have_its_own_replacement():
    model, batches = decoder(), [texts(), texts(batch=3)]
    loss_of = next_token_loss(model)
    itself = lambda batch: Resample(outputs_of(model, lambda: model(batch)))  # noqa: E731
    (effect,) = ablation_effects(model, batches, loss_of, [[(0, 1), (1, 2)]], by=itself)
    assert torch.equal(effect.losses, effect.base)


def test_a_teacher_in_the_loss_is_not_ablated():
    model, teacher, ids = decoder(), decoder(), texts()

    def loss_of(batch):
        return (teacher(batch) - model(batch)).square().mean((1, 2))

    with ablated(model, [(0, 1)]):
        out = model(ids)
    (effect,) = ablation_effects(model, [ids], loss_of, [[(0, 1)]])
    assert torch.equal(effect.losses, (teacher(ids) - out).square().mean((1, 2)))


def test_dropout_is_refused_where_runs_are_compared():
    model, batches = dropping(), [texts()]
    loss_of = next_token_loss(model)
    for compared in (ablation_effects, greedy):
        with pytest.raises(ProblemError, match=DRAWN):
            next(compared(model, batches, loss_of))
    for compared in (integrated, partial(prune_curve, order=[(0, 1)])):
        with pytest.raises(ProblemError, match=DRAWN):
            compared(model, batches, loss_of)
    model.eval()
    assert len(list(ablation_effects(model, batches, loss_of))) == 8


def test_training_mode_without_dropout_is_no_obstacle():
    model, batches = decoder().train(), [texts()]
    assert len(list(ablation_effects(model, batches, next_token_loss(model)))) == 8


def test_greedy_takes_the_head_that_costs_least_each_time():
    model, batches = decoder(), [texts()]
    loss_of = next_token_loss(model)
    first, second = itertools.islice(greedy(model, batches, loss_of), 2)
    alone = list(ablation_effects(model, batches, loss_of))
    assert first.heads == effect_order(alone)[:1]
    pairs = [[*first.heads, one.heads[0]] for one in alone if one.heads != first.heads]
    assert second.change == min(effect.change for effect in ablation_effects(model, batches, loss_of, pairs))
    assert second.heads[:1] == first.heads


def test_greedy_can_be_confined_to_some_heads():
    model = decoder()
    *_, last = greedy(model, [texts()], next_token_loss(model), [(0, 1), (1, 2), (1, 3)])
    assert set(last.heads) == {(0, 1), (1, 2), (1, 3)}


def test_an_order_needs_single_heads():
    base = torch.zeros(3)
    cheap, dear = Effect(((0, 1),), base, base + 1), Effect(((0, 0),), base, base + 2)
    assert effect_order([dear, cheap]) == ((0, 1), (0, 0))
    with pytest.raises(ProblemError, match="2 heads together"):
        effect_order([Effect(((0, 1), (0, 2)), base, base)])


def test_work_that_is_left_leaves_the_model_as_it_was():
    model, ids = decoder(), texts()
    before = model(ids)
    effects = ablation_effects(model, [ids], next_token_loss(model))
    next(effects)
    assert torch.equal(model(ids), before)


@pytest.mark.parametrize("by", ["mean", None, 0.0])
def test_what_is_no_replacement_is_refused_at_once(by):
    with pytest.raises(ProblemError, match="expected 'zero', mean_outputs"):
        ablation_effects(None, [texts()], torch.ones_like, by=by)
    with pytest.raises(ProblemError, match="expected 'zero', mean_outputs"), ablated(None, [], by):
        pass


def test_what_is_no_model_is_refused_by_all_that_runs_one():
    def loss_of(ids):
        return torch.zeros(len(ids))

    batches = [texts()]
    calls = [
        lambda: ablated("model", [(0, 0)]).__enter__(),
        lambda: mean_outputs("model", batches, loss_of),
        lambda: importance("model", batches, loss_of),
        lambda: list(ablation_effects("model", batches, loss_of)),
        lambda: integrated("model", batches, loss_of),
        lambda: prune_curve("model", batches, loss_of, [(0, 0)]),
    ]
    for call in calls:
        with pytest.raises(ProblemError, match=r"^model is 'model': expected an nn\.Module or None\.$"):
            call()
