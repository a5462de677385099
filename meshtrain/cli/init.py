"""Writes a new folder with a config, a script that trains, and a README: a project to start from.

  meshtrain init my_project
  bash my_project/train.sh

The config trains a small model on the source of Python's standard library, in minutes on a laptop.
"""

import argparse
import sys
from pathlib import Path

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.errors import ConfigError

CONFIG = """\
# What differs from the config `base` of the package. --config.train.steps=20 on the command line,
# or the variable MESHTRAIN__TRAIN__STEPS=20, changes a key for one run. A run's config.json has all
# keys.
base: quickstart

train:
  steps: 600
  global_batch: 16    # sequences
  log_every: 25
optim:
  learning_rate: 3e-3
  warmup_steps: 50
# Your own text instead of the source of Python's standard library:
# data:
#   path: texts       # a folder
#   pattern: "*.txt"
"""
SCRIPT = """\
#!/usr/bin/env bash
# Trains, or resumes the run in WORKDIR (default: runs/first); arguments are added to those of
# `meshtrain train`. PYTHON is the Python that has meshtrain. The run is restarted if it crashes.
set -euo pipefail

cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")"
exec "${{PYTHON:-{python}}}" -m meshtrain launch -- train \\
    --config=config.yaml --workdir="${{WORKDIR:-runs/first}}" "$@"
"""
README = """\
# {name}

```bash
bash train.sh                           # trains; again: resumes, or says that the run is complete
WORKDIR=runs/second bash train.sh --config.optim.learning_rate=1e-3
meshtrain generate --workdir=runs/first --prompt="def " --length=200
meshtrain verify --config=config.yaml --simulate_devices=8 --quick
```

The last two need meshtrain's environment to be active. `config.yaml` has the settings, `runs/` the
runs. `verify` compares training on 8 simulated devices with one device. On a machine with several
GPUs `train.sh` uses them all, each with a part of the batch; `meshtrain plan` ranks other layouts.
"""


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")


def run(args: argparse.Namespace) -> int:
    """Writes the folder; returns the exit code."""
    folder = args.folder
    texts = {
        "config.yaml": CONFIG,
        "train.sh": SCRIPT.format(python=sys.executable),
        "README.md": README.format(name=folder.resolve().name),
        ".gitignore": "/runs/\n",
    }
    try:
        folder.mkdir(parents=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except FileExistsError as error:
        raise ConfigError(f"{folder}: exists already; use a new folder") from error
    except OSError as error:
        place = error.filename or folder  # none if the disk is full
        raise ConfigError(f"{place}: {error.strerror}; use another folder") from error
    console.say(*(f"written {folder / name}" for name in texts))
    console.say(f"start with: bash {folder / 'train.sh'}")
    return 0


VERB = Verb(
    summary="write a folder with a config and a script to start from",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
