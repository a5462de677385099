#!/usr/bin/env bash
# Lints, then runs the test suite without its slow tests, or the part that pytest's arguments name.
#
#   launch/test.sh [PYTEST ARGS]     such as tests/test_mesh.py -k layout (seen from the repository),
#                                    or -m "slow or not slow" for all of them
#
# As many files at a time as there are cores, up to four; --numprocesses=0 takes one, as --pdb needs it.
# PYTHON and VENV are those of launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh" dev)
cd -- "$root"

"$python" -m ruff check --quiet
"$python" -m ruff format --check
exec "$python" -m pytest --numprocesses="$(nproc)" --maxprocesses=4 --dist=loadfile "${@:--mnot slow}"
