"""Checkpoints of short runs, and damage to them."""

import json

import jax
import numpy as np

from meshtrain.checkpoint import arrays, find, manifest
from meshtrain.models import trees
from tests.lib.configs import quick

TEXT = "to be or not to be, that is the question\n" * 40


def saving(steps, every=2, **settings):
    c = quick(steps=steps)
    c.checkpoint.update(every=every, keep_last=9, **settings)
    return c


def text_run(folder, *, steps):
    """Returns the config of a run on the bytes of a text in this folder."""
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    (data / "text.txt").write_text(TEXT)
    c = saving(steps, every=1)
    c.model.update(vocab_size=256, num_layers=1)
    c.data.update(build="meshtrain.data.tokens:build", path=str(data), heldout=0.2)
    return c


def checkpoints(workdir):
    return workdir / find.FOLDER


def largest_file(directory):
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(path, at=None):
    """Flips a bit of the byte `at`, or of many bytes, since nothing reads some of them."""
    data = bytearray(path.read_bytes())
    for position in range(0, len(data), 97) if at is None else [at]:
        data[position] ^= 1
    path.write_bytes(data)


def noise(path, draw):
    """Overwrites up to 64 bytes, so that decoding fails in other ways than for a flipped bit."""
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    data[at : at + 64] = draw.randbytes(len(data[at : at + 64]))
    path.write_bytes(data)


def rewrite(directory, **fields):
    """Changes fields of a manifest and updates its checksum."""
    path = directory / manifest.NAME
    changed = {**json.loads(path.read_text()), **fields}
    del changed["crc32"]
    path.write_text(json.dumps({**changed, "crc32": manifest.checksum(changed)}))


def flat(params):
    return {trees.name_of(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(params)}


def params_of(directory):
    prefix = "params/"
    saved = arrays.as_numpy(directory)
    return {p.removeprefix(prefix): x for p, x in saved.items() if p.startswith(prefix)}
