#!/usr/bin/env bash
# Runs the hooks of .pre-commit-config.yaml (format, lint, types, spelling), then the test suite without its slow
# tests, or the tests that the arguments select.
#
#   launch/test.sh [PYTEST ARGS]     such as tests/parallel/test_mesh.py -k layout (paths from the
#                                    repository), or -m "slow or not slow" for all tests
#
# Runs one test file per core at a time, at most four, and one more, because some tests wait; --pdb
# needs --numprocesses=0.
# PYTHON and VENV: see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh" dev)
cd -- "$root"
# glibc asks for large pages: fewer page faults.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

if git rev-parse --is-inside-work-tree &>/dev/null; then
    PATH=$(dirname -- "$python"):$PATH "$python" -m pre_commit run --all-files
else # pre-commit works on the files that Git knows
    "$python" -m ruff check --quiet
    "$python" -m ruff format --check
fi
exec "$python" -m pytest --numprocesses="$(($(nproc) + 1))" --maxprocesses=5 --dist=loadfile --no-loadscope-reorder \
    --max-worker-restart=0 "${@:--mnot slow}"
