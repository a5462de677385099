"""The verbs. This folder has the flags and help of those whose work needs jax, which takes seconds to load."""

from typing import NamedTuple


class Verb(NamedTuple):
    """The module of a verb, what it does, and what it reads.

    The module defines `add_flags(parser)` and `run(args)`, or `run(args, config)` if the verb reads a
    config or a run; `run` returns the exit code. `--help` prints the module's docstring, so the module
    loads jax only in `run`. A verb that reads a config may define `prepare(args, config)`, called before
    the config is checked and jax is started, and `FITS_DEVICES = True` if it sets the mesh and the batch
    itself, so that those of the config need not fit the devices. With `CONFIG_IS_OPTIONAL = True` it may be called
    without a config, which is then None.
    """

    module: str
    summary: str
    reads: str = "flags"  # "config": --config=FILE; "run": --workdir=DIR of a run
    forwards: bool = False  # passes on the arguments after --


VERBS = {
    "train": Verb("meshtrain.cli.train", "train a model, or resume a run", "config"),
    "launch": Verb(
        "meshtrain.cli.launch",
        "start the processes of a run, and restart them",
        forwards=True,
    ),
    "init": Verb("meshtrain.cli.init", "write a folder with a config and a script to start from"),
    "info": Verb(
        "meshtrain.cli.info", "print devices, test an all-reduce, or draw a mesh", "config"
    ),
    "prepare": Verb("meshtrain.cli.prepare", "tokenize text, JSON lines or Parquet"),
    "convert": Verb("meshtrain.cli.convert", "convert from and to Hugging Face folders"),
    "generate": Verb("meshtrain.cli.generate", "generate text with a model", "run"),
    "evaluate": Verb("meshtrain.cli.evaluate", "measure loss and bits per byte", "run"),
    "verify": Verb("meshtrain.cli.verify", "compare layouts with one device", "config"),
    "plan": Verb("meshtrain.cli.plan", "rank layouts for devices", "config"),
    "audit": Verb("meshtrain.cli.audit", "count the bytes that a step sends", "config"),
    "profile": Verb("meshtrain.cli.profile", "show where a step's time goes", "config"),
    "report": Verb("meshtrain.cli.report", "show runs in one HTML page"),
    "schedule": Verb("meshtrain.cli.schedule", "print and draw a pipeline schedule"),
    "checkpoint": Verb("meshtrain.cli.checkpoint", "list, verify, compare, remove checkpoints"),
}
