"""Adapters leave as merged weights, or in the layout of PEFT.

PEFT itself reads them, and trains them equally.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.data.source import Source
from meshtrain.huggingface import files
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import GOLDEN

RANK, ALPHA = 3, 12.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Returns a golden Llama, a run that trained an adapter of it, and both exports."""
    root = tmp_path_factory.mktemp("peft")
    assert app.main("convert", [str(GOLDEN / "llama2"), str(root / "start")]) == 0
    found = json.loads((root / "start" / "config.json").read_text())
    c = tiny_config()
    c.model.update({key: value for key, value in found["model"].items() if value != []})
    c.data.update(vocab_size=c.model.vocab_size)
    c.train.update(steps=2, trainable="final_norm/*")
    c.adapter.update(rank=RANK, alpha=ALPHA, dropout=0.125)
    c.optim.learning_rate, c.optim.schedule = 0.05, "constant"
    c.checkpoint.init_from = str(root / "start")
    train(c, workdir=root / "run")
    assert app.main("convert", [str(root / "run"), str(root / "merged")]) == 0
    assert app.main("convert", [str(root / "run"), str(root / "adapter"), "--adapter"]) == 0
    return root


def tensors(folder):
    return {name: np.stack([*one.read()]) for name, one in files.tensors(folder).items()}


@pytest.mark.slow
def test_merged_weights_are_the_base_plus_the_product_of_the_factors(folders):
    base, merged = tensors(GOLDEN / "llama2"), tensors(folders / "merged")
    (folders / "adapter" / "model.safetensors").symlink_to("adapter_model.safetensors")
    factors = tensors(folders / "adapter")
    settings = json.loads((folders / "adapter" / "adapter_config.json").read_text())
    scale = settings["lora_alpha"] / settings["r"]
    assert settings["lora_dropout"] == 0.125
    assert base.keys() == merged.keys() and len(factors) == 2 * len(settings["target_modules"])
    for name, weight in base.items():
        module = name.removesuffix(".weight")
        if module in settings["target_modules"]:
            a, b = (
                factors[f"base_model.model.{module}.lora_{one}.weight"].astype(np.float64)
                for one in "AB"
            )
            assert a.shape == (RANK, weight.shape[1]) and b.shape == (weight.shape[0], RANK)
            update = scale * b @ a
            assert np.abs(update).max() > 1e-3
            np.testing.assert_allclose(merged[name], weight + update, rtol=1e-5, atol=1e-6)
        elif name == "model.norm.weight":
            assert (merged[name] != weight).any()
        else:
            assert (merged[name] == weight).all()


@pytest.mark.slow
def test_a_run_without_an_adapter_has_none_to_write(folders, capsys):
    assert app.main("convert", [str(folders / "start"), str(folders / "no"), "--adapter"]) == 2
    assert "the run has no adapter (adapter.rank=0)" in capsys.readouterr().err


def adapt(family, root, *, steps, targets, adapter=None, **model):
    """Converts a golden folder, and trains an adapter of it with steps that change its logits."""
    assert app.main("convert", [str(GOLDEN / family), str(root / "start")]) == 0
    found = json.loads((root / "start" / "config.json").read_text())
    c = tiny_config()
    c.model.update({key: value for key, value in found["model"].items() if value != []})
    c.model.update(model)
    c.data.update(vocab_size=c.model.vocab_size)
    c.train.steps, c.eval.batches = steps, 0
    c.adapter.update(rank=RANK, alpha=ALPHA, targets=targets, **(adapter or {}))
    c.optim.learning_rate, c.optim.schedule, c.optim.clip_norm = 0.1, "constant", 100.0
    c.checkpoint.init_from = str(root / "start")
    train(c, workdir=root / "run")


PEFT_LOGITS = """
import sys
import numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
base, adapter, merged = sys.argv[1:]
def load(folder):
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
tokens = torch.arange(24).reshape(2, 12) * 7 % 61
logits = [load(base)(tokens).logits, load(merged)(tokens).logits]
logits.append(PeftModel.from_pretrained(load(base), adapter)(tokens).logits)
print(*[float((one - logits[1]).abs().max()) for one in logits])
"""


@pytest.mark.slow
def test_peft_computes_the_logits_of_merged_weights_of_a_mixture(tmp_path):
    """The bias of the router is that of the base, as all parameters without an adapter are."""
    adapt("deepseek_v3", tmp_path, steps=3, targets=("*/attention/*",), balance_weight=0.5)
    for name, flags in {"merged": [], "adapter": ["--adapter"]}.items():
        assert app.main("convert", [str(tmp_path / "run"), str(tmp_path / name), *flags]) == 0
    bias = "model.layers.2.mlp.gate.e_score_correction_bias"
    base, merged = tensors(GOLDEN / "deepseek_v3"), tensors(tmp_path / "merged")
    np.testing.assert_array_equal(merged[bias], base[bias])
    command = [python_with_peft(), "-c", PEFT_LOGITS, GOLDEN / "deepseek_v3"]
    command += [tmp_path / "adapter", tmp_path / "merged"]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    of_base, _, of_adapter = map(float, result.stdout.split())
    assert of_base > 0.5 and of_adapter < 1e-4


@pytest.mark.slow
def test_peft_computes_the_logits_of_merged_weights_of_adapted_experts(tmp_path):
    """Gate and up are one parameter there, with twice the rank; rsLoRA scales both."""
    settings = {"experts": True, "rslora": True}
    adapt("qwen3_moe", tmp_path, steps=3, targets=("layers/*",), adapter=settings)
    for name, flags in {"merged": [], "adapter": ["--adapter"]}.items():
        assert app.main("convert", [str(tmp_path / "run"), str(tmp_path / name), *flags]) == 0
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["target_parameters"] == ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    assert saved["rank_pattern"] == {"mlp.experts.gate_up_proj": 2 * RANK}
    command = [python_with_peft(), "-c", PEFT_LOGITS, GOLDEN / "qwen3_moe"]
    command += [tmp_path / "adapter", tmp_path / "merged"]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    of_base, _, of_adapter = map(float, result.stdout.split())
    assert of_base > 0.5 and of_adapter < 1e-4


def python_with_peft():
    """Returns an interpreter with torch, transformers and peft, which PYTHON_WITH_PEFT may name.

    The tests ran with torch 2.13 and 2.14, 5.24 and 0.21.
    """
    python = os.environ.get("PYTHON_WITH_PEFT", sys.executable)
    if subprocess.run([python, "-c", "import peft, torch"], capture_output=True).returncode:
        pytest.skip("peft and torch are not installed; see python_with_peft")
    return python


PEFT_STEPS = """
import json, sys
import numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(2)
base, adapter, data, rate = *sys.argv[1:4], float(sys.argv[4])
model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
model = PeftModel.from_pretrained(model, adapter, is_trainable=True)
trained = [one for name, one in model.named_parameters() if "lora_" in name]
assert trained == [one for one in model.parameters() if one.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
found = np.load(data)
for tokens, targets, weights in zip(found["tokens"], found["targets"], found["weights"]):
    logits = model(torch.tensor(tokens, dtype=torch.long)).logits.flatten(0, 1)
    targets = torch.tensor(targets.reshape(-1), dtype=torch.long)
    nll = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    weights = torch.tensor(weights.reshape(-1))
    loss = (nll * weights).sum() / weights.sum()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    print(float(loss))
"""


@pytest.mark.slow
def test_peft_and_torch_take_the_same_ten_steps(folders, tmp_path):
    python = python_with_peft()
    found = json.loads((folders / "start" / "config.json").read_text())
    c = tiny_config()
    c.model.update({key: value for key, value in found["model"].items() if value != []})
    c.data.update(vocab_size=c.model.vocab_size)
    c.train.steps, c.eval.batches, c.mesh.data = 10, 0, 2
    c.mesh.update(fsdp=2, tensor=2)
    c.adapter.update(rank=RANK, alpha=ALPHA)
    c.optim.learning_rate, c.optim.schedule = 3e-3, "constant"
    c.checkpoint.init_from = str(folders / "start")
    batches = []

    source = build(parse(c, num_devices=8)).train_data

    def read(indices):
        batch = source.read(indices)
        batches.append((int(indices[0]), batch))
        return batch

    rows = []
    data = Source(read, size=None)
    c.train.steps = 0
    train(c, workdir=tmp_path / "run", data=data)
    arguments = [str(tmp_path / "run"), str(tmp_path / "adapter"), "--adapter"]
    assert app.main("convert", arguments) == 0
    c.train.steps = 10
    train(c, workdir=tmp_path / "run", data=data, on_metrics=rows.append)
    batches = dict(batches)
    arrays = {
        name: np.stack([getattr(batches[16 * step], name) for step in range(10)])
        for name in ("tokens", "targets", "weights")
    }
    np.savez(tmp_path / "data.npz", **arrays)
    command = [python, "-c", PEFT_STEPS, GOLDEN / "llama2", tmp_path / "adapter"]
    command += [tmp_path / "data.npz", str(c.optim.learning_rate)]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    expected = [*map(float, result.stdout.split())]
    losses = [row["loss"] for row in rows if "loss" in row]
    assert len(losses) == 10 and expected[0] - expected[-1] > 0.05
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-4)
