"""Restores the model and parameters of a run on any mesh, for generation and evaluation."""

import dataclasses
import sys
from functools import partial
from pathlib import Path

from meshtrain import checkpoint
from meshtrain.checkpoint import arrays, resume, run_tokenizer
from meshtrain.config.build import Parts, build_model, optimizer_builder
from meshtrain.config.schema import Config
from meshtrain.models.base import Params
from meshtrain.program import Program, assemble


def restore(cfg: Config, path: Path, *, tokenizer: str = "") -> tuple[Program, Params]:
    """Returns the program of a config, and the parameters of the newest valid checkpoint of a run.

    `path` is the workdir of the run, or one of its checkpoints. The parameters get the program's shardings.
    Raises ConfigError if `tokenizer`, the digest of the one in use, is not the run's, or if a key changes what
    the model computes.
    """
    model = build_model(cfg)
    program = assemble(cfg, Parts(model, optimizer_builder(cfg, model)))
    directory, found = checkpoint.find_valid(path, log=partial(print, file=sys.stderr))
    if not found.identity.get("tokenizer"):  # of a run of an older version
        digest = run_tokenizer.digest(checkpoint.workdir_of(path), found.config)
        found = dataclasses.replace(found, identity={"tokenizer": digest})
    resume.check(found, cfg.to_dict(), {"tokenizer": tokenizer}, source=directory, only="model.*")
    abstract_params = program.abstract_state.params
    return program, arrays.restore_params(directory, found.arrays, abstract_params)[0]
