#!/usr/bin/env bash
# Trains on this machine, in several processes or on simulated CPU devices; what dies is started again.
#
#   launch/local.sh --config=configs/quickstart.py --workdir=runs/mine      one process, all devices
#   NPROC=2 DEVICES=4 launch/local.sh --config=... --workdir=...            2 processes of 4 CPU devices
#   launch/local.sh --nproc=2 --max_restarts=10 -- --config=... --workdir=...
#
# The arguments are those of `meshtrain train`, or with a -- among them, what stands before it is for
# `meshtrain launch`, whose exit codes these are. PYTHON and VENV are those of launch/setup.sh.
#
# Open MPI starts processes as well, over its hosts, without a supervisor to start them again:
#   mpirun -n 2 .venv/bin/python -m meshtrain.main --config=... --workdir=...
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh")

[[ " $* " == *" -- "* ]] || set -- -- "$@"
exec "$python" -m meshtrain launch \
    ${NPROC:+"--nproc=$NPROC"} ${DEVICES:+"--simulate_devices=$DEVICES"} "$@"
