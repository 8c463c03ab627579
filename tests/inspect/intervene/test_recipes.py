"""The recipes of the README: knockout, patching at one position, direct logit attribution, against plain PyTorch."""

from typing import cast

import pytest
import torch
from torch import Tensor

from regard import MaskFunction, attend, observe_calls
from regard.inspect.intervene import edit_outputs, outputs_of
from regard.inspect.measures import split_heads
from regard.inspect.observing.observe import observe
from regard.integrate import use_regard
from regard.nn import Decoder
from tests.inspect.small import llama

ROW, KEY = 9, 4


def knock_out(site, call):
    """Hide one key from one row, in every head."""
    cut = MaskFunction(lambda b, h, q, k: ~((q == ROW) & (k == KEY)))
    mask = cut if call.mask is None else call.mask & cut
    return attend(
        call.q, call.k, call.v, mask=mask, bias=call.bias, score=call.score, scale=call.scale, softcap=call.softcap,
        sink=call.sink, offset=call.offset,
    )  # fmt: skip


@torch.no_grad()
def test_a_knocked_out_edge_is_one_that_the_mask_of_an_eager_model_hides():
    model, ids = llama(), torch.randint(300, (2, 13))
    keep = torch.ones(13, 13, dtype=torch.bool).tril()
    keep[ROW, KEY] = False
    model.set_attn_implementation("eager")
    hidden = torch.zeros(13, 13).masked_fill(~keep, torch.finfo(torch.float32).min)
    expected = model(ids, attention_mask=hidden.expand(2, 1, 13, 13)).logits
    use_regard(model)
    with edit_outputs(model, knock_out):
        found = model(ids).logits
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, model(ids).logits)


@torch.no_grad()
def test_an_edge_is_knocked_out_of_a_decode_step_as_of_the_whole_text():
    model, ids = Decoder(97, 32, layers=2, heads=4), torch.randint(97, (1, ROW + 1))
    with edit_outputs(model, knock_out):
        expected = model(ids)[:, -1]
        caches = model.caches()
        model(ids[:, :-1], caches=caches)
        found = model(ids[:, -1:], caches=caches)[:, -1]
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found, model(ids)[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("observed", ["each", "calls"])
def test_an_observer_may_compute_the_call_again(observed):
    model, ids = Decoder(97, 32, layers=2, heads=4), torch.randint(97, (1, 13))
    again = []
    block = (
        observe(model, lambda look: again.append(knock_out(None, look.call)))
        if observed == "each"
        else observe_calls(lambda call: again.append(knock_out(None, call)))
    )
    with block:
        model(ids)
    assert len(again) == 2


@torch.no_grad()
def test_a_head_patched_at_one_position_writes_what_it_wrote_on_the_other_text():
    model, (clean, corrupted) = use_regard(llama()), torch.randint(300, (2, 1, 13))
    of_clean = outputs_of(model, lambda: model(clean))

    def patch(site, call):
        out = call.out.clone()
        if site.layer == 1:
            out[:, 3, 7] = of_clean[site][:, 3, 7]
        return out

    with edit_outputs(model, patch):
        found = model(corrupted).logits

    def patch_input(module, inputs):
        x = inputs[0].clone()
        x[:, 7, 12:16] = written[0][:, 7, 12:16]  # heads of 4 dimensions
        return (x,)

    o_proj, written = model.model.layers[1].self_attn.o_proj, []
    with o_proj.register_forward_pre_hook(lambda module, inputs: written.append(inputs[0].clone())):
        model(clean)
    with o_proj.register_forward_pre_hook(patch_input):
        torch.testing.assert_close(found, model(corrupted).logits)
    assert not torch.allclose(found, model(corrupted).logits)


@torch.no_grad()
def test_attributions_of_heads_and_embedding_add_up_to_the_logits():
    model, ids = Decoder(97, 32, layers=3, heads=4, mlp=False), torch.randint(97, (1, 13))
    streams = []
    norm, o_projs = model.body.norm, [model.get_submodule(f"body.blocks.{i}.attention.o_proj") for i in range(3)]
    with (
        norm.register_forward_pre_hook(lambda module, inputs: streams.append(inputs[0])),
        observe(model, values=True) as calls,
    ):
        logits = model(ids)[0, -1]
    factor = norm.weight / (streams[0][0, -1].square().mean() + norm.eps).sqrt()
    direction = (model.unembedding.weight[5] - model.unembedding.weight[8]) * factor
    heads = sum(
        torch.einsum("hv,hvm,m->", call.out[0, :, -1], split_heads(cast(Tensor, o_proj.weight), 4), direction)
        for call, o_proj in zip(calls, o_projs, strict=True)
    )
    embedding = model.body.embedding(ids)[0, -1] * 32**0.5
    torch.testing.assert_close(heads + embedding @ direction, logits[5] - logits[8])
