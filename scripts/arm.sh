#!/usr/bin/env bash
# Runs laws and kernel tests on NEON: the library for 64-bit ARM under QEMU, with this machine's Python and torch.
#
#   scripts/arm.sh             some three minutes on two processors
#   scripts/arm.sh ARGS...     pytest with these arguments
#
# Needed: aarch64-linux-gnu-g++ and qemu-aarch64 (Debian: g++-aarch64-linux-gnu, qemu-user). Without them it says so and
# exits with 0. tests/arm/relay.cpp is the library that Python loads; it sends each call to tests/arm/machine.cpp, which
# QEMU runs and which calls the library for ARM. What that touches of Python's memory, it fetches page by page.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
make_ready test
cd "$root"

for needed in aarch64-linux-gnu-g++ qemu-aarch64 c++; do
    if ! command -v "$needed" >/dev/null; then
        echo "no $needed: NEON is not tested"
        exit 0
    fi
done
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
flags="-std=c++17 -fPIC -Wall -Wextra -Werror -ffp-contract=off -fno-math-errno -fno-trapping-math"

# arm OUTPUT ARGS...: compiles for 64-bit ARM, with the options of CMakeLists.txt.
arm() {
    # shellcheck disable=SC2086
    aarch64-linux-gnu-g++ $flags -fvisibility=hidden -Wno-maybe-uninitialized -Wno-uninitialized "${@:2}" -o "$place/$1"
}

# kernels ISA LEVEL: native/kernels.cpp for it.
kernels() { arm "$1.o" "$2" -DREGARD_ISA="isa_$1" -DREGARD_KERNELS="$1" -c native/kernels.cpp; }

kernels neon -O3 &
neon=$!
kernels portable -O1 &  # the same source for the same processor: compiled and linked, not tested
portable=$!
# shellcheck disable=SC2086
c++ $flags -O2 -fvisibility=hidden -shared tests/arm/relay.cpp -o "$place/relay.so" -ldl -lpthread
arm machine -O2 -rdynamic tests/arm/machine.cpp -ldl -lpthread
wait "$portable"
wait "$neon"
sources=$(sed -n 's/^add_library(regard MODULE \(.*\))$/\1/p' CMakeLists.txt)
# shellcheck disable=SC2086
arm libregard.so -O2 -shared -Wl,--no-undefined -DREGARD_WITH_NEON=1 $sources "$place"/{neon,portable}.o -ldl -lpthread

cat >"$place/relayed.py" <<PYTHON
from regard import native

native._find = lambda: "$place/relay.so"
PYTHON
# Left out: what takes minutes under QEMU.
left_out="decoding_gives_the_bits or far_strides"
[ $# -gt 0 ] || set -- tests/laws \
    tests/native/test_{kernels,gradients,dropout,own_bias,large_scores,sweep,conformance,storage}.py \
    -k "(chosen or neon) and not ($left_out)" --numprocesses 2 --quiet
REGARD_PLAIN=$("$venv/bin/python" -c 'from regard import native; print(native._find())')
export REGARD_PLAIN REGARD_MACHINE="exec qemu-aarch64 -L /usr/aarch64-linux-gnu $place/machine $place/libregard.so"
PYTHONPATH="$place" OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest --long -p relayed -p no:cacheprovider "$@"
