"""What `import regard` does to a fresh Python: it stays as light as `import torch`."""

import json
import subprocess
import sys
from functools import cache
from typing import Any

import pytest

PROBE = """
import json, sys, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
with_torch = set(sys.modules)
import regard
end = time.perf_counter()
print(json.dumps({"torch": middle - start, "regard": end - middle, "new": sorted(set(sys.modules) - with_torch)}))
"""

PACKAGES = ["transformers", "rich", "triton", "matplotlib", "gguf", "beartype", "torch._dynamo", "torch._inductor"]
ROOMS = ["regard.inspect", "regard.evaluate", "regard.parallel", "regard.integrate", "regard.cli"]


def import_in_a_fresh_python() -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "error", "-c", PROBE], capture_output=True, text=True, check=True)


@cache
def first() -> subprocess.CompletedProcess[str]:
    """One new process answers all questions: it takes seconds to import torch."""
    return import_in_a_fresh_python()


def facts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_regard_loads_nothing_heavy_that_torch_does_not_load():
    new = facts(first())["new"]
    assert [name for name in PACKAGES + ROOMS if name in new] == []


def test_importing_regard_costs_little_beside_importing_torch():
    def share(done: subprocess.CompletedProcess[str]) -> float:
        return facts(done)["regard"] / facts(done)["torch"]

    # on a busy machine one import may wait: then two more have the chance to be fast
    assert share(first()) < 0.25 or min(share(import_in_a_fresh_python()) for _ in range(2)) < 0.25


def test_the_compiler_of_torch_is_not_loaded_with_the_public_names():
    code = "import sys; from regard import attend, everywhere; print('torch._dynamo' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "False\n"


def test_importing_regard_prints_nothing_and_warns_of_nothing():
    assert len(first().stdout.splitlines()) == 1  # the line of facts
    assert first().stderr == ""


@pytest.mark.exhaustive
def test_without_transformers_regard_integrate_says_what_to_install():
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.modules['transformers'] = None; from regard.integrate import use_regard",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: use_regard needs transformers, which is not installed: pip install 'regard[models]'."
    )


def test_importing_regard_flex_loads_no_compiler():
    probe = "import regard.flex, sys; print({'torch._dynamo', 'torch._inductor', 'sympy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
