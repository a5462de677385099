#!/usr/bin/env bash
# Tests and measures the trainer on the GPUs of this host, and prints one table, which it also saves.
#
#   launch/gpu_check.sh [--toy] [--parts NAME ...] [--output=DIR]     --toy: small, on CPU, in a few minutes
#
#   EXTRA=cuda13                          CUDA of jax's wheels; default: cuda12
#
# The arguments are those of benchmarks/gpu/check.py. For PYTHON and VENV see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
extras=dev
[[ " $* " == *" --toy "* ]] || extras=${EXTRA:-cuda12},dev
python=$(bash "$root/launch/setup.sh" "$extras")
cd -- "$root"
exec "$python" benchmarks/gpu/check.py "$@"
