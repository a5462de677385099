#!/usr/bin/env bash
# Tests and measures the trainer on the GPUs of this host, the most useful first, and prints one table, which it also
# saves. What has a record is skipped, so that a later call continues where this one ended.
#
#   launch/gpu_check.sh [--minutes=15] [--list] [--only NAME ...] [--output=DIR] [--toy]
#
#   EXTRA=cuda13                          CUDA of jax's wheels; default: cuda12
#   WHEELS=/path/to/folder                on a host without a network, which has jax with CUDA: the folder that
#                                         launch/gpu_wheels.sh made; PYTHON is then the Python with this jax
#
# The arguments are those of benchmarks/gpu/run_queue.py. For PYTHON and VENV see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
if [[ -n ${WHEELS:-} ]]; then
    python=${PYTHON:-python3}
    site=$root/.venv-wheels # next to the packages of this Python, which stay as they are
    if ! cmp --silent -- "$WHEELS/requirements.txt" "$site/requirements.txt"; then
        rm -rf -- "$site"
        "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --find-links="$WHEELS" \
            --target="$site" --requirement="$WHEELS/requirements.txt"
        cp -- "$WHEELS/requirements.txt" "$site"
    fi
    export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
else
    extras=dev
    [[ " $* " == *" --toy "* ]] || extras=${EXTRA:-cuda12},dev
    python=$(bash "$root/launch/setup.sh" "$extras")
fi
cd -- "$root"
exec "$python" benchmarks/gpu/run_queue.py "$@"
