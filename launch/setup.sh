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
stamp=$venv/meshtrain.stamp # "incomplete", or what is installed: lines of fingerprint and extras

say() { echo "setup: $*" >&2; }

# Prints the version and the real path of the Python called $1, if it runs and is new enough.
probe() {
    "$1" -I -c '
import sys
if sys.version_info < (3, 11):
    sys.exit(1)
print(sys.version.split()[0], getattr(sys, "_base_executable", sys.executable))' 2>/dev/null
}

# Prints the version and the path of the Python to build on.
choose_python() {
    local name
    if [[ -n ${PYTHON:-} ]]; then
        probe "$PYTHON" && return
        say "PYTHON=$PYTHON does not run or is older than 3.11; name a newer one"
        return 2
    fi
    for name in python3 python3.13 python3.12 python3.11 python3.14; do
        probe "$name" && return
    done
    say "no Python 3.11 or newer found; install one, or name it with PYTHON=/path/to/python"
    return 2
}

# Prints what an installation depends on, the version first; fails if there is no working venv.
fingerprint() {
    "$python" -I -c '
import hashlib, pathlib, sys
if sys.version_info < (3, 11) or sys.prefix == sys.base_prefix:
    sys.exit(1)
pyproject = pathlib.Path(sys.argv[1], "pyproject.toml").read_bytes()
places = "\0".join(sys.argv[1:]).encode()  # an editable install knows where it is
print(sys.version.split()[0], hashlib.sha256(pyproject + places).hexdigest()[:16])' \
        "$root" "$venv" 2>/dev/null
}

# pip and uv would only warn, and install less than was asked for.
check_extras() {
    local extra
    for extra in ${extras//,/ }; do
        grep -q "^$extra = \[" "$root/pyproject.toml" && continue
        say "'$extra' is no extra of pyproject.toml; use one of [project.optional-dependencies]"
        return 2
    done
}

# Whether the stamp has the extras, or any set of them where none are asked for.
up_to_date() {
    local line
    [[ -n $now && -f $stamp ]] || return 1
    while read -r line; do
        [[ $line != "$now extras=$extras" ]] || return 0
        [[ -n $extras || $line != "$now "* ]] || return 0
    done <"$stamp"
    return 1
}

# Whether the venv is one to install into: working, complete, and with an installer.
usable() {
    [[ -n $now ]] || return 1
    [[ ! -f $stamp || $(<"$stamp") != incomplete ]] || return 1
    command -v uv >/dev/null || "$python" -m pip --version >/dev/null 2>&1
}

make_venv() {
    [[ -n $chosen ]] || chosen=$(choose_python)
    local base=${chosen#* }
    if ! command -v uv >/dev/null &&
        ! "$base" -I -c 'import venv, ensurepip; ensurepip.version()' 2>/dev/null; then
        say "$base cannot make a venv; on Debian or Ubuntu: apt-get install python3-venv"
        exit 2
    fi
    if [[ -n ${VENV:-} && -e $venv && ! -f $stamp && $(ls -A -- "$venv") ]]; then
        say "VENV=$VENV is not ours and of no use (needs the right Python and pip); name another"
        exit 2
    fi
    say "making $venv with Python ${chosen%% *}; the first time this takes a minute or two"
    rm -rf -- "$venv"
    mkdir -p -- "$venv"
    echo incomplete >"$stamp"
    if command -v uv >/dev/null; then
        uv venv --quiet --allow-existing --python "$base" "$venv" >&2
    else
        "$base" -m venv "$venv" >&2
    fi
}

install_package() {
    local what=.${extras:+[$extras]} kept=
    if [[ -f $stamp ]]; then # ours: from here on half-made, until the end is reached
        kept=$(grep -F "$now " "$stamp" || true)
        echo incomplete >"$stamp"
    fi
    cd -- "$root"
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$python" --editable "$what" >&2
    else
        "$python" -m pip install --quiet --disable-pip-version-check --editable "$what" >&2
    fi
    echo "${kept:+$kept$'\n'}$now extras=$extras" >"$stamp"
}

chosen=
[[ -z ${PYTHON:-} ]] || chosen=$(choose_python)
now=$(fingerprint) || now=
[[ -z $chosen || ${now%% *} == "${chosen%% *}" ]] || now= # of another version than is asked for
if ! up_to_date; then
    check_extras
    if usable; then
        say "installing what is new into $venv"
    else
        make_venv
        now=$(fingerprint)
    fi
    install_package
fi
echo "$python"
