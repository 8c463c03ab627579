"""What stands in for a head: means are those of the output projection's input, other inputs are met bit by bit."""

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from regard import Causal, attend
from regard.cache import H2O, KVCache, SinksAndRecent
from regard.calls import observe_calls, replace_outputs
from regard.errors import ProblemError
from regard.inspect.intervene.ablate import ablated
from regard.inspect.intervene.heads import Site
from regard.inspect.intervene.replacement import Mean, Resample, mean_outputs, outputs_of
from regard.integrate.cache import regard_cache
from regard.nn import Decoder, LatentAttention
from regard.storage.stored import Rolling
from tests.inspect.intervene.models import decoder, texts
from tests.integrate.writing import on_regard
from tests.integrate.zoo import padding, tokens, with_cache

PARTS = [8, 3, *[1] * 5]  # a prompt, a few tokens at once, and steps


def inputs_of_projection(model, run, layer=1):
    """What goes into a layer's output projection, [batch, heads, tokens, head_dim]."""
    found = []
    hook = model.body.blocks[layer].attention.o_proj.register_forward_pre_hook(lambda m, a: found.append(a[0]))
    with torch.no_grad():
        run()
    hook.remove()
    return found[0].unflatten(-1, (4, -1)).transpose(1, 2)


def test_the_mean_is_over_texts_and_tokens():
    model, batches = decoder(), [texts(), texts(batch=3, tokens=7)]
    mean = mean_outputs(model, batches, model)
    given = torch.cat(
        [inputs_of_projection(model, lambda b=b: model(b)).transpose(1, 2).flatten(0, 1) for b in batches]
    )
    with ablated(model, [(1, 2)], mean):
        ours = inputs_of_projection(model, lambda: model(batches[0]))
    assert torch.allclose(ours[:, 2], given.mean(0)[2].expand_as(ours[:, 2]), atol=1e-12)
    assert torch.equal(ours[:, 1], inputs_of_projection(model, lambda: model(batches[0]))[:, 1])


def test_positions_can_have_means_of_their_own():
    model, batches = decoder(), [texts(), texts(batch=3, tokens=7)]
    mean = mean_outputs(model, batches, model, per_position=True)
    long, short = (inputs_of_projection(model, lambda b=b: model(b)) for b in batches)
    with ablated(model, [(1, 2)], mean):
        ours = inputs_of_projection(model, lambda: model(batches[0]))[:, 2]
    assert torch.allclose(ours[0, 3], torch.cat([long[:, 2, 3], short[:, 2, 3]]).mean(0), atol=1e-12)
    assert torch.allclose(ours[0, 9], long[:, 2, 9].mean(0), atol=1e-12)
    assert torch.equal(ours[0], ours[1])


def test_means_by_position_of_rows_that_start_apart_are_at_the_positions_of_each():
    q, k = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 11, 5)
    starts = torch.tensor([4, 0])

    def run(*_: Any) -> torch.Tensor:
        return attend(q, k, k, mask=Causal(), offset=starts)

    mean = mean_outputs(None, [0], run, per_position=True)
    (found,), out = mean.of.values(), run()
    torch.testing.assert_close(found, torch.cat([out[1], out[0]], dim=1).double())  # positions 0 to 3, then 4 to 7
    with ablated(None, [(0, 1)], mean):
        assert torch.allclose(run()[:, 1], out[:, 1])
    starts += 4
    beyond = "the call is at positions 4 to 11, and there are means of 8"
    with pytest.raises(ProblemError, match=beyond), ablated(None, [(0, 1)], mean):
        run()


def test_means_by_position_go_on_in_generation():
    model, text = decoder(), texts(batch=1, tokens=12)
    mean = mean_outputs(model, [texts(tokens=12)], model, per_position=True)
    with torch.no_grad(), ablated(model, [(0, 1), (1, 2)], mean):
        whole, caches = model(text), model.caches()
        parts = torch.cat([model(text[:, :7], caches=caches), model(text[:, 7:], caches=caches)], 1)
    assert torch.allclose(whole, parts, atol=1e-9)


def check_own_means_change_nothing(model: Any, run: Any, text: torch.Tensor) -> None:
    """The means per position of one text, which a cache that drops tokens reads in parts, are its own outputs."""
    mean = mean_outputs(model, [text], run, per_position=True)
    assert {of.shape[1] for of in mean.of.values()} == {text.shape[1]}
    with torch.no_grad():
        before = run(text)
        with ablated(model, [(0, 1)], mean):
            torch.testing.assert_close(run(text), before)


@pytest.mark.parametrize(
    "words", [{"layout": Rolling(7, sinks=2)}, {"evict": H2O(7)}, {"evict": SinksAndRecent(7)}], ids=str
)
def test_means_by_position_are_by_position_in_the_text_where_a_cache_drops_tokens(words: dict[str, Any]):
    model = decoder()

    def run(text: torch.Tensor) -> torch.Tensor:
        caches = model.caches(**words)
        return torch.cat([model(part, caches=caches) for part in text.split(PARTS, 1)], 1)

    check_own_means_change_nothing(model, run, texts(batch=1, tokens=16))


@pytest.mark.parametrize("absorbed", [False, True])
def test_so_they_are_over_a_cache_of_latents(absorbed: bool):
    module = LatentAttention(8, 2, kv_rank=5, nope_dim=3, rope_dim=0, v_dim=3, mask=Causal(), dtype=torch.float64)

    def run(x: torch.Tensor) -> torch.Tensor:
        cache = KVCache(evict=H2O(7))
        return torch.cat([module(part, cache=cache, absorbed=absorbed) for part in x.split(PARTS, 1)], 1)

    check_own_means_change_nothing(module, run, torch.randn(1, 16, 8, dtype=torch.float64))


@pytest.mark.parametrize("kv_rank", [16, 13])
def test_what_replaces_a_head_of_latent_attention_is_its_output_and_no_latent_in_a_step_either(kv_rank: int):
    module = LatentAttention(
        31, 4, kv_rank=kv_rank, nope_dim=5, rope_dim=0, v_dim=16, mask=Causal(), dtype=torch.float64
    )
    x, mean = torch.randn(2, 9, 31, dtype=torch.float64), torch.randn(16, dtype=torch.float64)

    def step(block: AbstractContextManager[Any]) -> torch.Tensor:
        cache = KVCache()
        module(x[:, :8], cache=cache)
        with block:
            return module(x[:, 8:], cache=cache)

    def of_projection(projection: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        return torch.cat([inputs[0][..., :32], mean.expand_as(inputs[0][..., :16]), inputs[0][..., 48:]], -1)

    absorbed = list[bool]()
    with torch.no_grad(), observe_calls(lambda call: absorbed.append(call.k.shape[1] == 1)):
        step(nullcontext())
    assert absorbed == [False, True]
    with torch.no_grad():
        found = step(replace_outputs(lambda call: torch.where(HEAD_2, mean, call.out)))
        by_mean = step(ablated(None, [(0, 2)], Mean({Site(0, None): mean.expand(4, 16)})))
        with hooked(module.o_proj, of_projection):
            expected = step(nullcontext())
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    torch.testing.assert_close(by_mean, expected, atol=1e-12, rtol=0)


HEAD_2 = torch.tensor([False, False, True, False])[:, None, None]


@contextmanager
def hooked(module: torch.nn.Module, hook: Any) -> Generator[None]:
    """Within the block, the hook may change the inputs of the module."""
    handle = module.register_forward_pre_hook(hook)
    yield
    handle.remove()


CACHES: dict[str, Any] = {
    "transformers": lambda model: DynamicCache(config=model.config),
    "usual": regard_cache,
    "rolling": lambda model: regard_cache(model, layout=Rolling(7, sinks=2)),
    "evicting": lambda model: regard_cache(model, evict=H2O(7)),
}


@pytest.mark.parametrize(
    ("name", "cache"),
    [
        ("mistral", "transformers"),
        ("mistral", "usual"),
        ("gemma2", "usual"),
        ("llama", "rolling"),
        ("llama", "evicting"),
    ],
)
def test_so_they_are_in_transformers(name: str, cache: str):
    model = on_regard(name)

    def run(text: torch.Tensor) -> torch.Tensor:
        words = with_cache(CACHES[cache](model))
        return torch.cat([model(part, **words).logits for part in text.split(PARTS, 1)], 1)

    check_own_means_change_nothing(model, run, tokens(1, 16))


@pytest.mark.parametrize("cache", ["transformers", "usual"])
def test_means_by_position_go_on_behind_a_window(cache: str):
    model, text = on_regard("mistral"), tokens(1, 16)
    words = with_cache(CACHES[cache](model))
    with torch.no_grad():
        mean = mean_outputs(model, [tokens(4, 16)], lambda ids: model(ids, use_cache=False), per_position=True)
        with ablated(model, [(0, 1)], mean):
            whole = model(text, use_cache=False).logits
            parts = torch.cat([model(part, **words).logits for part in text.split(PARTS, 1)], 1)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=1e-4)


def test_padding_counts_as_position_where_a_cache_has_rows_of_its_own():
    model, text, mask = on_regard("llama"), tokens(2, 13), padding("left")
    pad, outs, cache = 13 - mask.sum(1), [], regard_cache(model, evict=SinksAndRecent(5))
    mean = mean_outputs(model, [tokens(4, 13)], lambda ids: model(ids, use_cache=False), per_position=True)
    first = next(iter(mean.of.values()))[1].float()
    with torch.no_grad(), ablated(model, [(0, 1)], mean), observe_calls(lambda call: outs.append(call.out[0, 1])):
        for start, stop in ((0, 9), (9, 12), (12, 13)):
            model(text[:, start:stop], attention_mask=mask[:, :stop], **with_cache(cache))
    row = {b: torch.cat(outs[b::4]) for b in range(2)}  # two rows in each of two layers
    assert all(torch.equal(row[b], first[pad[b] :]) for b in range(2))


def test_a_text_longer_than_the_means_is_reported():
    model = decoder()
    mean = mean_outputs(model, [texts(tokens=7)], model, per_position=True)
    refused = pytest.raises(ProblemError, match="positions 0 to 10, and there are means of 7")
    with refused, ablated(model, [(1, 2)], mean):
        model(texts())


def test_padding_can_be_left_out():
    model, ids = decoder(), texts()
    counted = torch.ones(5, 11, dtype=torch.bool)
    counted[1:, 4:] = False
    mean = mean_outputs(model, [ids], model, rows=lambda batch: counted)
    given = inputs_of_projection(model, lambda: model(ids))[:, 0][counted].mean(0)
    assert torch.allclose(next(m for s, m in mean.of.items() if s.layer == 1)[0], given, atol=1e-12)
    counted[:, 9] = False
    with pytest.raises(ProblemError, match="position 9 of layer 0 counts in no text"):
        mean_outputs(model, [ids], model, rows=lambda batch: counted, per_position=True)


def test_rows_that_count_may_be_numbers_which_are_no_weights():
    model, ids = decoder(), texts()
    documents = torch.randint(3, (5, 11))  # 0 is padding
    first, second = (
        mean_outputs(model, [ids], model, rows=lambda batch, rows=rows: rows)
        for rows in (documents > 0, documents.float())
    )
    assert all(torch.equal(mean, second.of[site]) for site, mean in first.of.items())


def test_a_constant_head_is_its_mean():
    model: Any = Decoder(19, 32, layers=2, heads=4).double()
    with torch.no_grad():
        for block in model.body.blocks:  # what all tokens have in common, read by head 0 alone
            block.attention.v_proj.weight[:8] = 0
    model.body.blocks[1].attention.v_proj.bias = torch.nn.Parameter(torch.randn(32).double())
    ids = texts()
    mean = mean_outputs(model, [ids], model)
    with torch.no_grad():
        before = model(ids)
        with ablated(model, [(0, 0), (1, 0)], mean):
            constant = model(ids)
        with ablated(model, [(1, 1)], mean):
            other = model(ids)
    assert torch.allclose(constant, before, atol=1e-12)
    assert not torch.allclose(other, before, atol=1e-3)


def test_resampled_heads_give_what_they_gave_elsewhere():
    model, ids, others = decoder(), texts(), texts()
    elsewhere = Resample(outputs_of(model, lambda: model(others)))
    with ablated(model, [(1, head) for head in (0, 3)], elsewhere):
        ours = inputs_of_projection(model, lambda: model(ids))
    here, there = (inputs_of_projection(model, lambda t=t: model(t)) for t in (ids, others))
    assert torch.equal(ours[:, [0, 3]], there[:, [0, 3]])
    assert torch.equal(ours[:, [1, 2]], here[:, [1, 2]])


def test_one_other_input_can_stand_in_for_a_whole_batch():
    model, other = decoder(), texts(batch=1)
    with ablated(model, [(1, 0)], Resample(outputs_of(model, lambda: model(other)))):
        ours = inputs_of_projection(model, lambda: model(texts()))
    assert torch.equal(ours[3, 0], inputs_of_projection(model, lambda: model(other))[0, 0])


@pytest.mark.parametrize("sizes", [{"tokens": 7}, {"batch": 2}])
def test_another_size_cannot_stand_in(sizes):
    model = decoder()
    other = Resample(outputs_of(model, lambda: model(texts(**sizes))))
    with pytest.raises(ProblemError, match="inputs of the same size"), ablated(model, [(1, 0)], other):
        model(texts())


def test_what_was_recorded_of_another_model_is_no_use():
    model, other = decoder(), Decoder(19, 32, layers=1, heads=4)
    recorded = Resample(outputs_of(other, lambda: other(texts())))
    with pytest.raises(ProblemError, match="nothing was recorded of layer 1"), ablated(model, [(1, 0)], recorded):
        model(texts())


def test_a_generation_has_no_one_output_to_record():
    model = decoder()
    with pytest.raises(ProblemError, match="attended more than once"):
        outputs_of(model, lambda: model.generate(texts(batch=1), 2))


def test_a_mean_needs_batches_and_rows_that_fit():
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match="no heads attended: pass at least one batch"):
        mean_outputs(model, [], model)
    with pytest.raises(ProblemError, match="batches is one batch, a Tensor"):
        mean_outputs(model, ids, model)
    with pytest.raises(ProblemError, match=r"rows returned \[5, 3\]: expected bool \[batch, queries\] = \[5, 11\]"):
        mean_outputs(model, [ids], model, rows=lambda batch: torch.ones(5, 3) > 0)
    with pytest.raises(ProblemError, match="rows returned a list: expected bool"):
        mean_outputs(model, [ids], model, rows=lambda batch: [[True] * 11] * 5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("per_position", [False, True])
def test_there_is_no_mean_of_no_rows(per_position):
    model, ids = decoder(), texts()
    with pytest.raises(ProblemError, match=r"no rows of layers 0 \(body\..*\), 1 \(body\..*\) count, .* `rows`"):
        mean_outputs(model, [ids], model, rows=lambda batch: batch == 99, per_position=per_position)
    x = torch.randn(1, 2, 5, 4)

    def run(rows):
        return attend(x, x, x), attend(x[:, :, :rows], x, x)

    with pytest.raises(ProblemError, match="no rows of layer 1 count"):  # without `rows`
        mean_outputs(None, [0], run, per_position=per_position)
