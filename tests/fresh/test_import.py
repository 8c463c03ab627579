"""What `import regard` does to a fresh Python: it stays as light as `import torch`."""

import json
import subprocess
import sys
from typing import Any

PROBE = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
with_torch = set(sys.modules)
from regard import *
end = time.perf_counter()
print(json.dumps({"torch": middle - start, "regard": end - middle, "new": sorted(set(sys.modules) - with_torch)}))
"""

PACKAGES = ["transformers", "rich", "triton", "matplotlib", "gguf", "beartype", "torch._dynamo", "torch._inductor"]
ROOMS = ["regard.inspect", "regard.evaluate", "regard.parallel", "regard.integrate", "regard.cli"]


def import_in_a_fresh_python() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_regard_imports_torch_when_a_name_is_used():
    code = "import sys, regard; assert 'torch' not in sys.modules; regard.attend; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_public_name_is_no_module_whatever_was_imported_first():
    code = "import regard.attention, regard; assert regard.attend is regard.attention.attend; regard.rope.Yarn"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_regard_loads_nothing_heavy_that_torch_does_not_load():
    new = import_in_a_fresh_python()["new"]
    assert [name for name in PACKAGES + ROOMS if name in new] == []


def test_importing_regard_costs_little_beside_importing_torch():
    shares = [one["regard"] / one["torch"] for one in (import_in_a_fresh_python() for _ in range(3))]
    assert min(shares) < 0.25


def test_importing_regard_prints_nothing_and_warns_of_nothing():
    command = [sys.executable, "-W", "error", "-c", "import torch, regard"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
