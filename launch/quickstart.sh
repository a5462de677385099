#!/usr/bin/env bash
# Trains the quickstart model on this machine, then generates text: a few minutes on two CPU cores.
#
#   launch/quickstart.sh [--config.KEY=VALUE ...]     for example --config.train.steps=1200
#
# Ctrl-C saves the state; the same command resumes. The exit codes are the same as for
# `meshtrain train`. For PYTHON and VENV see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh")
cd -- "$root"

"$python" -m meshtrain.main --config=configs/quickstart.py --workdir=runs/quickstart "$@"
"$python" -m meshtrain generate --workdir=runs/quickstart --prompt="def "
