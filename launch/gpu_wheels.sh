#!/usr/bin/env bash
# Makes a folder of wheels with which launch/gpu_check.sh runs on a host without a network.
#
#   launch/gpu_wheels.sh FOLDER                   here, with a network
#   WHEELS=FOLDER bash launch/gpu_check.sh        there, after copying the folder and the repository
#
#   JAX=0.11.2                            version of jax there
#
# The host there has Python 3.12 on Linux (x86-64), jax with CUDA and, for the comparison with it, torch. The folder gets
# what else meshtrain and its tests on GPUs need, in versions that fit this jax. It needs uv and pip here, on PATH or in
# the environment of launch/setup.sh dev.
set -euo pipefail

(($# == 1)) || { echo "usage: bash launch/gpu_wheels.sh FOLDER" >&2 && exit 2; }
folder=$1
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." >/dev/null && pwd -P)
PATH=$PATH:$root/.venv/bin
mkdir -p -- "$folder"

# What the tests on GPUs import, in the versions of the extra dev.
tests=$(sed -n 's/^ *"\(\(pytest\|chex\)>[^"]*\)".*/\1/p' "$root/pyproject.toml")
there=(jax jaxlib numpy scipy ml-dtypes opt-einsum) # jax has the last four with it
requirements=$folder/requirements.txt
printf '%s\n' "jax==${JAX:-0.11.2}" "$tests" |
    uv pip compile --quiet --no-header --no-annotate --python-version 3.12 --python-platform x86_64-manylinux_2_28 \
        "${there[@]/#/--no-emit-package=}" "$root/pyproject.toml" - >"$requirements"
options=(--only-binary=:all: --implementation cp --python-version 3.12)
for platform in manylinux2014 manylinux_2_17 manylinux_2_24 manylinux_2_27 manylinux_2_28; do
    options+=(--platform "${platform}_x86_64") # pip takes no other than these
done
rm -f -- "$folder"/*.whl
pip download --quiet --disable-pip-version-check --no-deps "${options[@]}" --dest "$folder" -r "$requirements"
echo "gpu_wheels: $(find "$folder" -name '*.whl' | wc -l) wheels in $folder, $(du -sm -- "$folder" | cut -f1) MB"
