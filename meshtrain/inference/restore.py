"""Restores the model of a run for inference."""

import dataclasses
from functools import partial
from pathlib import Path

from meshtrain import console
from meshtrain.checkpoint import arrays, find, resume, run_tokenizer
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.config import load
from meshtrain.config.build import RunParts, build_model, optimizer_builder
from meshtrain.config.schema import Config
from meshtrain.huggingface import start
from meshtrain.models.base import Params
from meshtrain.program import Program, assemble


def restore_params(cfg: Config, path: Path, *, tokenizer: str = "") -> tuple[Program, Params]:
    """Returns the program of a config, and the parameters of a run's newest valid checkpoint.

    `path` is the workdir of the run, one of its checkpoints, or a Hugging Face folder. The
    parameters get the program's shardings. Raises ConfigError if `tokenizer`, the digest of the one
    in use, is not the run's, or if a key changes what the model computes.
    """
    model = build_model(cfg)
    program = assemble(cfg, RunParts(model, optimizer_builder(cfg, model)))
    if load.is_huggingface(path):
        abstract = program.abstract_state.params
        return program, start.read_params(cfg, path, abstract, tokenizer_digest=tokenizer)

    def read(directory: Path, saved: Manifest) -> Params:
        if not saved.identity.get("tokenizer"):  # of a run of an older version
            digest = run_tokenizer.digest(find.workdir_of(path), saved.config)
            saved = dataclasses.replace(saved, identity={"tokenizer": digest})
        resume.check(
            saved,
            cfg.to_dict(),
            {"tokenizer": tokenizer},
            source=directory,
            only=("model.*", "adapter.*"),
        )
        abstract_params = program.abstract_state.params
        return arrays.restore_params(directory, saved.arrays, abstract_params)[0]

    return program, find.read_valid(path, read, log=partial(console.say, stream="stderr"))
