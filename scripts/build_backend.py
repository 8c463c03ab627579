"""The build backend of pyproject.toml: scikit-build-core's, with another file name for a wheel without kernels.

pip keeps each wheel that it builds from an sdist, and installs it again the next time: without kernels also where there
is a compiler by then. So it gets a file name for "py0", no Python at all: pip installs what it has built without a look
at the name, and never takes it from its cache. Other front ends (uv, build) get the usual name, as uv does look.
"""

import os
from pathlib import Path
from typing import Any

import scikit_build_core.build as backend


def __getattr__(name: str) -> Any:
    """Whatever else a front end asks a backend for."""
    return getattr(backend, name)


ISAS = ("portable", "avx2", "avx512", "avx512vnni", "avx512bf16", "amx", "neon")


def check_isas(settings: Any) -> None:
    """Raise `ValueError` for a wrong `REGARD_ISAS`: as any error of CMake, it would pass for a missing compiler."""
    given = os.environ.get("REGARD_ISAS") or str((settings or {}).get("cmake.define.REGARD_ISAS", ""))
    if given in ("", "best", "all", "check"):
        return
    unknown = [name for name in given.replace(";", ",").split(",") if name not in ISAS]
    if unknown:
        raise ValueError(f"REGARD_ISAS has {unknown[0]!r}: expected best, all, check, or some of {','.join(ISAS)}.")


def build_editable(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build the wheel of an editable install and return its file name."""
    check_isas(settings)
    return backend.build_editable(folder, settings, metadata)


def build_wheel(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    """Build the wheel and return its file name; it has no kernels if it is for any machine."""
    check_isas(settings)
    name: str = backend.build_wheel(folder, settings, metadata)
    if "PIP_BUILD_TRACKER" not in os.environ or not name.endswith("-py3-none-any.whl"):
        return name
    for_no_python = name.replace("-py3-none-any.whl", "-py0-none-any.whl")
    Path(folder, name).rename(Path(folder, for_no_python))
    return for_no_python
