"""A real pretrained model through all verbs.

Expected values: transformers 5.23 with torch 2.13, float32.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from meshtrain.data import tokenizer
from meshtrain.huggingface import files
from tests.lib import smollm2
from tests.lib.paths import ROOT

pytestmark = pytest.mark.slow
LOSS = 2.7701714  # of the first 2,000 characters of LICENSE, 397 tokens
CONTINUED = {
    "The three primary colours are": " the primary colours of the human eye: red, blue, and "
    "yellow. These are the "
    "only three colors that exist naturally in the universe.\n\nThe human",
    "def fibonacci(n):": "\n    if n == 0:\n        return 1\n    return n * fibonacci(n - 1)\n\n# "
    "Test the "
    "function\nprint(",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns the model as a Hugging Face folder."""
    target = tmp_path_factory.mktemp("smollm2") / "hf"
    smollm2.fetch(target)
    return target


def run_verb(verb, *arguments):
    """Returns the output of a verb, run with one CPU device unless a flag simulates more."""
    command = [sys.executable, "-m", "meshtrain", verb, *map(str, arguments)]
    environment = {name: v for name, v in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def workdir(folder):
    run_verb("convert", folder, folder.parent / "start")
    return folder.parent / "start"


def prepare_text(folder, text, name):
    (folder.parent / f"{name}.txt").write_text(text)
    target = folder.parent / name
    run_verb(
        "prepare", folder.parent / f"{name}.txt", f"--output={target}", f"--tokenizer={folder}"
    )
    return target


def test_the_loss_of_a_text_matches_transformers(folder, workdir):
    text = prepare_text(folder, (ROOT / "LICENSE").read_text()[:2000], "license")
    options = ["--split=all", f"--config.data.path={text}", "--config.data.seq_len=396"]
    output = run_verb("evaluate", f"--workdir={workdir}", "--batch=1", *options)
    assert float(output.split("loss")[1].split()[0]) == pytest.approx(LOSS, abs=1e-4)


@pytest.mark.parametrize("devices", [1, 3])  # divisors of the 9 heads and 3 key/value heads
def test_greedy_text_matches_transformers(workdir, devices):
    layout = [f"--simulate_devices={devices}", "--config.mesh.fsdp=1"]
    layout += [f"--config.mesh.tensor={devices}", "--temperature=0", "--length=32"]
    prompts = [f"--prompt={prompt}" for prompt in CONTINUED]
    expected = "".join(f"--- {n}\n{p}{text}\n" for n, (p, text) in enumerate(CONTINUED.items()))
    assert run_verb("generate", f"--workdir={workdir}", *prompts, *layout) == expected


def test_the_model_is_fine_tuned_and_exported(folder, workdir):
    text = prepare_text(folder, (ROOT / "LICENSE").read_text(), "whole license")
    tuned, back = folder.parent / "tuned", folder.parent / "back"
    settings = {
        **{"checkpoint.init_from": workdir, "data.path": text, "data.packing": "windows"},
        **{"data.seq_len": 64, "train.global_batch": 4, "train.steps": 3, "eval.batches": 0},
    }
    overrides = [f"--config.{key}={value}" for key, value in settings.items()]
    run_verb("train", "--config=configs/smollm2.py", f"--workdir={tuned}", *overrides)
    rows = [json.loads(row) for row in (tuned / "metrics.jsonl").read_text().splitlines()]
    assert 1 < rows[0]["loss"] < 5  # an untrained model starts at 10.8
    run_verb("convert", tuned, back)
    old, new = files.tensors(folder), files.tensors(back)
    assert old.keys() == new.keys()
    changes = {name: np.abs(new[name].read() - old[name].read()).max() for name in old}
    assert 0 < max(changes.values()) < 1e-3
    exported = tokenizer.load(back)
    assert exported.decode(exported.encode("né 12 €")) == "né 12 €"


def test_an_export_restores_the_same_bits(folder, workdir):
    back = folder.parent / "same"
    run_verb("convert", workdir, back)
    old, new = files.tensors(folder), files.tensors(back)
    assert old.keys() == new.keys()
    assert all(np.array_equal(old[name].read(), new[name].read()) for name in old)
