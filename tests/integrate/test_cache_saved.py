"""A model's cache, pickled, copied, saved to a file: it goes on with the same bits, for this model and text alone."""

import copy
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard import ProblemError, RefusalError
from regard.cache import H2O, TOVA, ExpectedAttention, Knorm, PagePool, SinksAndRecent, SnapKV
from regard.integrate import cache_file, load_cache, regard_cache
from regard.integrate.cache_tree import Reader
from regard.integrate.transformers import use_regard
from regard.storage.codec import Fp8, Int4, Int8
from regard.storage.stored import Contiguous, Paged, Rolling
from tests.integrate.writing import on_regard, prompt, written
from tests.integrate.zoo import model, padding, tokens, with_cache
from tests.stored import used_pages

WORDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fixed": {"layout": Contiguous(capacity=40)},
    "paged": {"layout": Paged(3)},
    "rolling": {"layout": Rolling(9, 2)},
    "bfloat16": {"codec": torch.bfloat16},
    "int8": {"codec": Int8(16, 3)},
    "int4 rotated": {"codec": Int4(16, 3, rotate=True)},
    "paged fp8": {"layout": Paged(16), "codec": Fp8(16, 0, 0)},
    "rolling int8": {"layout": Rolling(9, 2), "codec": Int8(16, 3)},
    "recent": {"evict": SinksAndRecent(9)},
    "Knorm, paged int8": {"layout": Paged(16), "codec": Int8(16, 0, 0), "evict": Knorm(9)},
    "H2O": {"evict": H2O(9)},
    "TOVA": {"evict": TOVA(9)},
    "SnapKV": {"evict": SnapKV(9, window=2)},
    "expected, int8": {"codec": Int8(16, 0, 0), "evict": ExpectedAttention(9, values=False)},
}
MODELS = ["llama", "gemma3", "deepseek_v3"]


def through_a_file(cache: Any, m: Any, ids: Tensor, folder: Path) -> Any:
    cache.save(folder / "cache.safetensors", ids)
    return load_cache(m, folder / "cache.safetensors", tokens=ids)


WAYS: dict[str, Callable[[Any, Any, Tensor, Path], Any]] = {
    "pickle": lambda cache, m, ids, folder: pickle.loads(pickle.dumps(cache)),
    "deepcopy": lambda cache, m, ids, folder: copy.deepcopy(cache),
    "file": through_a_file,
}


def made(m: Any, words: dict[str, Any]) -> Any:
    """A cache of these words; None where the model takes none of them."""
    try:
        return regard_cache(m, **words)
    except ProblemError:
        return None


def explained(cache: Any) -> str:
    """But for the rotation, of which a copy says defaults as well."""
    return re.sub(r"Rope\(.*?\)", "Rope", cache.explain())


@pytest.mark.exhaustive(per="test")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_copy_of_a_cache_goes_on_with_the_same_bits_and_on_its_own(name: str, words: str, way: str, tmp_path: Path):
    m, ids, more = on_regard(name), prompt(), tokens(2, 4)
    cache = made(m, WORDS[words])
    if cache is None:
        return
    with torch.no_grad():
        m(ids, **with_cache(cache))
        other = WAYS[way](cache, m, ids, tmp_path)
        assert (explained(other), other.bytes) == (explained(cache), cache.bytes)
        third = WAYS[way](cache, m, ids, tmp_path)
        m(tokens(2, 5), **with_cache(third))
        third.reset()
        for step in more.split(1, dim=1):
            found, expected = (m(step, **with_cache(one)).logits for one in (other, cache))
            assert torch.equal(found, expected)
    assert (
        written(m, torch.cat([ids, more, more], 1), other)[0] == written(m, torch.cat([ids, more, more], 1), cache)[0]
    )


@pytest.mark.skipif(not hasattr(transformers, "DoryConfig"), reason="its layers run again since transformers 5.24")
def test_layers_that_a_model_appends_are_explained_and_copied(tmp_path: Path):
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "n_input_layers": 1, "n_output_layers": 0, "sliding_window": 5}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    config = transformers.DoryConfig(vocab_size=101, hidden_size=32, intermediate_size=48, **sizes, **heads)
    m, ids = use_regard(transformers.DoryForCausalLM(config).eval()), prompt()
    cache = regard_cache(m, codec=Int8(16, 3))
    with torch.no_grad():
        m(ids, **with_cache(cache))
        assert re.findall(r"^  ([\d, -]+)  ", cache.explain(), re.MULTILINE) == ["0-4"]
        others = [way(cache, m, ids, tmp_path) for way in WAYS.values()]
        first, *found = (m(ids[:, :1], **with_cache(one)).logits for one in (cache, *others))
    assert all(torch.equal(first, logits) for logits in found)


def test_torch_saves_a_cache_too(tmp_path: Path):
    m, ids = on_regard("llama"), prompt()
    cache = regard_cache(m, codec=Int8(16, 3))
    with torch.no_grad():
        m(ids, **with_cache(cache))
        torch.save(cache, tmp_path / "cache.pt")
        other = torch.load(tmp_path / "cache.pt", weights_only=False)
        assert torch.equal(*(m(ids[:, :1], **with_cache(one)).logits for one in (cache, other)))


def test_a_padded_batch_under_a_policy_goes_on(tmp_path: Path):
    m, ids, mask = on_regard("llama"), prompt(), padding("left")
    cache = regard_cache(m, evict=TOVA(7))
    with torch.no_grad():
        m(ids, attention_mask=mask, **with_cache(cache))
        others = [way(cache, m, ids, tmp_path) for way in WAYS.values()]
        mask = torch.cat([mask, torch.ones(2, 1, dtype=mask.dtype)], 1)
        first, *found = (m(ids[:, :1], attention_mask=mask, **with_cache(one)).logits for one in (cache, *others))
    assert all(torch.equal(first, logits) for logits in found)


def test_an_encoder_and_what_was_read_travel_together(tmp_path: Path):
    m, ids = on_regard("bart"), prompt()
    cache = regard_cache(m)
    with torch.no_grad():
        encoded = m(input_ids=ids, decoder_input_ids=ids[:, :5], **with_cache(cache)).encoder_last_hidden_state
        for other in (pickle.loads(pickle.dumps(cache)), copy.deepcopy(cache)):
            mine = copy.deepcopy(cache)
            given: dict[str, Any] = {"encoder_outputs": (encoded,), "decoder_input_ids": ids[:, 5:6]}
            assert torch.equal(m(**given, **with_cache(other)).logits, m(**given, **with_cache(mine)).logits)
    with pytest.raises(RefusalError, match=r"cannot be saved to a file.*pickle"):
        cache.save(tmp_path / "cache.safetensors", ids)


def test_layers_that_share_a_pool_share_one_again(tmp_path: Path):
    m, ids = on_regard("llama"), prompt()
    pool = PagePool(page=3)
    cache = regard_cache(m, layout=Paged(3, pool))
    with torch.no_grad():
        m(ids, **with_cache(cache))
    for way in ("pickle", "file"):
        other = WAYS[way](cache, m, ids, tmp_path)
        first, second = (layer.kv.layout.pool for layer in other.layers)
        assert first is second is other.options.layout.pool is not pool
        assert used_pages(first) == used_pages(pool)
    assert copy.deepcopy(cache).options.layout.pool is pool


# ---- what a file is checked for -------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    m = on_regard("llama")
    cache = regard_cache(m, codec=Int8(16, 3))
    with torch.no_grad():
        m(prompt(), **with_cache(cache))
    cache.save(tmp_path / "cache.safetensors", prompt())
    return tmp_path / "cache.safetensors"


def test_a_text_is_gone_on_with_from_a_file(saved: Path):
    m, text = on_regard("llama"), torch.cat([prompt(), tokens(2, 5)], 1)
    cache = load_cache(m, saved, tokens=text)
    assert torch.equal(cache.ids, prompt())
    computed = regard_cache(m, codec=Int8(16, 3))
    with torch.no_grad():
        m(prompt(), **with_cache(computed))
    assert written(m, text, cache)[0] == written(m, text, computed)[0]
    cache.save(saved, torch.cat([text, tokens(2, 99)], 1))  # a file is replaced; ids beyond what was seen are left out
    assert load_cache(m, saved).ids.shape == (2, text.shape[1] + 8)


@pytest.mark.parametrize("at", [10, 2000, -100, -1])
def test_a_damaged_file_is_refused(saved: Path, at: int):
    content = bytearray(saved.read_bytes())
    content[at] ^= 1
    saved.write_bytes(content)
    with pytest.raises(ProblemError, match="damaged"):
        load_cache(model("llama"), saved)


@pytest.mark.parametrize("left", [0, 5, 1000, -1])
def test_a_truncated_file_is_refused(saved: Path, left: int):
    saved.write_bytes(saved.read_bytes()[:left])
    with pytest.raises(ProblemError, match="damaged, or no safetensors file"):
        load_cache(model("llama"), saved)


def test_what_is_no_cache_is_refused(tmp_path: Path):
    with pytest.raises(ProblemError, match=r"is no file: expected one that cache\.save"):
        load_cache(model("llama"), tmp_path / "none")
    save_file({"tokens": torch.ones(3)}, tmp_path / "other", {"format": "pt"})
    with pytest.raises(ProblemError, match="holds no cache"):
        load_cache(model("llama"), tmp_path / "other")


def test_another_model_is_refused(saved: Path):
    with pytest.raises(ProblemError, match=r"cache of llama, and the model is qwen3: it has .* and not"):
        load_cache(model("qwen3"), saved)
    other = copy.deepcopy(model("llama"))
    assert load_cache(other, saved).get_seq_length() == 13
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.mul_(2)
    with pytest.raises(ProblemError, match="with other weights"):
        load_cache(other, saved)
    assert load_cache(other.config, saved).get_seq_length() == 13


def test_other_tokens_are_refused(saved: Path):
    m, other = model("llama"), prompt()
    other[1, 7] += 1
    with pytest.raises(ProblemError, match=rf"at 7 of row 1 it has {int(other[1, 7]) - 1}, and the text has"):
        load_cache(m, saved, tokens=other)
    for text in (prompt()[:1], prompt()[:, :-1]):
        with pytest.raises(ProblemError, match="expected a text that begins with those"):
            load_cache(m, saved, tokens=text)
    with pytest.raises(ProblemError, match="expected the ids of the text"):
        load_cache(m, saved, tokens=prompt().float())


def test_what_cannot_be_saved_says_why(tmp_path: Path):
    m, path = on_regard("llama"), tmp_path / "cache.safetensors"
    cache = regard_cache(m)
    with pytest.raises(ProblemError, match="is empty: there is nothing to save"):
        cache.save(path, prompt())
    with torch.no_grad():
        m(prompt(), **with_cache(cache))
    for ids in (prompt()[:1], prompt()[:, :-1]):
        with pytest.raises(ProblemError, match=r"the cache has read 13 tokens of 2 rows: .* \[2, 13\]"):
            cache.save(path, ids)
    for wrong in (tmp_path, tmp_path / "none" / "cache"):
        with pytest.raises(ProblemError, match="expected a file in a folder that is there"):
            cache.save(wrong, prompt())
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_whole_or_not_at_all(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before, cache = saved.read_bytes(), load_cache(on_regard("llama"), saved)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ProblemError, match=r"cannot be written.*No space left"):
        cache.save(saved, prompt())
    assert (list(saved.parent.iterdir()), saved.read_bytes()) == ([saved], before)


def test_a_disk_that_is_full_for_safetensors_is_reported_as_for_others(saved: Path, monkeypatch: pytest.MonkeyPatch):
    before, cache = saved.read_bytes(), load_cache(on_regard("llama"), saved)

    def full(*_: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(cache_file, "save_file", full)
    with pytest.raises(ProblemError, match=r"cannot be written: Error while serializing.*No space left"):
        cache.save(saved, prompt())
    assert (list(saved.parent.iterdir()), saved.read_bytes()) == ([saved], before)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such permissions")
def test_a_file_has_the_permissions_of_the_one_it_replaces_or_of_any_new_one(saved: Path):
    cache, other = load_cache(on_regard("llama"), saved), saved.with_name("other")
    other.touch()
    assert saved.stat().st_mode == other.stat().st_mode
    saved.chmod(0o600)
    cache.save(saved, prompt())
    assert saved.stat().st_mode & 0o777 == 0o600


def test_a_file_that_is_no_cache_is_not_replaced(saved: Path):
    cache, weights = load_cache(on_regard("llama"), saved), saved.with_name("model.safetensors")
    save_file({"tokens": torch.ones(3)}, weights)
    notes = saved.with_name("notes.txt")
    notes.write_text("Call me Ishmael.")
    for path in (weights, notes):
        before = path.read_bytes()
        with pytest.raises(ProblemError, match=r"is there, and is no cache that regard saved: .* another file"):
            cache.save(path, prompt())
        assert path.read_bytes() == before
    damaged = saved.with_name("damaged.safetensors")
    damaged.write_bytes(saved.read_bytes()[:-100])
    empty = saved.with_name("empty.safetensors")
    empty.touch()
    for path in (damaged, empty):
        cache.save(path, prompt())
        assert load_cache(model("llama"), path).get_seq_length() == 13


def test_what_a_killed_save_left_is_removed_by_the_next(saved: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    left = saved.with_name(f".{saved.name}.{gone.pid}.3.part")
    left.touch()
    load_cache(on_regard("llama"), saved).save(saved, prompt())
    assert list(saved.parent.iterdir()) == [saved]


def test_a_link_stays_and_the_cache_goes_to_what_it_leads_to(saved: Path):
    link = saved.with_name("link.safetensors")
    link.symlink_to(saved)
    before = saved.stat().st_ino
    load_cache(on_regard("llama"), link).save(link, prompt())
    assert link.is_symlink()
    assert saved.stat().st_ino != before


@dataclass(frozen=True)
class Mine(SinksAndRecent):
    """A policy of a user's own."""


def test_a_policy_of_ones_own_is_pickled_and_not_saved(tmp_path: Path):
    m = on_regard("llama")
    cache = regard_cache(m, evict=Mine(9))
    with torch.no_grad():
        m(prompt(), **with_cache(cache))
    assert pickle.loads(pickle.dumps(cache)).options.evict == Mine(9)
    with pytest.raises(RefusalError, match=r"Mine cannot be saved to a file.*pickle, takes any"):
        cache.save(tmp_path / "cache", prompt())


@pytest.mark.parametrize("name", ["os.system", "regard.cache.kv_cache.copy", "regard.cache.store.importlib", "KVCache"])
def test_a_file_names_no_class_that_is_not_regards(name: str):
    with pytest.raises(ProblemError, match="no class of regard's caches"):
        Reader({}, torch.device("cpu")).read({"class": name, "state": {"dict": []}})
    with pytest.raises(ProblemError, match="no class of regard's caches"):
        Reader({}, torch.device("cpu")).read({"tuple": [], "class": "regard.cache.kv_cache.KVCache"})
    with pytest.raises(ProblemError, match="which torch does not have"):
        Reader({}, torch.device("cpu")).read({"dtype": "load"})


def test_a_file_holds_the_ids_by_name(saved: Path):
    tensors = load_file(saved)
    assert torch.equal(tensors["tokens"], prompt())
