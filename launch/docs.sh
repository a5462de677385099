#!/usr/bin/env bash
# Builds the site of docs/ in site/, and fails at a link that leads nowhere.
#
#   launch/docs.sh [MKDOCS ARGS]     such as serve, which shows the site on http://127.0.0.1:8000 and
#                                    builds it again when a page changes. Pages can be read without
#                                    it, but the search needs a server
#
# PYTHON and VENV: see launch/setup.sh.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
python=$(bash "$root/launch/setup.sh" docs)
cd -- "$root"

export NO_MKDOCS_2_WARNING=1 # Material's notice about other generators
(($#)) || set -- build --strict
exec "$python" -m mkdocs "$@"
