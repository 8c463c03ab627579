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
flags="-std=c++17 -fPIC -O2 -Wall -Wextra -Werror -fvisibility=hidden"

# The library, as CMakeLists.txt builds it.
library() {
    export PATH="$venv/bin:$PATH" REGARD_ISAS=all
    ! command -v ninja >/dev/null || export CMAKE_GENERATOR=Ninja
    cmake -S . -B "$place/build" -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ -DCMAKE_CXX_FLAGS=-Werror &&
        cmake --build "$place/build" --parallel "$(nproc)"
}

if ! built=$(library 2>&1); then
    printf '%s\n' "$built"
    exit 1
fi
# shellcheck disable=SC2086
c++ $flags -shared tests/arm/relay.cpp -o "$place/relay.so" -ldl -lpthread
# shellcheck disable=SC2086
aarch64-linux-gnu-g++ $flags -rdynamic tests/arm/machine.cpp -o "$place/machine" -ldl -lpthread

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
export REGARD_PLAIN REGARD_MACHINE="exec qemu-aarch64 -L /usr/aarch64-linux-gnu $place/machine $place/build/libregard.so"
PYTHONPATH="$place" OMP_NUM_THREADS=1 "$venv/bin/python" -m pytest --long -p relayed -p no:cacheprovider "$@"
