#!/usr/bin/env bash
# Trains the quickstart model on this machine, then lets it write: a few minutes on two CPU cores.
#
#   launch/quickstart.sh [--config.KEY=VALUE ...]     such as --config.train.steps=50
#
# Ctrl-C saves the state and exits with 75; the same command goes on from there. Exit codes are
# those of meshtrain.main. PYTHON and VENV are those of launch/setup.sh.
set -euo pipefail

case ${1:-} in -h | --help)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
    exit
    ;;
esac
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh")
cd -- "$root"

# In the background, so that a SIGTERM meant for this script alone can be handed on: as SIGINT,
# because a second SIGTERM, where the whole process group got one, would kill before the save.
# Ctrl-C reaches Python by itself, and this script only waits for it.
(
    trap - INT
    exec "$python" -m meshtrain.main \
        --config=configs/quickstart.py --workdir=runs/quickstart "$@"
) &
trainer=$!
trap 'signalled=1' INT
trap 'signalled=1; kill -INT "$trainer" 2>/dev/null || true' TERM
signalled=1 code=0
while ((signalled)); do # a signal ends the wait, not the training
    signalled=0 code=0
    wait "$trainer" || code=$?
done
trap - INT TERM
((code == 0)) || exit "$code"

exec "$python" -m meshtrain.generate --workdir=runs/quickstart --prompt="def "
