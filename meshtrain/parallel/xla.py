"""XLA compiler options by preset, and a clear error for an option that XLA rejects."""

import os
import re
import sys
from collections.abc import Collection
from typing import Any

import jax
import jaxlib

from meshtrain.config.schema import XLA_OPTIONS_ADDED_IN, XLA_OPTIONS_REMOVED_IN, XLA_PRESETS
from meshtrain.errors import ConfigError

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
PIPELINED_ALL_GATHER = "xla_gpu_enable_pipelined_all_gather"
OPTIMIZATION_LEVEL = "optimization_level"
DISABLED_PASSES = "xla_disable_hlo_passes"


def options(
    preset: str, mesh: jax.sharding.Mesh, *, without: Collection[str] = ()
) -> dict[str, bool | int | str]:
    """Returns the options of a preset that this version of XLA knows, but those in `without`.

    "auto" means "cublas" on GPUs, with "overlap" on several, else "none"; it leaves out what the
    user sets in XLA_FLAGS.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    presets = [preset]
    if preset == "auto":
        presets = []
        if mesh.devices.flat[0].platform == "gpu":
            presets = ["cublas", "overlap"] if mesh.size > 1 else ["cublas"]
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    chosen = {}
    values = {name: value for one in presets for name, value in XLA_PRESETS[one].items()}
    for name, value in values.items():
        is_removed = name in XLA_OPTIONS_REMOVED_IN and version >= XLA_OPTIONS_REMOVED_IN[name]
        is_later = name in XLA_OPTIONS_ADDED_IN and version < XLA_OPTIONS_ADDED_IN[name]
        is_users = preset == "auto" and name != DISABLED_PASSES and f"--{name}=" in flags
        if name not in without and not (is_removed or is_later or is_users):
            chosen[name] = value
    # The option would replace the passes that the user disables in XLA_FLAGS.
    users_passes = re.findall(rf"--{DISABLED_PASSES}=(\S+)", flags)
    if users_passes and DISABLED_PASSES in chosen:
        passes = users_passes[-1].strip("'\"")
        chosen[DISABLED_PASSES] = f"{passes},{chosen[DISABLED_PASSES]}"
    return chosen


def quick_compile_options(mesh: jax.sharding.Mesh) -> dict[str, int]:
    """Returns options for a program that runs once: on CPUs optimization level 1.

    XLA_FLAGS wins. The program that initialises configs/quickstart.py then compiles in a sixth of
    the time, and runs as fast.
    """
    option = "xla_backend_optimization_level"
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    if not on_cpu or option in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {option: 1}


def compile_with(
    lowered: jax.stages.Lowered, compiler_options: dict[str, Any]
) -> jax.stages.Compiled:
    """Compiles the program; raises ConfigError for an option that XLA does not know.

    XLA's double buffering of loops fails for some programs, such as GPT-2 on fsdp=8 (jaxlib
    0.10.2): these are compiled without it.
    """
    try:
        return lowered.compile(compiler_options=compiler_options)
    except RuntimeError as error:  # JaxRuntimeError is one
        if compiler_options.get(DOUBLE_BUFFERING) and "control predecessor" in str(error):
            message = f"XLA cannot compile the step with {DOUBLE_BUFFERING}: without it"
            print(message, file=sys.stderr)
            return compile_with(lowered, {**compiler_options, DOUBLE_BUFFERING: False})
        unknown = re.search(r"No such compile option: '(\w+)'", str(error))
        if unknown is None:
            raise
        raise ConfigError(
            f"train.xla_preset: option {unknown[1]} is unknown to jaxlib {jaxlib.__version__}; "
            f"use train.xla_preset=none"
        ) from error
