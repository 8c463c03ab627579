#!/usr/bin/env bash
# The tests with other versions of torch and of Python than those of .venv: what passes goes into
# src/regard/torch_versions.py.
#
#   scripts/versions.sh                               every version there, with the Python of .venv
#   PYTHON=python3.13 scripts/versions.sh 2.15.0      one version, with another Python
#   scripts/versions.sh 2.15.0 tests/laws             other tests than those below
#
# The package index has the CUDA build of torch, 5 GB with what it depends on. Without a GPU nothing of that is called, so
# stand-ins of a few KB take the place of the CUDA libraries (1.1 GB for each version, in .venv/versions). Needed: c++, objdump.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$root"
python=${PYTHON:-$venv/bin/python}
versions=() tests=()
for argument in "$@"; do
    case $argument in [0-9]*) versions+=("$argument") ;; *) tests+=("$argument") ;; esac
done
if [ ${#versions[@]} = 0 ]; then
    read -ra versions <<<"$("$venv/bin/python" -c 'from regard.torch_versions import TESTED; print(*TESTED.values())')"
fi
[ ${#tests[@]} -gt 0 ] || tests=(
    tests/test_{attend,backends,native,state,torch_signature,torch_versions}.py tests/dispatch tests/nn tests/laws
    tests/backend/test_flex.py
    tests/override/test_{programs,masks,everywhere,graphs}.py tests/flex tests/integrate/test_{transformers,masks,compiled}.py
)

# prepare VERSION ENVIRONMENT: an environment with this torch, regard as it is now, and what the tests need.
prepare() {
    local packages needed
    if [ ! -f "$2/torch" ]; then
        rm -rf "$2"
        "$python" -m venv "$2"
        mkdir "$2/download"
        "$2/bin/pip" download --quiet --no-deps --dest "$2/download" "torch==$1"
        "$2/bin/pip" install --quiet --no-deps "$2"/download/torch-*.whl
        rm -r "$2/download"
        touch "$2/torch"
    fi
    if [ "$(cat "$2/ready" 2>/dev/null)" != "$(cksum <pyproject.toml)" ]; then
        needed=$("$2/bin/python" - <<'PYTHON'
import importlib.metadata
import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
packages = [*project["dependencies"][1:], *extras["models"], *extras["cli"], *extras["test"]]
packages += [each for each in importlib.metadata.requires("torch") if not re.search("cuda|nvidia|triton|extra ==", each)]
print("\n".join(package.replace(" ", "") for package in packages if "playwright" not in package))
PYTHON
        )
        # shellcheck disable=SC2086
        "$2/bin/pip" install --quiet $needed
        cksum <pyproject.toml >"$2/ready"
    fi
    packages=$(packages "$2")
    "$2/bin/python" scripts/cuda_stand_ins.py "$packages/torch/lib"
    rm -rf "$packages/regard"
    cp -rL src/regard "$packages/regard"
    cp -L "$("$venv/bin/python" -c 'from regard import native; print(native.path())')" "$packages/regard/" 2>/dev/null || true
}

# Where the packages of an environment are.
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

failed=0
for version in "${versions[@]}"; do
    name=torch-$version-python-$("$python" -c 'import platform; print(platform.python_version())')
    prepare "$version" "$venv/versions/$name"
    echo "== $name"
    "$venv/versions/$name/bin/python" -m pytest --quiet --long -p no:cacheprovider --tb=short --show-capture=no \
        -W "ignore:Guards may run slower on Python" "${tests[@]}" || failed=1
done
exit $failed
