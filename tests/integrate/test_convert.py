"""Checkpoints with fewer key heads: what transformers loads from them, and what is left when something goes wrong."""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from regard.errors import ProblemError
from regard.integrate.convert import convert_checkpoint
from regard.integrate.fewer_heads import FUSED, SEPARATE
from regard.unfinished import locked

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 8,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {
    "num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
}  # fmt: skip
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 6}, "gemma2": {"head_dim": 6}, "gemma3_text": {"head_dim": 6}, "qwen3": {"head_dim": 6},
    "mixtral": EXPERTS, "qwen2_moe": EXPERTS, "qwen3_moe": EXPERTS | {"head_dim": 6}, "phi": {"qk_layernorm": True},
    "glm": {"head_dim": 4}, "ministral": {"head_dim": 4},
    "cohere2": {"head_dim": 4}, "ernie4_5": {"head_dim": 4}, "glm4": {"head_dim": 4},
    "gpt_oss": EXPERTS | {"head_dim": 4}, "granitemoe": EXPERTS, "helium": {"head_dim": 4},
    "hunyuan_v1_dense": {"head_dim": 4}, "phimoe": EXPERTS,
    "seed_oss": {"head_dim": 4},
}  # fmt: skip


def made(kind: str, kv_heads: int | None = 4, **more: Any) -> Any:
    """A tiny model with large random weights."""
    torch.manual_seed(0)
    grouped = {} if kv_heads is None else {"num_key_value_heads": kv_heads}
    config = transformers.AutoConfig.for_model(kind, **SIZES | grouped | MORE.get(kind, {}) | more)
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    model.eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.3 + (1.0 if "norm" in name and "weight" in name else 0.0))
    return model


def saved(model: Any, folder: Path, **how: Any) -> Path:
    model.save_pretrained(folder, **how)
    return folder


def loaded(folder: Path) -> Any:
    """The model in a folder, which must hold what it takes and nothing else."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(folder, output_loading_info=True, dtype="auto")
    assert not any(info.values()), info
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        return model(torch.randint(3, 101, (2, 13))).logits


def close(one: Any, other: Any) -> bool:
    """Whether their logits differ by no more than 1e-5 of the largest."""
    a, b = logits(one), logits(other)
    return float((a - b).abs().max()) <= 1e-5 * max(1.0, float(b.abs().max()))


def equalise(model: Any, groups: int, kv_heads: int = 4) -> None:
    """Make the key heads of each group equal, and their value heads, each to their mean."""
    dim = getattr(model.config, "head_dim", None) or 32 // model.config.num_attention_heads
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".k_proj" in name or ".v_proj" in name:
                blocks = weight.view(groups, kv_heads // groups, dim, -1)
            elif ".qkv_proj" in name:
                blocks = weight[-2 * kv_heads * dim :].view(2 * groups, kv_heads // groups, dim, -1)
            else:
                continue
            blocks.copy_(blocks.double().mean(1, keepdim=True))


@pytest.fixture
def llama(tmp_path):
    return saved(made("llama"), tmp_path / "llama")


# ---- what it computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*SEPARATE, *FUSED])
def test_a_model_whose_heads_are_equal_computes_the_same_with_fewer(kind, tmp_path):
    model = made(kind)
    equalise(model, 2)
    done = convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=2)
    fewer = loaded(tmp_path / "out")
    assert fewer.config.num_key_value_heads == 2
    assert type(fewer) is type(model)
    assert close(fewer, model)
    assert max(done.key_distance + done.value_distance) < 1e-7
    assert (done.kv_heads, done.made_kv_heads, done.layers, done.heads) == (4, 2, 3, 8)


def test_heads_that_differ_become_their_mean_and_their_biases_too(tmp_path):
    model = made("qwen2")
    convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=2)
    before, after = load_file(tmp_path / "in" / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in before.items():
        a, b, c, d = weight.split(4) if ".k_proj." in name or ".v_proj." in name else (weight,) * 4
        expected = weight if a is b else torch.cat([(a + b) / 2, (c + d) / 2])
        torch.testing.assert_close(after[name], expected, rtol=1e-6, atol=1e-7)


def test_the_first_head_of_each_group_may_stand_for_it(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out", kv_heads=1, how="first")
    name = "model.layers.1.self_attn.v_proj.weight"
    before, after = load_file(llama / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(after[name], before[name][:4])


def test_random_heads_have_the_mean_and_deviation_of_the_old_and_follow_the_seed(tmp_path):
    model = made("llama", hidden_size=512, num_hidden_layers=1, head_dim=32)
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.add_(5)
    folder = saved(model, tmp_path / "in")
    name = "model.layers.0.self_attn.k_proj.weight"
    drawn = []
    for place, seed in (("a", 3), ("b", 3), ("c", 4)):
        convert_checkpoint(folder, tmp_path / place, kv_heads=2, how="random", seed=seed)
        drawn.append(load_file(tmp_path / place / "model.safetensors")[name])
    assert drawn[0].mean().item() == pytest.approx(5, abs=0.01)
    assert drawn[0].std().item() == pytest.approx(0.3, rel=0.03)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_how_far_heads_lie_from_their_mean_is_told_per_layer(llama, tmp_path):
    done = convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    before = load_file(llama / "model.safetensors")
    for letter, told in (("k", done.key_distance), ("v", done.value_distance)):
        for layer in range(3):
            heads = before[f"model.layers.{layer}.self_attn.{letter}_proj.weight"].double().view(2, 2, 4, 32)
            gone = (heads - heads.mean(1, keepdim=True)).norm() / heads.norm()
            assert told[layer] == pytest.approx(gone.item(), rel=1e-6)


def test_the_cache_shrinks_as_the_heads_do(tmp_path):
    model = made("llama", 8, head_dim=6).bfloat16()
    done = convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=1)
    cache = loaded(tmp_path / "out")(torch.randint(3, 101, (1, 5)), use_cache=True).past_key_values
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert done.made_cache_bytes == held // 5 == done.cache_bytes // 8


# ---- GPT-NeoX -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"attention_bias": False, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    ],
)
def test_a_gpt_neox_keeps_its_logits_as_another_architecture(parallel, more, tmp_path):
    model = made("gpt_neox", None, use_parallel_residual=parallel, num_attention_heads=4, **more)
    done = convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=4)
    other = loaded(tmp_path / "out")
    assert done.made_type == other.config.model_type == ("phi" if parallel else "nemotron")
    assert close(other, model)


def test_a_gpt_neox_that_is_trained_on_drops_as_much(tmp_path):
    model = made("gpt_neox", None, hidden_dropout=0.1, attention_dropout=0.2)
    convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=8)
    config = loaded(tmp_path / "out").config
    assert (config.embd_pdrop, config.resid_pdrop, config.attention_dropout) == (0.1, 0.1, 0.2)


@pytest.mark.parametrize("parallel", [True, False])
def test_a_gpt_neox_pools_its_heads(parallel, tmp_path):
    """The oracle: the same model, its own heads replaced by their means."""
    model = made("gpt_neox", None, use_parallel_residual=parallel, num_attention_heads=4)
    convert_checkpoint(saved(model, tmp_path / "in"), tmp_path / "out", kv_heads=2)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "query_key_value" in name:
                kv = weight.view(2, 2, 3, 8, -1)[:, :, 1:]
                kv.copy_(kv.mean(1, keepdim=True))
    fewer = loaded(tmp_path / "out")
    assert fewer.config.num_key_value_heads == 2
    assert close(fewer, model)


def test_a_norm_may_lie_in_another_file_than_the_projection_behind_it(tmp_path):
    model = made("gpt_neox", None, num_attention_heads=4)
    folder = saved(model, tmp_path / "in", max_shard_size="7KB")
    assert len(list(folder.glob("*.safetensors"))) > 3
    convert_checkpoint(folder, tmp_path / "out", kv_heads=4)
    assert close(loaded(tmp_path / "out"), model)


def test_buffers_that_old_gpt_neox_checkpoints_hold_are_left_out(tmp_path):
    model = made("gpt_neox", None, num_attention_heads=4)
    file = saved(model, tmp_path / "in") / "model.safetensors"
    stale = {"gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9)}
    save_file(load_file(file) | stale, file, {"format": "pt"})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", kv_heads=4)
    assert close(loaded(tmp_path / "out"), model)


# ---- the files ------------------------------------------------------------------------------------------------------


def test_shards_stay_shards_and_the_index_tells_the_truth(tmp_path):
    model = made("llama")
    equalise(model, 1)
    folder = saved(model, tmp_path / "in", max_shard_size="15KB")
    convert_checkpoint(folder, tmp_path / "out", kv_heads=1)
    assert close(loaded(tmp_path / "out"), model)
    files = {path.name for path in folder.glob("*.safetensors")}
    assert len(files) > 2
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == files
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    tensors = {}
    for file in files:
        held = load_file(tmp_path / "out" / file)
        assert {name for name, place in index["weight_map"].items() if place == file} == set(held)
        tensors |= held
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in tensors.values())


def test_weights_keep_their_type_and_files_their_metadata(tmp_path):
    file = saved(made("mistral").bfloat16(), tmp_path / "in") / "model.safetensors"
    save_file(load_file(file), file, {"format": "pt", "licence": "ours"})
    convert_checkpoint(tmp_path / "in", tmp_path / "out", kv_heads=2)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as made_file:
        assert made_file.metadata() == {"format": "pt", "licence": "ours"}
        assert {made_file.get_tensor(name).dtype for name in made_file.keys()} == {torch.bfloat16}  # noqa: SIM118
    assert loaded(tmp_path / "out").dtype == torch.bfloat16


def test_another_type_is_written_where_one_is_asked_for(llama, tmp_path):
    done = convert_checkpoint(llama, tmp_path / "out", kv_heads=2, dtype=torch.bfloat16)
    assert loaded(tmp_path / "out").dtype == torch.bfloat16
    assert done.cache_bytes == 4 * done.made_cache_bytes


def test_files_may_be_read_by_whom_new_files_may(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    (tmp_path / "new").touch()
    modes = {path.stat().st_mode for path in [tmp_path / "new", *(tmp_path / "out").iterdir()]}
    assert len(modes) == 1


def test_other_files_come_along_and_other_weights_do_not(llama, tmp_path):
    (llama / "tokenizer.json").write_text("{}")
    (llama / "templates").mkdir()
    (llama / "templates" / "chat.jinja").write_text("{{ x }}")
    (llama / "pytorch_model.bin").write_bytes(b"old")
    (llama / ".cache").mkdir()
    (llama / ".cache" / "lock").write_text("")
    done = convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "templates/chat.jinja",
        "regard-convert.json",
    }  # fmt: skip
    assert done.left_out == ("pytorch_model.bin",)
    assert done.bytes_written == sum(path.stat().st_size for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_config_changes_in_the_number_of_heads_alone(llama, tmp_path):
    said = json.loads((llama / "config.json").read_text()) | {"our_own": [1, 2]}
    (llama / "config.json").write_text(json.dumps(said))
    convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == said | {"num_key_value_heads": 2}


def test_heads_that_config_does_not_count_are_as_many_as_query_heads(tmp_path):
    """So it is in the checkpoints of the first Llama."""
    folder = saved(made("llama", 8), tmp_path / "in")
    said = json.loads((folder / "config.json").read_text())
    del said["num_key_value_heads"], said["head_dim"]
    (folder / "config.json").write_text(json.dumps(said))
    assert convert_checkpoint(folder, tmp_path / "out", kv_heads=2).kv_heads == 8
    assert loaded(tmp_path / "out").config.num_key_value_heads == 2


def test_a_model_in_the_cache_is_found_by_its_name(tmp_path, monkeypatch):
    import huggingface_hub.constants

    hub = tmp_path / "hub" / "models--we--tiny"
    saved(made("llama"), hub / "snapshots" / "abc")
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    convert_checkpoint("we/tiny", tmp_path / "out", kv_heads=2)
    assert loaded(tmp_path / "out").config.num_key_value_heads == 2


def test_progress_is_told_after_each_tensor(llama, tmp_path):
    told: list[tuple[str, int, int]] = []
    convert_checkpoint(llama, tmp_path / "out", kv_heads=2, progress=lambda *step: told.append(step))
    total = len(load_file(llama / "model.safetensors"))
    assert told == [("writing the weights", done, total) for done in range(1, total + 1)]


# ---- whole or not at all --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [KeyboardInterrupt, RuntimeError, OSError])
def test_what_is_cut_in_the_middle_leaves_nothing(broken, llama, tmp_path):
    def cut(_: str, done: int, total: int) -> None:
        if done == total // 2:
            raise broken

    with pytest.raises(ProblemError if broken is OSError else broken):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2, progress=cut)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.fixture
def earlier(llama, tmp_path):
    """What an earlier conversion wrote, of 4 key heads 1."""
    convert_checkpoint(llama, tmp_path / "out", kv_heads=1)
    return tmp_path / "out"


def test_what_a_conversion_wrote_is_replaced_whole_when_forced_and_never_merged_with(earlier, llama, tmp_path):
    (llama / "generation_config.json").unlink()
    with pytest.raises(ProblemError, match="is there already"):
        convert_checkpoint(llama, earlier, kv_heads=2)
    convert_checkpoint(llama, earlier, kv_heads=2, force=True)
    assert loaded(earlier).config.num_key_value_heads == 2
    assert not (earlier / "generation_config.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "out"}


def add(folder: Path) -> str:
    (folder / "notes").mkdir()
    (folder / "notes" / "diary.txt").write_text("dear")
    return "notes/diary.txt"


def train(folder: Path) -> str:
    trained = {name: tensor + 1 for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(trained, folder / "model.safetensors", {"format": "pt"})  # as large as before
    return "model.safetensors"


def link(folder: Path) -> str:
    (folder / "elsewhere").symlink_to(folder.parent / "llama")
    return "elsewhere"


def lose_the_list(folder: Path) -> str:
    (folder / "regard-convert.json").unlink()
    return "config.json and 2 more"


@pytest.mark.parametrize("change", [add, train, link, lose_the_list])
def test_what_was_added_or_changed_since_a_conversion_is_never_removed(change, earlier, llama):
    said = change(earlier)
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    with pytest.raises(ProblemError, match=f"out is not replaced: {said} in it was not written by a conversion, or"):
        convert_checkpoint(llama, earlier, kv_heads=2, force=True)
    assert {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()} == before


def test_the_list_of_a_conversion_is_not_copied_by_the_next(llama, tmp_path):
    convert_checkpoint(llama, tmp_path / "fewer", kv_heads=2)
    (tmp_path / "fewer" / "README.md").write_text("ours")
    for force in (False, True):
        convert_checkpoint(tmp_path / "fewer", tmp_path / "out", kv_heads=1, force=force)
        listed = json.loads((tmp_path / "out" / "regard-convert.json").read_text())["files"]
        assert {path.name for path in (tmp_path / "out").iterdir()} == {*listed, "regard-convert.json"}
        assert "README.md" in listed


KILLED = """
import os, signal, sys
from regard.integrate.convert import convert_checkpoint
def kill(_, done, total):
    if done == total // 2: os.kill(os.getpid(), signal.SIGKILL)
convert_checkpoint(sys.argv[1], sys.argv[2], kv_heads=2, progress=kill)
"""


def test_what_a_killed_conversion_left_is_removed_by_the_next(llama, tmp_path):
    killed = subprocess.run([sys.executable, "-c", KILLED, llama, tmp_path / "out"], check=False)
    assert killed.returncode == -signal.SIGKILL
    (part,) = [path.name for path in tmp_path.iterdir() if path.name != "llama"]
    assert re.fullmatch(r"\.out\.\d+\.part", part)
    convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "out"}


def test_a_conversion_that_runs_meanwhile_keeps_its_part(llama, tmp_path):
    def meanwhile(_: str, done: int, total: int) -> None:
        if done == 1:
            other = [sys.executable, "-m", "regard", "convert", llama, tmp_path / "out", "--kv-heads", "1"]
            assert subprocess.run(other, capture_output=True, check=False).returncode == 0
            convert_checkpoint(llama, tmp_path / "other", kv_heads=1)

    with pytest.raises(ProblemError, match="out cannot be written: Directory not empty"):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2, progress=meanwhile)
    assert loaded(tmp_path / "out").config.num_key_value_heads == 1


def test_a_part_of_a_process_that_is_not_seen_here_stays_while_it_is_locked(llama, tmp_path):
    """As of another container, whose processes have numbers of their own."""
    part = tmp_path / ".out.99999999.part"
    part.mkdir()
    with locked(part):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
        assert part.exists()
    convert_checkpoint(llama, tmp_path / "out", kv_heads=2, force=True)
    assert not part.exists()


def test_what_a_process_that_was_killed_had_set_aside_is_put_back(earlier, llama):
    earlier.rename(earlier.with_name(".out.99999999.old"))
    with pytest.raises(ProblemError, match="is there already"):
        convert_checkpoint(llama, earlier, kv_heads=2)
    assert loaded(earlier).config.num_key_value_heads == 1


@pytest.mark.parametrize("broken", [KeyboardInterrupt, OSError])
def test_what_is_there_stays_when_its_successor_cannot_take_its_place(broken, earlier, llama, tmp_path, monkeypatch):
    rename = Path.rename

    def cut(path: Path, to: Path) -> Path:
        if path.suffix == ".part":
            raise broken
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", cut)
    with pytest.raises(ProblemError if broken is OSError else broken):
        convert_checkpoint(llama, earlier, kv_heads=2, force=True)
    assert loaded(earlier).config.num_key_value_heads == 1
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "out"}


def test_what_was_there_is_never_lost_even_if_it_cannot_be_put_back(earlier, llama, tmp_path, monkeypatch):
    rename = Path.rename

    def cut(path: Path, to: Path) -> Path:
        if path.suffix in (".part", ".old"):
            raise OSError
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", cut)
    with pytest.raises(ProblemError):
        convert_checkpoint(llama, earlier, kv_heads=2, force=True)
    (aside,) = [path for path in tmp_path.iterdir() if path.name != "llama"]
    assert loaded(aside).config.num_key_value_heads == 1


def test_what_came_to_be_there_meanwhile_is_not_replaced(llama, tmp_path):
    def interfere(_: str, done: int, total: int) -> None:
        if done == total:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "config.json").write_text("theirs")

    with pytest.raises(ProblemError, match="out cannot be written: Directory not empty"):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2, progress=interfere)
    assert (tmp_path / "out" / "config.json").read_text() == "theirs"
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "out"}


# ---- what makes no sense --------------------------------------------------------------------------------------------


def config(folder: Path, **more: Any) -> None:
    (folder / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | more))


def weights(folder: Path, **more: torch.Tensor | None) -> None:
    new = {name.replace("__", "."): tensor for name, tensor in more.items()}
    kept = load_file(folder / "model.safetensors") | new
    save_file({name: t for name, t in kept.items() if t is not None}, folder / "model.safetensors")


def rename(folder: Path, to: str) -> None:
    (folder / "model.safetensors").rename(folder / to)


FAULTS: dict[str, tuple[Any, str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "it has no config.json"),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "holds no JSON object"),
    "config is wrong": (lambda f: config(f, hidden_size="wide"), "config.json cannot be read"),
    "unknown": (lambda f: config(f, model_type="mamba"), "model_type 'mamba': expected one of apertus, .*qwen3"),
    "latent": (lambda f: config(f, model_type="deepseek_v3"), "latent attention .* nothing to pool"),
    "quantised": (lambda f: config(f, quantization_config={"quant_method": "gptq"}), r"quantised \(gptq\)"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "has no weights"),
    "bin only": (lambda f: rename(f, "pytorch_model.bin"), "weights in pytorch_model.bin and not in safetensors"),
    "broken": (lambda f: (f / "model.safetensors").write_bytes(b"not tensors"), "model.safetensors cannot be read"),
    "layer lacks": (
        lambda f: weights(f, model__layers__1__self_attn__k_proj__weight=None),
        "lacks self_attn.k_proj.weight of layer 1",
    ),
    "shape": (
        lambda f: weights(f, model__layers__2__self_attn__v_proj__weight=torch.zeros(15, 32)),
        r"v_proj.weight has shape \[15, 32\]: by config.json expected \[16, 32\]",
    ),
    "codes": (
        lambda f: weights(f, model__layers__2__self_attn__v_proj__weight=torch.zeros(16, 32, dtype=torch.int8)),
        "holds I8: expected floats",
    ),
    "norm per head": (
        lambda f: weights(f, model__layers__0__self_attn__k_norm__weight=torch.zeros(4, 4)),
        "leaves them no common mean",
    ),
    "norms of each head": (
        lambda f: weights(f, model__layers__0__self_attn__k_layernorm__norms__3__weight=torch.zeros(4)),
        "leaves them no common mean",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_cannot_be_converted_says_why(fault, llama, tmp_path):
    spoil, said = FAULTS[fault]
    spoil(llama)
    with pytest.raises(ProblemError, match=said) as error:
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"kv_heads": 3}, "4 key heads do not fall into 3 groups of one size: expected one of 1, 2, 4"),
        ({"kv_heads": 8}, "8 key heads are asked for and there are 4"),
        ({"kv_heads": 4}, "has 4 key heads already"),
        ({"kv_heads": 0}, "expected 1 or more"),
        ({"kv_heads": 2, "how": "median"}, "'median' is no way to share heads"),
    ],
)
def test_heads_that_cannot_be_made_are_refused(asked, said, llama, tmp_path):
    with pytest.raises(ProblemError, match=said):
        convert_checkpoint(llama, tmp_path / "out", **asked)


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("llama", "is what is read|lie one in the other"),
        ("llama/out", "is what is read|lie one in the other"),
        (".", "is what is read|lie one in the other"),
        ("nowhere/out", "there is no folder"),
        ("file", "is there and is no folder"),
        ("full", "full is not replaced: letters.txt in it was not written by a conversion"),
    ],
)
def test_a_place_that_cannot_be_written_or_must_not_be_is_refused(target, said, llama, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letters.txt").write_text("dear")
    with pytest.raises(ProblemError, match=said):
        convert_checkpoint(llama, tmp_path / target, kv_heads=2, force=True)
    assert (tmp_path / "full" / "letters.txt").read_text() == "dear"


def test_a_disk_without_room_is_found_before(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1, 1, 1000))
    with pytest.raises(ProblemError, match="GB free and the result takes"):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2)


@pytest.mark.parametrize(
    ("source", "said"),
    [("nowhere", "there is no folder nowhere"), ("we/none", "no model we/none in the Hugging Face cache")],
)
def test_a_checkpoint_that_is_not_there_is_said(source, said, tmp_path):
    with pytest.raises(ProblemError, match=said):
        convert_checkpoint(source, tmp_path / "out", kv_heads=2)


def test_a_shard_that_the_index_names_must_be_there_with_its_tensors(tmp_path):
    folder = saved(made("llama"), tmp_path / "in", max_shard_size="15KB")
    first = min(folder.glob("*.safetensors"))
    held = load_file(first)
    save_file(dict(list(held.items())[1:]), first)
    with pytest.raises(ProblemError, match=r"lacks .*, which model\.safetensors\.index\.json says is in it"):
        convert_checkpoint(folder, tmp_path / "out", kv_heads=2)
    first.unlink()
    with pytest.raises(ProblemError, match=f"lacks {first.name}, which"):
        convert_checkpoint(folder, tmp_path / "out", kv_heads=2)


def test_a_disk_that_fills_up_meanwhile_is_said_and_leaves_nothing(llama, tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device")

    monkeypatch.setattr("regard.integrate.weights.save_file", full)
    with pytest.raises(ProblemError, match=r"cannot be written: .*No space left"):
        convert_checkpoint(llama, tmp_path / "out", kv_heads=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [llama.name]


def test_of_a_single_file_and_shards_the_file_is_read_as_transformers_reads_it(tmp_path):
    one, other = made("llama"), made("llama")
    folder = saved(one, tmp_path / "both")
    saved(other, tmp_path / "shards", max_shard_size="20KB")
    for path in (tmp_path / "shards").glob("model*"):
        path.rename(folder / path.name)
    done = convert_checkpoint(folder, tmp_path / "out", kv_heads=2)
    assert len(done.left_out) > 1
    made_of, read = (loaded(place).model.layers[0].self_attn.q_proj.weight for place in (tmp_path / "out", folder))
    assert torch.equal(made_of, read)


def test_a_command_that_is_terminated_leaves_nothing(llama, tmp_path):
    text = """
import os, signal, sys
from regard.cli.main import main
from regard.integrate import weights
weights.save_file = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.exit(main(sys.argv[1:]))
"""
    command = [sys.executable, "-c", text, "convert", llama, tmp_path / "out", "--kv-heads", "2"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 143
    assert sorted(path.name for path in tmp_path.iterdir()) == [llama.name]
