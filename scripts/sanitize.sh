#!/usr/bin/env bash
# Runs the tests of the compiled library on a build that watches every access to memory and undefined operations.
#
#   scripts/sanitize.sh             the tests that reach every line of it: some three minutes on two processors
#   scripts/sanitize.sh ARGS...     pytest with these arguments
#
# The library is built apart, by hand and without optimisation, for the plainest instruction set and for this machine's best;
# a plugin of pytest points regard to it. Tiles of AMX are memory in it (tests/amx), or what is loaded into them would go
# unwatched; so a machine with AVX-512's bf16 products runs the instruction set amx as well. Python itself is not built so:
# the sanitizers' runtime is loaded before it, and leaks, which a Python that ends always has, are not looked for.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_ready test
cd "$root"

compiler=${CXX:-c++}
if ! command -v "$compiler" >/dev/null; then
    echo "no $compiler: nothing to build"
    exit 0
fi
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
best=$("$venv/bin/python" -c 'from regard import native; print(native.isas()[-1])')
common="-std=c++17 -fPIC -g1 -O1 -fsanitize=address -fno-sanitize-recover=all -fno-omit-frame-pointer -ffp-contract=off -w"

# flags ISA: what CMakeLists.txt compiles it with.
flags() {
    if [ "$1" = amx ]; then
        echo "$(flags avx512bf16) -include tests/amx/tiles_in_memory.h"
    else
        sed -n "s/^  kernels($1 *\(.*\))$/\1/p" CMakeLists.txt | head -1
    fi
}

# compile ISA SOURCE FLAGS...: one file of its kernels, of native/ or $place.
compile() {
    local source=native/$2
    [ -f "$source" ] || source=$place/$2
    # shellcheck disable=SC2086
    "$compiler" $common -DREGARD_ISA="isa_$1" -DREGARD_KERNELS="$1" -fno-math-errno -fno-trapping-math "${@:3}" \
        -c "$source" -o "$place/$1_${2%.cpp}.o"
}
export -f compile
export compiler common place

# kernels ISA: a line for each file that CMakeLists.txt compiles for it.
kernels() {
    local more="" sources="kernels.cpp kernels_gradients.cpp" source
    case $1 in
        avx512vnni | amx) sources=kernels_${1#avx512}.cpp ;;
        # Other sets have vectors by hand: the checks of undefined operations would take minutes to compile.
        portable) sources="kernels_forward.cpp $sources" more=-fsanitize=undefined ;;
        *) sources="kernels_f32.cpp kernels_bf16.cpp kernels_f16.cpp $sources" ;;
    esac
    for source in $sources; do echo "$1 $source $(flags "$1") $more -Inative -fno-lto"; done
}
printf '#include "kernels_%s.cpp"\n' f32 bf16 f16 >"$place/kernels_forward.cpp"

case $best in
    portable) sets= ;;
    avx512vnni) sets="avx512 avx512vnni" ;; # the second has few kernels of its own and shares the others
    avx512bf16 | amx) sets="avx512bf16 amx" ;;
    *) sets=$best ;;
esac
built=
for isa in $sets; do built="$built -DREGARD_WITH_$(tr '[:lower:]' '[:upper:]' <<<"$isa")=1"; done
for isa in portable $sets; do kernels "$isa"; done |
    # shellcheck disable=SC2016
    xargs -P "$(nproc)" -L 1 bash -c 'compile "$@"' compile
# shellcheck disable=SC2086
"$compiler" $common -fsanitize=undefined -shared $built -DREGARD_TILES_IN_MEMORY=1 \
    native/{abi,caches,check,detect,limits,linear,listing,plain,threads}.cpp "$place"/*.o -o "$place/libregard.so" -ldl -lpthread

cat >"$place/sanitized.py" <<PYTHON
from regard import native

native._find = lambda: "$place/libregard.so"
PYTHON
# Random calls on every kernel, bad structs, and several threads; without what measures time or memory.
[ $# -gt 0 ] || set -- tests/native/test_{interface,kernels,tiles,listing,linear,storage,dropout,manners,sweep,sweep_interface}.py \
    -k "not ctrl_c and not little_memory and not other_threads" --numprocesses 2
runtimes=""
for name in asan ubsan stdc++; do runtimes="$runtimes:$("$compiler" -print-file-name="lib$name.so")"; done
env LD_PRELOAD="${runtimes#:}" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH="$place" \
    OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest --long -p sanitized -p no:cacheprovider "$@"
