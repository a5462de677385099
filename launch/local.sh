#!/usr/bin/env bash
# Trains on this machine, in several processes or on simulated CPU devices; restarts the run after a crash.
#
#   launch/local.sh --config=configs/quickstart.py --workdir=runs/mine      one process, all devices
#   NPROC=2 DEVICES=4 launch/local.sh --config=... --workdir=...            2 processes of 4 CPU devices
#   launch/local.sh --nproc=2 --max_restarts=10 -- --config=... --workdir=...
#
# Arguments go to `meshtrain train`; with a --, arguments before it go to `meshtrain launch`.
# The exit codes are the same as for `meshtrain launch`. For PYTHON and VENV see launch/setup.sh.
#
# Open MPI can start the processes as well, on its hosts, but without a supervisor that restarts them:
#   mpirun -n 2 .venv/bin/python -m meshtrain.main --config=... --workdir=...
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh")

[[ " $* " == *" -- "* ]] || set -- -- "$@"
exec "$python" -m meshtrain launch \
    ${NPROC:+"--nproc=$NPROC"} ${DEVICES:+"--simulate_devices=$DEVICES"} "$@"
