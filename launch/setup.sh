#!/usr/bin/env bash
# Makes the virtual environment, with the package installed editable; prints the path of its Python.
# Does nothing where nothing changed, and builds anew what an interrupted run left behind.
#
#   launch/setup.sh [EXTRA[,EXTRA...]]    the extras are those of pyproject.toml, such as dev
#
#   PYTHON=/path/to/python                the Python to build on, 3.11 or newer
#   VENV=/path/to/folder                  where to build, if not in .venv beside pyproject.toml
set -euo pipefail

extras=${1:-}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
venv=${VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$PWD/$venv
python=$venv/bin/python
stamp=$venv/meshtrain-${extras:-base}.stamp # what is installed; written last, so half of it has none

fail() {
    echo "setup: $*" >&2
    exit 2
}

# Prints the version of the Python called $1, if it runs and is new enough.
version() {
    "$1" -I -c '
import sys
print(sys.version.split()[0]) if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null
}

# Whether the venv is a working one, of the Python asked for, with something to install with.
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
        fail "VENV=$VENV is there and is no virtual environment; name another folder"
    echo "setup: making $venv with Python $(version "$base"); the first time this takes a minute" >&2
    rm -rf -- "$venv"
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$base" "$venv" >&2
    else
        "$base" -m venv "$venv" >/dev/null ||
            fail "$base cannot make a venv; on Debian or Ubuntu: apt-get install python3-venv"
    fi
}

wanted="$root $(<"$root/pyproject.toml")" # an editable install knows where it is
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
"${install[@]}" --quiet --editable "$root${extras:+[$extras]}" >&2
printf '%s' "$wanted" >"$stamp"
echo "$python"
