"""Writes a new folder with a config, a script that trains, and a README: a project to start from.

  meshtrain init my_project
  bash my_project/train.sh

The config trains a small model on the source of Python's standard library, in minutes on a laptop.
`train.py` is a script with a model and data of your own, for one process or several.
"""

import argparse
import shlex
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
OWN = """\
\"\"\"Trains a model of one's own on data of one's own; replace both.

  python train.py --workdir=runs/own
  meshtrain launch --nproc=2 -- python train.py --workdir=runs/own

Run again, both resume from the newest checkpoint. Several hosts: meshtrain launch --help.
\"\"\"

import argparse
import sys

import meshtrain
import numpy as np
import optax
from flax import nnx
from meshtrain.train import train

NUM_FEATURES, NUM_CLASSES = 64, 10


class MLP(nnx.Module):
    def __init__(self, width, rngs):
        # The names of dims say how `config.rules` shard a parameter; one without is replicated.
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
        self.hidden = nnx.Linear(NUM_FEATURES, width, kernel_init=init, rngs=rngs)
        self.out = nnx.Linear(width, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, batch):
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    correct = logits.argmax(-1) == batch["label"]
    # Sums over the rows; the trainer divides once, by the weight of the global batch.
    return meshtrain.weighted(losses, correct=correct.astype(losses.dtype))


def global_batches(seed, num_batches, num_rows):
    # The same in every process, which takes its part of the rows.
    teacher = np.random.default_rng(0).normal(size=(NUM_FEATURES, NUM_CLASSES))
    random = np.random.default_rng(seed)
    for _ in range(num_batches):
        image = random.normal(size=(num_rows, NUM_FEATURES)).astype(np.float32)
        yield {{"image": image, "label": (image @ teacher).argmax(-1).astype(np.int32)}}


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--workdir", help="folder of the run; without it nothing is saved")
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--width", type=int, default=128)
    args = flags.parse_args()

    meshtrain.initialize()  # joins the other processes; before anything uses a device
    settings = {{
        "train.steps": args.steps,
        "train.global_batch": 128,
        "train.log_every": 50,
        "optim.learning_rate": 1e-2,
        "optim.warmup_steps": 10,
        "mesh.data": -1,  # all devices; mesh.fsdp, mesh.tensor, ... divide them otherwise
        "eval.batches": 2,
    }}
    overrides = [f"--config.{{key}}={{value}}" for key, value in settings.items()]
    config = meshtrain.load_config("default", overrides)
    model = meshtrain.from_nnx(lambda rngs: MLP(args.width, rngs), loss)
    data = list(global_batches(1, num_batches=20, num_rows=128))
    held_out = list(global_batches(2, num_batches=2, num_rows=128))
    result = train(config, workdir=args.workdir, model=model, data=data, eval_data=held_out)
    return result.exit_code  # not 0 if it was stopped, so that a launcher knows


if __name__ == "__main__":
    sys.exit(main())
"""
README = """\
# {name}

```bash
bash train.sh                           # trains; again: resumes, or says that the run is complete
WORKDIR=runs/second bash train.sh --config.optim.learning_rate=1e-3
meshtrain generate --workdir=runs/first --prompt="def " --length=200
meshtrain verify --config=config.yaml --simulate_devices=8 --quick
python train.py --workdir=runs/own      # a model and data of your own: replace those in the file
meshtrain launch --nproc=2 -- python train.py --workdir=runs/own
```

All but the first two need meshtrain's environment to be active. `config.yaml` has the settings,
`runs/` the runs. `verify` compares training on 8 simulated devices with one device. On a machine
with several GPUs the runs use them all, each with a part of the batch; `meshtrain plan` ranks other
layouts.
"""


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("folder", type=Path, metavar="FOLDER", help="new folder")


def run(args: argparse.Namespace) -> int:
    """Writes the folder; returns the exit code."""
    folder = args.folder
    texts = {
        "config.yaml": CONFIG,
        "train.py": OWN.format(),
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
    # In the folder: the paths of the run that the script prints are relative to it.
    console.say(f"start with: cd {shlex.quote(str(folder))} && bash train.sh")
    return 0


VERB = Verb(
    summary="write a folder with a config and scripts to start from",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
