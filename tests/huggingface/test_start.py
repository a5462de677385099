"""A run, an evaluation and a generation begin with a Hugging Face folder itself."""

import json
import shutil

import jax
import numpy as np
import pytest

from meshtrain.checkpoint import run_tokenizer
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.errors import ConfigError
from meshtrain.huggingface import files, start, weights
from meshtrain.program import Program
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import GOLDEN, run

FOLDER = GOLDEN / "llama3"


def config_of(folder=FOLDER, **sizes):
    c = tiny_config()
    start.set_model(c, folder)
    c.train.steps, c.eval.batches = 0, 0
    c.mesh.update(**(sizes or {"data": 8}))
    return c


def leaves(params):
    return {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(params)
    }


@pytest.mark.parametrize("family", ["llama3", "dots1"])
def test_a_run_has_the_parameters_of_its_conversion(family, tmp_path):
    """Those with padded vocabularies, first dense layers and router statistics too."""
    run(GOLDEN / family, tmp_path / "start")
    c = config_of(GOLDEN / family, data=1, fsdp=4, tensor=2)
    direct = leaves(train(c).state.params)
    c.checkpoint.init_from = str(tmp_path / "start")
    converted = leaves(train(c).state.params)
    assert direct.keys() == converted.keys()
    for name, value in direct.items():
        np.testing.assert_array_equal(value, converted[name], err_msg=name)


def test_parameters_of_the_folder_are_not_initialised_before(monkeypatch, tmp_path):
    """They would take the memory of all parameters a second time."""
    fresh = []
    plain = Program.initial_state

    def recorded(self, seed, load=None, *, is_loaded=None):
        def load_recorded(params):
            for path, leaf in jax.tree.leaves_with_path(params):
                if isinstance(leaf, jax.Array):
                    fresh.append(jax.tree_util.keystr(path, simple=True, separator="/"))
            return load(params)

        return plain(self, seed, load_recorded, is_loaded=is_loaded)

    monkeypatch.setattr(Program, "initial_state", recorded)
    c = config_of()
    train(c)
    assert fresh == []
    c.checkpoint.init_only = "layers/*"
    c.adapter.rank = 2
    train(c)
    others = {path for path in fresh if "lora" not in path}
    assert others == {"tokens/embedding", "final_norm/scale"} and len(fresh) == 2 + 2 * 7


def test_each_shard_is_read_once_and_alone(monkeypatch):
    """So a process reads the bytes of its own shards, and none of the others."""
    sizes = []
    plain = weights._copy_values

    def recorded(values, target, name, *, advice):
        sizes.append((name.rpartition(": ")[2], values.size))
        plain(values, target, name, advice=advice)

    monkeypatch.setattr(weights, "_copy_values", recorded)
    train(config_of(data=1, fsdp=4, tensor=2))
    tensors = files.tensors(FOLDER)
    read = dict.fromkeys(tensors, 0)
    for name, size in sizes:
        read[name] += size
        full = np.prod(tensors[name].shape)
        # Norms are replicated; every other tensor has at least 4 shards.
        assert size <= full / 4 or len(tensors[name].shape) == 1
    assert read == {name: np.prod(tensor.shape) for name, tensor in tensors.items()}


def test_other_sizes_are_one_line_each_before_anything_is_compiled(monkeypatch):
    c = config_of()
    c.model.d_ff = 32
    with pytest.raises(ConfigError) as caught:
        train(c)
    first, last = caught.value.faults
    assert first == f"model.d_ff is 32, not 24, as {FOLDER} has"
    assert last.startswith(f"checkpoint.init_from={FOLDER}: is another model; use --config=")
    c.checkpoint.init_only = "layers/attention/*"
    train(c)
    c.checkpoint.init_only = "layer/*"
    with pytest.raises(ConfigError, match="init_only=layer/.: no parameter has such a name"):
        train(c)


@pytest.mark.parametrize("family", ["llama2", "llama3"])  # with an output head, and tied
@pytest.mark.parametrize("size", [70, 140])
def test_a_vocabulary_grows_and_old_tokens_keep_their_ids(family, size, tmp_path, capsys):
    same = leaves(train(config_of(GOLDEN / family)).state.params)
    c = config_of(GOLDEN / family, data=1, fsdp=4, tensor=2)
    c.model.vocab_size = size
    grown = leaves(train(c, workdir=tmp_path / "run").state.params)
    assert grown.keys() == same.keys()
    for name, value in grown.items():
        dim = {"['tokens']['embedding']": 0, "['output']['kernel']": 1}.get(name)
        if dim is None:
            np.testing.assert_array_equal(value, same[name], err_msg=name)
            continue
        kept, added, padding = np.split(value, [61, size], axis=dim)
        old = np.take(same[name], np.arange(61), axis=dim)
        np.testing.assert_array_equal(kept, old)
        mean = np.broadcast_to(old.mean(dim, keepdims=True), added.shape)
        np.testing.assert_allclose(added, mean, atol=1e-6)
        assert not padding.any()
    out = capsys.readouterr().out
    assert f"vocabulary grows from 61 to {size} tokens" in out and "model.vocab_size is" not in out
    # The export has the new size.
    run(tmp_path / "run", tmp_path / "hf")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["vocab_size"] == size


def test_what_changes_the_model_without_its_sizes_is_logged(capsys):
    c = config_of()
    c.model.rope_theta = 5.0
    train(c)
    assert "init_from   model.rope_theta is 5.0, not 100.0, as " in capsys.readouterr().out


def test_the_folder_is_remembered_for_the_export(tmp_path):
    """Its family, and its token ids, also after it has moved."""
    folder = shutil.copytree(FOLDER, tmp_path / "folder")
    shutil.copyfile(GOLDEN / "llama3" / "config.json", folder / "config.json")
    (folder / "tokenizer.json").write_text("{}")
    train(config_of(folder), workdir=tmp_path / "run")
    shutil.rmtree(folder)
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    found = run_tokenizer.imported_config(tmp_path / "run", saved)
    assert found == tmp_path / "run" / "tokenizer" / "huggingface.json"
    assert json.loads(found.read_text())["architectures"] == ["LlamaForCausalLM"]


def test_the_name_on_the_hub_is_that_of_its_cache(tmp_path):
    cached = tmp_path / "hub/models--HuggingFaceTB--SmolLM2-135M/snapshots/93efa2f097d58c2a"
    assert start.name_of(cached) == "HuggingFaceTB/SmolLM2-135M"
    assert start.name_of(tmp_path / "models") == str(tmp_path / "models")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "tokens.npy"
    np.save(path, (np.arange(4000) * 7 % 61).astype(np.uint16))
    return path


def test_evaluate_accepts_the_folder(data, tmp_path, capsys):
    run(FOLDER, tmp_path / "start")
    lines = []
    for folder in (FOLDER, tmp_path / "start"):
        arguments = [f"--workdir={folder}", f"--config.data.path={data}"]
        assert app.main("evaluate", [*arguments, "--config.data.seq_len=16"]) == 0
        lines.append(capsys.readouterr().out)
    assert "perplexity" in lines[0]
    assert lines[0].splitlines()[-4:] == lines[1].splitlines()[-4:]
    fault = [f"--workdir={FOLDER}", f"--config.data.path={data}", "--config.model.rope_theta=5.0"]
    assert app.main("evaluate", fault) == 2
    assert "model.rope_theta is 5.0, not 100.0, as " in capsys.readouterr().err


def test_generate_accepts_the_folder(tmp_path, capsys):
    """With its tokenizer; here there is none, and bytes are beyond its vocabulary."""
    assert app.main("generate", [f"--workdir={FOLDER}", "--prompt=\t\n", "--length=3"]) == 0
    assert capsys.readouterr().out.startswith("\t\n")
    assert app.main("generate", [f"--workdir={tmp_path}"]) == 2
    assert "or a Hugging Face folder" in capsys.readouterr().err


def test_a_config_may_be_the_folder(data, tmp_path):
    """Overrides come after it; the file in it stands for the folder."""
    for name in (FOLDER, FOLDER / "config.json"):
        path, change = app.source_of_config(str(name))
        config, faults = load.read(path, ["--config.model.rope_theta=7.0"], change=change)
        assert not faults and config.model.rope_theta == 7.0
        assert (config.model.d_model, config.data.vocab_size, config.data.seq_len) == (16, 61, 64)
        assert config.checkpoint.init_from == str(FOLDER)
        assert config.train.param_dtype == "float32"
