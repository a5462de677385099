"""The model and the parameters of a run, on any mesh: what generates, evaluates and exports begins with."""

import sys
from functools import partial
from pathlib import Path

from meshtrain import checkpoint
from meshtrain.checkpoint import arrays
from meshtrain.config.build import Parts, build_model, optimizer_builder
from meshtrain.config.schema import Config
from meshtrain.models.base import Params
from meshtrain.program import Program, assemble


def restore(cfg: Config, path: Path) -> tuple[Program, Params]:
    """Returns the program of a run's settings, and the newest good parameters in its workdir.

    `path` may also be one of its checkpoints. Each parameter is read to where the program wants it.
    """
    program = assemble(cfg, Parts(build_model(cfg), optimizer_builder(cfg)))
    directory, found = checkpoint.find(path, tell=partial(print, file=sys.stderr))
    wanted = program.abstract_state.params
    return program, arrays.restore_params(directory, found.arrays, wanted)[0]
