"""XLA compiler options by preset, without options that this XLA rejects."""

import os
import re
import sys
from collections.abc import Collection
from typing import Any

import jax
import jaxlib

from meshtrain import hardware
from meshtrain.config.schema import XLA_OPTIONS_ADDED_IN, XLA_OPTIONS_REMOVED_IN, XLA_PRESETS
from meshtrain.hardware import DEFAULT_PRESETS

DOUBLE_BUFFERING = "xla_gpu_enable_while_loop_double_buffering"
PIPELINED_ALL_GATHER = "xla_gpu_enable_pipelined_all_gather"
OPTIMIZATION_LEVEL = "optimization_level"
DISABLED_PASSES = "xla_disable_hlo_passes"


def options(
    preset: str, mesh: jax.sharding.Mesh, *, without: Collection[str] = ()
) -> dict[str, bool | int | str]:
    """Returns the options of presets that this version of XLA knows, but those in `without`.

    `preset` is one, or several with commas between. "auto" means `presets_of(mesh)`, and leaves out
    what the user sets in XLA_FLAGS.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    version = tuple(int(part) for part in jaxlib.__version__.split(".")[:2])
    is_auto = "auto" in preset.split(",")
    values = {}
    for one in preset.split(","):
        for name in presets_of(mesh) if one == "auto" else [one]:
            values |= XLA_PRESETS[name]
    chosen = {}
    for name, value in values.items():
        is_removed = name in XLA_OPTIONS_REMOVED_IN and version >= XLA_OPTIONS_REMOVED_IN[name]
        is_later = name in XLA_OPTIONS_ADDED_IN and version < XLA_OPTIONS_ADDED_IN[name]
        is_users = is_auto and name != DISABLED_PASSES and f"--{name}=" in flags
        if name not in without and not (is_removed or is_later or is_users):
            chosen[name] = value
    # The option would replace the passes that the user disables in XLA_FLAGS.
    users_passes = re.findall(rf"--{DISABLED_PASSES}=(\S+)", flags)
    if users_passes and DISABLED_PASSES in chosen:
        passes = users_passes[-1].strip("'\"")
        chosen[DISABLED_PASSES] = f"{passes},{chosen[DISABLED_PASSES]}"
    return chosen


def presets_of(mesh: jax.sharding.Mesh) -> list[str]:
    """Returns the presets for the devices of a mesh: the GPU's own, and "overlap" on several."""
    device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return []
    known = hardware.device_of(device.device_kind)
    presets = list(known.presets if known else DEFAULT_PRESETS)
    return [*presets, "overlap"] if mesh.size > 1 else presets


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
    """Compiles the program, without the options that this XLA does not know or cannot use for it.

    Each option that is left out is a line on stderr. XLA's double buffering of loops fails for some
    programs, such as GPT-2 on fsdp=8 (jaxlib 0.10.2).
    """
    left = dict(compiler_options)
    while True:
        try:
            return lowered.compile(compiler_options=left)
        except (RuntimeError, TypeError) as error:  # JaxRuntimeError is a RuntimeError
            unknown = _unknown_option(str(error), left)
            if unknown:
                version = jaxlib.__version__
                message = f"train.xla_preset: jaxlib {version} has no option {unknown}: without it"
                del left[unknown]
            elif left.get(DOUBLE_BUFFERING) and "control predecessor" in str(error):
                message = f"XLA cannot compile the step with {DOUBLE_BUFFERING}: without it"
                left[DOUBLE_BUFFERING] = False
            else:
                raise
            print(message, file=sys.stderr)


def _unknown_option(error: str, options: Collection[str]) -> str:
    """Returns the name of the option that this XLA does not know, or ""."""
    found = re.search(r"No such compile option: '(\w+)'", error)
    if found and found[1] in options:
        return found[1]
    # An attribute of the options instead of an option by name: an older jaxlib takes a number.
    is_level = "incompatible function arguments" in error and OPTIMIZATION_LEVEL in options
    return OPTIMIZATION_LEVEL if is_level else ""
