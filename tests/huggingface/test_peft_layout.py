"""An adapter of any layers of any family is written for PEFT, and is read back bit by bit."""

import fnmatch
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import jax
import numpy as np
import pytest

from meshtrain.config.schema import AdapterConfig
from meshtrain.huggingface import convert, files, peft, peft_reader, tensor_rows, weights
from meshtrain.huggingface.families import FAMILIES as FAMILIES_HERE
from meshtrain.models import lora, trees
from meshtrain.models.lora_layer import A, B
from tests.lib.hf import FAMILIES, GOLDEN, load, logits

RANK = 2


@dataclass
class Case:
    """A golden model with random factors of the layers that match the patterns."""

    family: str
    targets: tuple[str, ...] = ("*",)
    rslora: bool = False

    def __post_init__(self):
        self.folder = GOLDEN / self.family
        self.section = weights.model_section(self.folder)
        self.model = convert.model_of(self.section)
        self.hf = weights.family_in(self.folder)
        paths = [*self.model.linears, *self.model.expert_linears]
        self.layers = [
            path for path in paths if any(fnmatch.fnmatch(path, one) for one in self.targets)
        ]
        self.adapter = AdapterConfig(
            rank=RANK,
            alpha=3.0,
            targets=tuple(self.layers),
            rslora=self.rslora,
            experts=any(path in self.model.expert_linears for path in self.layers),
        )
        self.adapted = lora.lora(
            self.model,
            rank=RANK,
            alpha=self.adapter.alpha,
            targets=self.adapter.targets,
            rslora=self.rslora,
            experts=self.adapter.experts,
        )
        shapes = jax.eval_shape(self.adapted.init, jax.random.key(0))
        generator = np.random.default_rng(0)
        self.shapes = {}
        self.factors = {}
        for path, leaf in jax.tree.leaves_with_path(shapes):
            name = trees.name_of(path)
            self.shapes[name] = leaf.shape
            if name.endswith((A, B)):
                self.factors[name] = 0.2 * generator.standard_normal(leaf.shape, np.float32)

    def write(self, folder, **settings):
        folder.mkdir()
        peft.write(
            folder,
            self.hf,
            self.section,
            self.factors.__getitem__,
            shapes=self.shapes,
            layers=self.layers,
            adapter=vars(self.adapter) | settings,
            dtype=np.dtype("float32"),
            base_model=None,
        )
        return json.loads((folder / "adapter_config.json").read_text())

    def kernels(self):
        paths = [*self.model.linears, *self.model.expert_linears]
        return {f"{path}/kernel": self.shapes[f"{path}/kernel"] for path in paths}

    def updates(self):
        """Returns what is added to each tensor in the files of the model, in float64."""
        tensors = {}
        kernels = {
            path: shape for path, shape in self.kernels().items() if path[:-7] in self.layers
        }
        for row in tensor_rows.rows(self.hf.names, kernels, self.section):
            a, b = (self.factors[row.path[:-6] + name].astype(np.float64) for name in (A, B))
            num_lead = a.ndim + b.ndim - 2 - len(row_shape := kernels[row.path])
            lead = row_shape[:num_lead]
            product = a.reshape(*lead, -1, RANK) @ b.reshape(*lead, RANK, -1)
            update = (self.adapter.scale * product).reshape(-1, *row_shape[len(row.stack) :])
            for name, one in zip(row.tensors, update, strict=True):
                tensor = tensors.setdefault(name, np.zeros(row.shape))
                row.parameter_view(tensor)[...] = one
        return tensors


def updates_of_peft(folder, case):
    """Returns what PEFT adds to each tensor in the files: its formula, from the saved folder."""
    config = json.loads((folder / "adapter_config.json").read_text())
    found = files.read_header(folder / "adapter_model.safetensors")
    halves = {name: np.array(one.read(), np.float64) for name, one in found.items()}
    modules = {name.rpartition(".lora_")[0] for name in halves}
    updates = {}
    ends = config.get("target_parameters", [])
    for module in sorted(modules):
        name = module.removeprefix("base_model.model.")
        a, b = (halves[f"{module}.lora_{half}.weight"] for half in "AB")
        module_name = name.removesuffix(".base_layer")
        if name not in (config["target_modules"] or []):
            keys = [f"{module_name}.{end.rpartition('.')[2]}" for end in ends]
            keys = [
                key for key, end in zip(keys, ends, strict=True) if f".{key}".endswith(f".{end}")
            ]
            # Of two parameters the first is nested in the second.
            name = keys[0 if len(keys) == 1 or name != module_name else -1].removesuffix(".weight")
        rank = config.get("rank_pattern", {})
        alpha = config.get("alpha_pattern", {})
        key = next((one for one in rank if name == one or name.endswith("." + one)), None)
        rank, alpha = rank.get(key, config["r"]), alpha.get(key, config["lora_alpha"])
        scale = alpha / (np.sqrt(rank) if config["use_rslora"] else rank)
        num_experts = a.shape[0] // rank
        assert b.shape[1] == a.shape[0] == num_experts * rank
        a = a.reshape(num_experts, rank, -1)
        b = b.reshape(len(b), rank, num_experts)
        update = scale * np.einsum("dre,eri->edi", b, a)
        if num_experts == 1:
            is_transposed = case.family == "gpt2"
            assert config["fan_in_fan_out"] == is_transposed
            name = f"{name}.weight"
            end = next((end for end in case.hf.fused if name.endswith(end)), "")
            in_files = name.removesuffix(end) + case.hf.fused[end][0] if end else name
            updates[in_files] = update[0].T if is_transposed else update[0]
            continue
        if case.family == "gpt_oss":  # (experts, inputs, outputs)
            updates[name] = update.swapaxes(1, 2)
            continue
        end = next(end for end in case.hf.fused if name.endswith(end))
        parts = case.hf.fused[end]
        stem = name.removesuffix(end)
        if "*" not in parts[0]:
            updates[stem + parts[0]] = update
            continue
        for expert, of_expert in enumerate(update):
            for part, one in zip(parts, np.split(of_expert, len(parts)), strict=True):
                updates[stem + part.replace("*", str(expert))] = one
    return updates


SOME_PARTS = (
    ("phi3", ("*/query", "*/value", "*/up"), True),
    ("phi3", ("*/key",), False),
    ("gpt2", ("*/key", "*/value", "*/down"), True),
    ("glm4", ("*/gate", "*/out"), True),
    ("gpt_oss", ("layers/mlp/up",), False),
    ("gpt_oss", ("layers/mlp/*", "*/query"), True),
    ("granitemoe", ("layers/mlp/gate", "layers/mlp/down"), True),
    ("granitemoe", ("layers/mlp/down",), False),
    ("qwen3_moe", ("layers/mlp/up", "layers/mlp/down"), False),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_of_all_layers_is_read_back_and_is_what_peft_adds(family, tmp_path):
    check(Case(family), tmp_path / "adapter")


def test_transformers_has_a_parameter_with_the_experts_of_every_family():
    for family in FAMILIES_HERE:
        joined = [part for parts in family.fused.values() for part in parts]
        for name in (names.split()[0] for names in family.names.values()):
            if name.count("*") > 1:
                assert any(name.endswith(f".{part}") for part in joined), (family, name)


@pytest.mark.parametrize(("family", "targets", "rslora"), SOME_PARTS)
def test_an_adapter_of_some_parts_is_read_back_and_is_what_peft_adds(
    family, targets, rslora, tmp_path
):
    check(Case(family, targets, rslora), tmp_path / "adapter")


def check(case, folder):
    case.write(folder)
    found = peft_reader.read(folder, case.hf, case.section, case.kernels())
    assert found.settings.targets == tuple(sorted(case.layers))
    assert found.settings.scale == pytest.approx(case.adapter.scale, rel=1e-12)
    assert found.settings.rank == RANK and not found.missing
    assert found.factors.keys() == case.factors.keys()
    for path, value in case.factors.items():
        np.testing.assert_array_equal(found.factors[path], value, err_msg=path)

    here, there = case.updates(), updates_of_peft(folder, case)
    assert here.keys() <= there.keys()
    for name, update in there.items():
        expected = here.get(name, np.zeros_like(update))
        np.testing.assert_allclose(update, expected, rtol=0, atol=1e-12, err_msg=name)


def test_ranks_and_alphas_of_fused_layers_are_in_the_patterns(tmp_path):
    config = Case("phi3", ("*/query", "*/value", "*/up", "*/out"), rslora=True).write(
        tmp_path / "adapter"
    )
    assert config["rank_pattern"] == {"self_attn.qkv_proj": 2 * RANK}
    assert config["alpha_pattern"] == {"self_attn.qkv_proj": pytest.approx(3.0 * 2**0.5)}
    assert (config["r"], config["lora_alpha"]) == (RANK, 3.0)


def test_what_peft_would_take_for_routed_experts_is_named_as_a_parameter(tmp_path):
    config = Case("deepseek_v3").write(tmp_path / "adapter", dropout=0.25)
    names = ("gate_proj", "up_proj", "down_proj")
    assert sorted(config["target_parameters"]) == sorted(
        [f"model.layers.{layer}.mlp.{name}.weight" for layer in (0, 1) for name in names]
        + [f"mlp.shared_experts.{name}.weight" for name in names]
        + ["mlp.experts.down_proj", "mlp.experts.gate_up_proj", "mlp.gate.weight"]
    )
    assert not [name for name in config["target_modules"] if "self_attn" not in name]
    # PEFT rejects dropout of parameters.
    assert config["lora_dropout"] == 0
    config = Case("llama3").write(tmp_path / "other", dropout=0.25)
    assert config["lora_dropout"] == 0.25 and "target_parameters" not in config


def zero_update(targets, folder):
    case = Case("phi3", targets)
    for path, value in case.factors.items():
        if path.endswith(B):
            value[...] = 0
    case.write(folder)
    return case, peft_reader.read(folder, case.hf, case.section, case.kernels())


def test_of_a_new_adapter_each_part_of_a_fused_layer_keeps_its_block(tmp_path):
    case, found = zero_update(("*",), tmp_path / "adapter")
    assert found.settings.rank == RANK
    for path, value in case.factors.items():
        np.testing.assert_array_equal(found.factors[path], value, err_msg=path)


def test_blocks_of_zeros_that_are_fewer_than_the_parts_are_of_all_parts(tmp_path):
    """No block says which part it belongs to: all get the same A, and the product is the same."""
    _, found = zero_update(("*/query", "*/value"), tmp_path / "adapter")
    layers = [f"layers/attention/{name}" for name in ("key", "query", "value")]
    assert found.settings.targets == tuple(layers) and found.settings.rank == 2 * RANK
    assert not any(found.factors[f"{layer}/{B}"].any() for layer in layers)
    key, query = (found.factors[f"layers/attention/{name}/{A}"] for name in ("key", "query"))
    np.testing.assert_array_equal(key, query)
    assert key.any()


PEFT_LOGITS = """
import sys, warnings
warnings.filterwarnings("ignore")
import numpy as np, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
for base, adapter in zip(sys.argv[1::2], sys.argv[2::2]):
    model = AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32, experts_implementation="eager"
    )
    tokens = torch.tensor(np.load(adapter + "/tokens.npy"), dtype=torch.long)
    before = model(tokens).logits.detach()
    after = PeftModel.from_pretrained(model, adapter)(tokens).logits.detach()
    assert (after - before).abs().max() > 0.1
    np.save(adapter + "/logits.npy", after.numpy())
"""
OF_PEFT = ("phi3", "glm4", "gpt2", "gpt_oss", "granitemoe", "deepseek_v3", "dots1", "hy_v3")
OF_PEFT += ("mixtral", "qwen2_moe", "minimax_m2", "youtu")


@pytest.mark.slow
def test_peft_computes_the_logits_of_the_model(tmp_path):
    """Of fused layers, with and without all parts, and of experts in tensors of all experts."""
    python = os.environ.get("PYTHON_WITH_PEFT", sys.executable)
    if subprocess.run([python, "-c", "import peft, torch"], capture_output=True).returncode:
        pytest.skip("peft and torch are not installed; PYTHON_WITH_PEFT names a Python")
    cases = [Case(family) for family in OF_PEFT]
    cases += [Case(*settings) for settings in SOME_PARTS]
    arguments = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        case.write(folder)
        tokens = np.arange(24).reshape(2, 12) * 7 % case.section["vocab_size"]
        np.save(folder / "tokens.npy", tokens)
        arguments += [str(case.folder), str(folder)]
    result = subprocess.run([python, "-c", PEFT_LOGITS, *arguments], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    for number, case in enumerate(cases):
        _, params = load(case.folder, fsdp=1)
        params = jax.device_get(params)
        for path, value in case.factors.items():
            params = trees.merge(params, trees.nested(path, value))
        tokens = np.load(tmp_path / str(number) / "tokens.npy").astype(np.int32)
        expected = np.load(tmp_path / str(number) / "logits.npy")
        with jax.default_matmul_precision("highest"):
            actual = logits(case.adapted, params, tokens)
        num_tokens = expected.shape[-1]
        np.testing.assert_allclose(
            actual[..., :num_tokens],
            expected,
            rtol=0,
            atol=1e-5,
            err_msg=f"{case.family} {case.targets}",
        )
