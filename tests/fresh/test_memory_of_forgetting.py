"""What policies of forgetting free leaves the process: resident memory of a fresh one, while a model reads a prompt."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, LAYERS, BUDGET = 1009, 31, 53
LAYER = 2 * 8 * 64 * 4 * TOKENS
"""Bytes of a layer's keys and values, 3.9 MiB: beside them the model is small."""

LIMIT = 1.5 * LAYERS * LAYER
"""Of the peak."""

PROBE = f"""
import json, sys
from pathlib import Path
import torch
import transformers
import regard.cache
from regard.integrate import regard_cache, use_regard
from regard.integrate.cache_argument import as_argument

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024

torch.set_num_threads(1)
config = transformers.LlamaConfig(
    vocab_size=101, hidden_size=32, intermediate_size=64, num_hidden_layers={LAYERS}, num_attention_heads=8, head_dim=64
)
model = transformers.LlamaForCausalLM(config).eval()
use_regard(model)
ids = torch.randint(3, 101, (1, {TOKENS}))

def read(tokens):
    cache = regard_cache(model, evict=getattr(regard.cache, sys.argv[1])({BUDGET}))
    with torch.no_grad():
        model(ids[:, :tokens], **as_argument(model, cache))
        peak = status("VmHWM:")
        for _ in range(2):
            model(ids[:, :1], **as_argument(model, cache))
    return cache, peak, status("VmRSS:")

read(2 * {BUDGET})  # what a first use brings along
before = status("VmRSS:")
Path("/proc/self/clear_refs").write_text("5")
cache, peak, after = read({TOKENS})
print(json.dumps([peak - before, after - before, cache.bytes]))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is read where Linux keeps it")
@pytest.mark.exhaustive
@pytest.mark.parametrize("policy", ["SnapKV", "Knorm"])
def test_a_layer_at_a_time_is_whole_and_what_goes_leaves_the_process(policy: str):
    peaks = list[int]()
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROBE, policy], capture_output=True, text=True, check=True)
        peak, after, stored = json.loads(done.stdout)
        assert stored < LAYERS * LAYER / 17
        assert after < LAYERS * LAYER / 4
        peaks.append(peak)
        if peak < LIMIT:
            break
    # in 26 runs 0.4 to 1.6 of what all layers have, by what the allocator reuses; where all layers wait for the next
    # token, 2.7 in each
    assert min(peaks) < LIMIT
