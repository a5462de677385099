#!/usr/bin/env bash
# Creates the virtual environment, with an editable install of the package; prints the path of its Python.
# Does nothing if it is up to date, and rebuilds an environment that an interrupted run left incomplete.
#
#   launch/setup.sh [EXTRA[,EXTRA...]]    extras of pyproject.toml, such as dev
#
#   PYTHON=/path/to/python                the base Python, 3.11 or newer
#   VENV=/path/to/folder                  folder of the environment; default: .venv in the repository
#
# Uses uv if it is on PATH (https://docs.astral.sh/uv), which takes seconds, else pip.
set -euo pipefail

extras=${1:-}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
venv=${VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python
# Records what is installed. Written last, so an incomplete install has none.
stamp=$venv/meshtrain-${extras:-base}.stamp

fail() {
    echo "setup: $*" >&2
    exit 2
}

# Prints the version of Python $1 if it runs and is new enough.
version() {
    "$1" -I -c '
import sys
print(sys.version.split()[0]) if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null
}

# Succeeds if the environment works, has the requested Python version, and can install packages.
usable() {
    local found
    found=$(version "$python") || return 1
    [[ -z ${PYTHON:-} || $found == $(version "$PYTHON") ]] || return 1
    command -v uv >/dev/null || "$python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    local base=
    for base in ${PYTHON:+"$PYTHON"} python3 python3.13 python3.12 python3.11 python3.14 ''; do
        [[ -z $base ]] || ! version "$base" >/dev/null || break
        [[ -z ${PYTHON:-} ]] || fail "PYTHON=$PYTHON does not run or is older than 3.11; name a newer one"
    done
    [[ -n $base ]] || fail "no Python 3.11 or newer found; install one, or name it with PYTHON=/path/to/python"
    [[ ! -e $venv || -f $venv/pyvenv.cfg || -z ${VENV:-} ]] ||
        fail "VENV=$VENV exists and is not a virtual environment; name another folder"
    echo "setup: creating $venv with Python $(version "$base"); without uv on PATH this takes a minute or two" >&2
    rm -rf -- "$venv"
    if command -v uv >/dev/null; then
        uv venv --quiet --seed --python "$base" "$venv" >&2 # with pip, which launch/smollm2.py runs
    else
        "$base" -m venv "$venv" >/dev/null ||
            fail "$base cannot create a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
    fi
}

wanted="compat $root $(<"$root/pyproject.toml")" # an editable install depends on its path
if ! usable; then
    make_venv
elif [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    echo "$python"
    exit
fi
rm -f -- "$stamp"
if command -v uv >/dev/null; then
    install=(uv pip install --python "$python")
else
    install=("$python" -m pip install --disable-pip-version-check)
fi
# compat: in the folder around a clone of the name meshtrain, Python would take the clone for the package.
"${install[@]}" --quiet --config-settings editable_mode=compat --editable "$root${extras:+[$extras]}" >&2
printf '%s' "$wanted" >"$stamp"
echo "$python"
