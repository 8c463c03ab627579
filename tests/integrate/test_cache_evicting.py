"""Caches that forget tokens, in transformers models: the right ones, with a warning, or refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from regard import ProblemError, RefusalError, Rope
from regard.cache.evict import Knorm, SinksAndRecent
from regard.cache.evict_by_attention import H2O, TOVA
from regard.calls import observe_calls
from regard.integrate import cache_options
from regard.integrate.cache import regard_cache
from regard.integrate.cache_layers import WindowLayer
from regard.integrate.transformers import use_regard
from regard.storage.codec import Int8
from regard.storage.stored import Contiguous, Paged, Rolling
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import model, padding, tokens, with_cache

FORGETFUL = pytest.mark.parametrize(
    "words", [{"layout": Rolling(11)}, {"evict": Knorm(11)}], ids=["rolling", "evicting"]
)


class Forgetful(DynamicCache):
    """A layer by the paper's words: the sinks and the last tokens, keys turned to where they are in the cache.

    Everything is kept as the model turned it, by its position in the text; what is handed out is turned on from there
    with the model's own functions, by as many positions as were forgotten.
    """

    def __init__(self, m: Any, window: int, sinks: int, *, turn: bool) -> None:
        super().__init__(config=m.config)
        self.rotary, self.window, self.sinks, self.turn = m.model.rotary_emb, window, sinks, turn
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.count: dict[int, int] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        k, v = self.before.get(layer_idx, (key_states[:, :, :0], value_states[:, :, :0]))
        if k.shape[2] > self.window - 1:
            late = k.shape[2] - (self.window - 1 - self.sinks)
            k, v = (torch.cat([t[:, :, : self.sinks], t[:, :, late:]], dim=2) for t in (k, v))
        k, v = torch.cat([k, key_states], dim=2), torch.cat([v, value_states], dim=2)
        self.before[layer_idx] = k, v
        self.count[layer_idx] = self.count.get(layer_idx, 0) + key_states.shape[2]
        gone = self.count[layer_idx] - k.shape[2]
        if self.turn and gone:
            cos, sin = self.rotary(k, torch.full((1, self.sinks), gone))
            first = apply_rotary_pos_emb(k[:, :, : self.sinks], k[:, :, : self.sinks], cos, sin)[1]
            return torch.cat([first, k[:, :, self.sinks :]], dim=2), v
        return k, v

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.count.get(layer_idx, 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        kept = min(self.before[layer_idx][0].shape[2], self.window - 1) if self.before else 0
        return kept + query_length, self.get_seq_length() - kept


@pytest.mark.parametrize(
    "scaling", [{}, {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0}], ids=["", "llama3"]
)
def test_rolling_is_the_paper_s_cache(scaling: dict[str, Any]):
    """Over 40 steps, three times the window, with keys turned to where they are in the cache."""
    m = on_regard("llama") if not scaling else scaled(scaling)
    ids = prompt(2, 7)
    rolling = regard_cache(m, layout=Rolling(window=11, sinks=3))
    forgetful = Forgetful(m, 11, 3, turn=True)
    ours, stock = written(m, ids, rolling, max_new_tokens=40), written(m, ids, forgetful, max_new_tokens=40)
    assert torch.allclose(ours[1], stock[1], atol=1e-5)
    still = written(m, ids, Forgetful(m, 11, 3, turn=False), max_new_tokens=40)
    assert not torch.allclose(still[1], stock[1], atol=1e-3)  # else turning would not be seen
    assert rolling.layers[0].kv.tokens == 11


def scaled(message: dict[str, Any]) -> Any:
    """A llama whose rotation is scaled."""
    config = copy.deepcopy(model("llama").config)
    config.rope_parameters = {"rope_theta": 10000.0, "high_freq_factor": 4.0} | message
    config.rope_parameters["original_max_position_embeddings"] = 16
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(config).eval()
    made.load_state_dict(model("llama").state_dict())
    use_regard(made)
    return made


def test_a_policy_forgets_what_it_says():
    """As the same rule does by hand, without turning; budget 10 before a step is a window of 11."""
    m, ids = on_regard("llama"), prompt(2, 7)
    ours = written(m, ids, regard_cache(m, evict=SinksAndRecent(10, sinks=3)), max_new_tokens=30)
    stock = written(m, ids, Forgetful(m, 11, 3, turn=False), max_new_tokens=30)
    assert torch.allclose(ours[1], stock[1], atol=1e-5)


@pytest.mark.exhaustive(per="policy")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "deepseek_v3"])
@pytest.mark.parametrize("codec", [None, Int8(group=16, residual=0)], ids=["plain", "int8"])
@pytest.mark.parametrize("policy", [Knorm(19), TOVA(19), TOVA(0.5)], ids=repr)
def test_policies_see_what_they_ask_for(name: str, codec: Any, policy: Any):
    """Beams too: what a policy has seen follows the rows."""
    m = on_regard(name)
    cache = regard_cache(m, evict=policy, codec=codec)
    ids, _ = written(m, prompt(2, 37), cache, num_beams=2)
    assert [len(row) for row in ids] == [46, 46]
    kept = [layer.kv.tokens for layer in cache.layers if not isinstance(layer, WindowLayer)]
    assert max(kept) <= 24


def test_the_queries_that_a_policy_sees_are_those_of_attention(monkeypatch: pytest.MonkeyPatch):
    m, calls, observed = on_regard("llama"), [], []
    cache = regard_cache(m, evict=TOVA(19))
    for layer in cache.layers:
        monkeypatch.setattr(layer.kv, "observe", lambda q, mask, scale, at=layer: observed.append((at, q, scale)))
    with torch.no_grad(), observe_calls(calls.append):
        m(prompt(), **with_cache(cache))
    assert [at for at, _, _ in observed] == cache.layers
    assert all(
        torch.equal(q, call.q) and scale == call.scale for (_, q, scale), call in zip(observed, calls, strict=True)
    )


PADDED: dict[str, dict[str, Any]] = {
    "rolling": {"layout": Rolling(11, sinks=3)},
    "rolling int8": {"layout": Rolling(11, sinks=3), "codec": Int8(group=16, residual=0)},
    "recent": {"evict": SinksAndRecent(11)},
    "tova": {"evict": TOVA(11)},
    "tova int8": {"evict": TOVA(11), "codec": Int8(group=16, residual=0)},
}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *(("llama", words) for words in PADDED),
        pytest.param("gemma3", "rolling", marks=pytest.mark.exhaustive),
        pytest.param("gpt2", "tova", marks=pytest.mark.exhaustive),
        ("deepseek_v3", "tova int8"),
    ],
)
def test_a_row_of_a_padded_batch_forgets_as_it_does_alone(name: str, words: str):
    m, ids, mask = on_regard(name), prompt(3, 17), torch.ones(3, 17, dtype=torch.int64)
    mask[0, :9], mask[2, :3] = 0, 0
    together = written(m, ids, regard_cache(m, **PADDED[words]), attention_mask=mask, max_new_tokens=12)
    for row in range(3):
        own = ids[row : row + 1, int((mask[row] == 0).sum()) :]
        alone = written(m, own, regard_cache(m, **PADDED[words]), max_new_tokens=12)
        assert together[0][row][17:] == alone[0][0][own.shape[1] :]
        assert torch.allclose(together[1][:, row], alone[1][:, 0], atol=1e-5)


@pytest.mark.parametrize("seed", [0, 3, 4, 7, 8, 9, 12, 15])
def test_tokens_that_come_again_are_forgotten_in_the_same_order_in_a_padded_batch(seed: int):
    """Their keys in the first layer are of one norm, but for how a batch of more rows is rounded."""
    torch.manual_seed(seed)
    m, ids, mask = on_regard("llama"), torch.randint(3, 9 + seed, (3, 29)), torch.ones(3, 29, dtype=torch.int64)
    mask[0, :9], mask[2, :3] = 0, 0
    together = written(m, ids, regard_cache(m, evict=Knorm(12, recent=0)), attention_mask=mask, max_new_tokens=5)[1]
    for row in range(3):
        own = ids[row : row + 1, int((mask[row] == 0).sum()) :]
        alone = written(m, own, regard_cache(m, evict=Knorm(12, recent=0)), max_new_tokens=5)[1]
        assert torch.allclose(together[:, row], alone[:, 0], atol=1e-5)


@pytest.mark.parametrize("words", ["rolling", "tova"])
@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 5}], ids=["beams", "chunks"])
def test_padded_rows_can_be_put_in_order_and_come_in_pieces(words: str, options: dict[str, Any]):
    """With the first row wholly padding in the first piece."""
    m, ids, mask = on_regard("llama"), prompt(2, 17), torch.ones(2, 17, dtype=torch.int64)
    mask[0, :7] = 0
    together, _ = written(m, ids, regard_cache(m, **PADDED[words]), attention_mask=mask, **options)
    if "prefill_chunk_size" in options:  # a row's pieces are others, and so is what it forgets in between
        assert together[1] == written(m, ids[1:], regard_cache(m, **PADDED[words]), **options)[0][0]
        return
    for row, own in enumerate((ids[:1, 7:], ids[1:])):
        alone, _ = written(m, own, regard_cache(m, **PADDED[words]), **options)
        assert together[row][17:] == alone[0][own.shape[1] :]


def test_what_rows_of_a_padded_batch_keep_is_reported():
    m, mask = on_regard("llama"), padding("left", length=17)
    cache = regard_cache(m, layout=Rolling(11, sinks=3))
    written(m, prompt(2, 17), cache, attention_mask=mask, max_new_tokens=2)
    layer = cache.layers[0]
    assert [kv.tokens_seen for kv in layer.caches] == [14, 18]
    assert (layer.get_seq_length(), layer.get_mask_sizes(3)) == (18, (21, 0))
    assert cache.bytes == 2 * 2 * 2 * 2 * 8 * 11 * 4
    assert "256 bytes a token" in cache.explain() or "128 bytes a token" in cache.explain()
    assert layer.keys.shape == (2, 2, 11, 8)
    cache.reset()
    assert (cache.get_seq_length(), cache.bytes) == (0, 0)


def test_a_call_that_failed_is_not_finished_by_another_model():
    other, cache = on_regard("qwen3"), regard_cache(on_regard("llama"), evict=Knorm(9))
    with torch.no_grad():
        cache.update(*torch.randn(2, 2, 2, 13, 8), 0)  # and no attention reads it
        other(prompt())
        with pytest.raises(RefusalError, match="after a call that failed"):
            cache.update(*torch.randn(2, 2, 2, 1, 8), 0)


class Stop(Exception):  # noqa: N818  no error of a library
    """What makes a call fail."""


def fail_in(module: Any, call: Callable[[], object]) -> None:
    """Make a call that fails before this module."""

    def stop(*_: object) -> None:
        raise Stop

    hook = module.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        call()
    hook.remove()


MIDDLE = {
    "rolling": {"layout": Rolling(100)},
    "policy": {"evict": TOVA(100)},
    "capacity": {"layout": Contiguous(capacity=40)},
    "plain": {},
    "int8": {"codec": Int8(16, 16)},
}


@pytest.mark.parametrize(
    ("words", "name"), [*((words, "llama") for words in MIDDLE), ("capacity", "mistral"), ("plain", "mistral")]
)
def test_after_a_call_that_failed_between_layers_its_tokens_are_removed_before_the_next(words: str, name: str):
    m, ids = on_regard(name), prompt(2, 13)
    cache, expected = regard_cache(m, **MIDDLE[words]), regard_cache(m, **MIDDLE[words])
    with torch.no_grad():
        for one in (cache, expected):
            m(ids[:, :9], **with_cache(one))
        fail_in(m.model.layers[-1].input_layernorm, lambda: m(ids[:, 9:11], **with_cache(cache)))
        can_crop = (words, name) != ("capacity", "mistral")  # whose window has lost tokens
        advice = r"Remove its tokens, crop\(-2\), or" if can_crop else "Its tokens cannot be removed: start anew"
        message = rf"have 11 tokens and others 9: a call of the model failed between them\. {advice}"
        with pytest.raises(ProblemError, match=message):
            m(ids[:, 9:10], **with_cache(cache))
        if not can_crop:
            return
        cache.crop(-2)
        assert {int(layer.get_seq_length()) for layer in cache.layers} == {9}
        found = m(ids[:, 9:], **with_cache(cache)).logits
        assert torch.equal(found, m(ids[:, 9:], **with_cache(expected)).logits)


def test_a_padded_batch_that_failed_in_its_attention_starts_anew(monkeypatch: pytest.MonkeyPatch):
    m, ids, mask = on_regard("llama"), prompt(2, 13), padding("left")
    cache = regard_cache(m, layout=Rolling(40))
    with torch.no_grad():
        m(ids[:, :12], attention_mask=mask[:, :12], **with_cache(cache))
        monkeypatch.setattr(cache.layers[1].caches[1], "append", raise_memory_error)
        with pytest.raises(MemoryError):
            m(ids[:, 12:], attention_mask=mask, **with_cache(cache))
        with pytest.raises(RefusalError, match="after a call that failed"):
            cache.layers[1].update(*torch.randn(2, 2, 2, 1, 8))
        with pytest.raises(ProblemError, match=r"crop\(-1\): .* some rows had its tokens.* reset\(\)"):
            cache.crop(-1)
        cache.reset()
        m(ids, attention_mask=mask, **with_cache(cache))


def raise_memory_error(*_: object) -> None:
    raise MemoryError


@pytest.mark.parametrize("words", ["rolling", "tova"])
@pytest.mark.parametrize("rows", [[0, 0, 1, 1], [1, 0], [1]], ids=str)
def test_rows_of_a_padded_batch_are_repeated_and_chosen(words: str, rows: list[int]):
    m, ids, mask = on_regard("llama"), prompt(2, 13), padding("left")
    cache, whole = (regard_cache(m, **PADDED[words]) for _ in range(2))
    with torch.no_grad():
        m(ids[:, :12], attention_mask=mask[:, :12], **with_cache(cache))
        m(ids[rows, :12], attention_mask=mask[rows, :12], **with_cache(whole))
        if len(rows) == 4:
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(torch.tensor(rows))
        found, expected = (m(ids[rows, 12:], attention_mask=mask[rows], **with_cache(c)).logits for c in (cache, whole))
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("side", [None, "left"])
def test_tokens_that_pushed_none_out_can_be_taken_back(side: str | None):
    m, ids = on_regard("llama"), prompt(2, 13)
    mask = torch.ones(2, 13, dtype=torch.int64) if side is None else padding(side)
    cache = regard_cache(m, layout=Rolling(40))
    with torch.no_grad():
        whole = m(ids, attention_mask=mask, use_cache=False).logits
        m(torch.cat([ids[:, :9], ids[:, :4]], dim=1), attention_mask=mask, **with_cache(cache))
        cache.crop(-4)
        assert cache.get_seq_length() == 9
        again = m(ids[:, 9:], attention_mask=mask, **with_cache(cache)).logits
    assert torch.allclose(again, whole[:, 9:], atol=1e-5)
    assert cache.get_seq_length() == 13


@pytest.mark.parametrize("words", [{"evict": H2O(9, sinks=2)}, {"layout": Rolling(9, sinks=2)}], ids=str)
@pytest.mark.parametrize("side", [None, "left"])
def test_it_says_how_many_tokens_can_be_taken_back(words: dict[str, Any], side: str | None):
    m, ids, cache = on_regard("llama"), prompt(2, 13), regard_cache(model("llama"), **words)
    mask = torch.ones(2, 13, dtype=torch.int64) if side is None else padding(side)
    with torch.no_grad():
        for stop, start in ((9, 0), (13, 9)):
            m(ids[:, start:stop], attention_mask=mask[:, :stop], **with_cache(cache))
    with pytest.raises(ProblemError, match=r"crop\(-12\): .* at most \d+ can be removed.* reset\(\)") as message:
        cache.crop(-12)
    most = int(str(message.value).split("at most ")[1].split()[0])
    with pytest.raises(ProblemError, match=rf"crop\({-most - 1}\): .* at most {most} can be removed"):
        cache.crop(-most - 1)
    cache.crop(-most)
    assert cache.get_seq_length() == 13 - most


@FORGETFUL
@pytest.mark.parametrize(("side", "why"), [("right", "not to the left"), ("hole", "not to the left")])
def test_forgetting_goes_with_padding_to_the_left_alone(words: dict[str, Any], side: str, why: str):
    m = on_regard("llama")
    with pytest.raises(RefusalError, match=why), torch.no_grad():
        m(prompt(), **with_cache(regard_cache(m, **words)), attention_mask=padding(side))


@FORGETFUL
def test_a_mask_that_does_not_say_what_is_padding_is_refused(words: dict[str, Any]):
    m, dense = on_regard("llama"), torch.ones(2, 1, 13, 13, dtype=torch.bool)
    with pytest.raises(RefusalError, match="a mask given as a tensor"), torch.no_grad():
        m(prompt(), **with_cache(regard_cache(m, **words)), attention_mask=dense)
    written(m, prompt(), regard_cache(m, **words), attention_mask=torch.ones(2, 13))


def sharing() -> Any:
    """A Gemma 3n whose last two layers read the keys of the two before."""
    kinds = ["sliding_attention", "full_attention"] * 2
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "sliding_window": 5}
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": kinds, "laurel_rank": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8}
    more: dict[str, Any] = {"vocab_size": 101, "vocab_size_per_layer_input": 101, "initializer_range": 0.2}
    torch.manual_seed(0)
    config = transformers.Gemma3nTextConfig(**sizes, **layers, **heads, **more)
    return use_regard(transformers.Gemma3nForCausalLM(config).eval())


@pytest.mark.parametrize("words", [{}, {"layout": Paged(4)}, {"codec": torch.float32}], ids=str)
def test_layers_that_share_keys_read_what_the_first_of_them_kept(words: dict[str, Any]):
    m, ids = sharing(), tokens(2, 23)
    q, k = torch.arange(23)[:, None], torch.arange(23)
    near, kept = (q - k < 5) & (k <= q), (k <= q) & ((q < 17) | (k < 4) | (q - k <= 5))
    masks = {"sliding_attention": near, "full_attention": kept}
    cache = regard_cache(m, evict=SinksAndRecent(9), **words)
    with torch.no_grad():
        found = torch.cat([m(x, **with_cache(cache)).logits for x in (ids[:, :17], *ids[:, 17:].split(1, 1))], 1)
        whole = {kind: mask.expand(2, 1, 23, 23) for kind, mask in masks.items()}
        expected = m(ids, attention_mask=whole, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-4)


def test_padded_rows_of_keys_that_layers_share_are_refused():
    m, mask = sharing(), padding("left")
    cache = regard_cache(m, evict=Knorm(11))
    with pytest.raises(RefusalError, match=r"a padded batch .* reads the keys of another layer"):
        written(m, prompt(), cache, attention_mask=mask)


def test_weights_over_rows_that_differ_are_refused():
    m, mask = on_regard("llama"), padding("left")
    cache = regard_cache(m, layout=Rolling(11))
    with pytest.raises(RefusalError, match="its rows keep different tokens"), torch.no_grad():
        m(prompt(), **with_cache(cache), attention_mask=mask, output_attentions=True)


@pytest.mark.parametrize("words", [{"evict": Knorm(11)}, {"layout": Rolling(11, rope=Rope(8))}], ids=str)
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (transformers.T5Config(), "for T5: it adds a bias by position"),
        (transformers.UMT5Config(), "for UMT5: it adds a bias by position"),
        (transformers.LongT5Config(), "for LongT5: it adds a bias by position"),
        (transformers.GitConfig(), r"for Git: its attention \(GitSelfAttention\) never asks .*AttentionInterface"),
        (transformers.BloomConfig(), r"for Bloom: its attention \(BloomAttention\) never asks .*AttentionInterface"),
    ],
    ids=["t5", "umt5", "longt5", "git", "bloom"],
)
def test_a_model_that_cannot_go_by_what_is_left_is_refused_when_the_cache_is_made(
    config: Any, why: str, words: dict[str, Any]
):
    with pytest.raises(ProblemError, match=why):
        regard_cache(config, **words)
    regard_cache(config, codec=Int8())


def test_a_bias_by_position_does_not_go_with_forgetting(monkeypatch: pytest.MonkeyPatch):
    m = on_regard("t5")
    monkeypatch.setattr(cache_options, "cache_writers", lambda config: ())  # as for a model from elsewhere
    with pytest.raises(RefusalError, match="adds a bias by position"):
        written(m, prompt(), regard_cache(m, evict=Knorm(11)))


@pytest.mark.parametrize("cut", [8, 12], ids=["chunks", "one token"])
@pytest.mark.parametrize("policy", [SinksAndRecent(100), Knorm(100)], ids=repr)
def test_padded_rows_of_a_model_that_looks_both_ways_see_all_their_tokens(cut: int, policy: Any):
    """BERT without `is_decoder`: in its mask there is padding alone."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    torch.manual_seed(0)
    m = transformers.BertLMHeadModel(
        transformers.BertConfig(vocab_size=101, num_hidden_layers=2, initializer_range=0.2, **sizes)
    ).eval()
    ids, mask = tokens(), padding("left")

    def run(make: Callable[[], Any]) -> list[Tensor]:
        cache = make()
        with torch.no_grad():
            whole = m(ids, attention_mask=mask, **with_cache(make())).logits
            first = m(ids[:, :cut], attention_mask=mask[:, :cut], **with_cache(cache)).logits
            later = m(ids[:, cut:], attention_mask=mask, **with_cache(cache)).logits
        return [whole[mask.bool()], first[mask[:, :cut].bool()], later]

    m.set_attn_implementation("eager")
    expected = run(DynamicCache)
    use_regard(m)
    found = run(lambda: regard_cache(m, evict=policy))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(found, expected, strict=True))


@FORGETFUL
def test_forgetting_needs_an_attention_that_knows_of_it(words: dict[str, Any]):
    m = model("llama")
    m.set_attn_implementation("eager")
    with pytest.raises(RefusalError, match=r"an attention that is not regard's .* use_regard\(model\)"):
        written(m, prompt(), regard_cache(m, **words))


@FORGETFUL
def test_forgetting_and_drafts_do_not_go_together(words: dict[str, Any]):
    m = on_regard("llama")
    with pytest.raises(RefusalError, match="cannot serve assisted or prompt-lookup decoding"):
        written(m, prompt(1), regard_cache(m, **words), prompt_lookup_num_tokens=3)


@FORGETFUL
def test_an_attention_that_tells_nothing_is_found_out(words: dict[str, Any]):
    """As in a compiled model, whose attention is a graph: at the step after, before anything goes wrong."""
    m, layer = on_regard("llama"), regard_cache(model("llama"), **words).layers[0]
    assert m.config._attn_implementation == "regard"
    k = torch.randn(2, 2, 5, 8)
    layer.update(k, k)
    with pytest.raises(RefusalError, match="did not report what it read"):
        layer.update(k, k)
    layer.crop(-5)
    layer.update(k, k)
    assert layer.get_seq_length() == 5


def test_dropout_drops_weights_of_a_padded_batch_too():
    m = copy.deepcopy(model("llama")).train()
    m.config.attention_dropout = 0.5
    for layer in m.model.layers:
        layer.self_attn.attention_dropout = 0.5
    use_regard(m)
    ids = tokens(2, 13)

    def run() -> Tensor:
        cache = regard_cache(m, evict=Knorm(9))
        with torch.no_grad():
            return m(ids, attention_mask=padding("left"), **with_cache(cache)).logits

    assert not torch.equal(run(), run())
    m.eval()
    assert torch.equal(run(), run())
