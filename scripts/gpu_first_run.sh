#!/usr/bin/env bash
# The first run on a machine with a GPU: are the kernels right, are they free of faults, how fast are they? In under 8
# minutes, and into one file. It builds and installs nothing: torch, numpy, xxhash and jaxtyping must be there, and for
# the kernels triton, with gcc or clang for its launcher. pytest is not used. What is missing may be in a folder that
# PYTHONPATH names.
#
#   scripts/gpu_first_run.sh                     results in $OUT/gpu_first_run.json, or in the current folder
#   scripts/gpu_first_run.sh --out FILE          or there
#   scripts/gpu_first_run.sh --device cpu        tries the way without a GPU, by Triton's interpreter, with a few cases
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=$PWD/src:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 REGARD_QUIET=1
exec "${PYTHON:-python3}" -P scripts/gpu_first_run.py "$@"
