#!/usr/bin/env bash
# Trains the quickstart model on this machine, then lets it write: a few minutes on two CPU cores.
#
#   launch/quickstart.sh [--config.KEY=VALUE ...]     such as --config.train.steps=1200
#
# Ctrl-C saves the state; the same command goes on from there. Exit codes are those of meshtrain.main;
# PYTHON and VENV are those of launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh")
cd -- "$root"

"$python" -m meshtrain.main --config=configs/quickstart.py --workdir=runs/quickstart "$@"
"$python" -m meshtrain generate --workdir=runs/quickstart --prompt="def "
