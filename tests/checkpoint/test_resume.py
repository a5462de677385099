"""A run resumes with the model, data and tokenizer of its checkpoint.

Other changes are reported.
"""

import ast
import dataclasses
import json
import os
import re
import types

import jax
import numpy as np
import optax
import pytest

import meshtrain
from meshtrain import program
from meshtrain.checkpoint import arrays, find, initial, manifest, resume, run_tokenizer
from meshtrain.checkpoint.vocabulary import Vocabulary
from meshtrain.cli import app
from meshtrain.config.parse import parse
from meshtrain.config.schema import AdapterConfig
from meshtrain.data import tokenizer
from meshtrain.errors import ConfigError
from meshtrain.inference import generate
from meshtrain.train import train
from tests.lib.checkpoints import checkpoints, flat, params_of, saving
from tests.lib.compare import assert_bit_equal
from tests.lib.configs import quick, tiny_config


def events(workdir):
    return [json.loads(line) for line in (workdir / "events.jsonl").read_text().splitlines()]


def text_config(folder, **data):
    """A config of three steps on the bytes of a folder of text."""
    config = tiny_config()
    config.model.vocab_size = 256
    config.eval.batches = 0
    config.data = {**config.data, "build": "meshtrain.data.tokens:build", **data}
    config.data.update(path=str(folder), seed=0, vocab_size=256)
    return config


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "text"
    folder.mkdir()
    letters = np.random.default_rng(0).integers(97, 123, (4, 2000)).astype(np.uint8)
    for number, row in enumerate(letters):
        (folder / f"{number}.txt").write_bytes(row.tobytes())
    return folder


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    """The workdir of a run of three steps; tests only read it."""
    workdir = tmp_path_factory.mktemp("run") / "run"
    train(text_config(text), workdir=workdir)
    return workdir


def flat_shapes(workdir):
    """Returns the shapes of the parameters of a run's newest checkpoint, by path."""
    _, saved = find.find_valid(workdir)
    kinds = arrays.saved_params(saved.arrays)
    return {
        path: jax.ShapeDtypeStruct(ast.literal_eval(kind.rpartition(" ")[0]), "float32")
        for path, kind in kinds.items()
    }


def saved_of(workdir):
    return manifest.read(workdir / "checkpoints" / "3")


def changed(workdir, config, identity=None):
    saved = saved_of(workdir)
    settings = parse(config, num_devices=8).to_dict()
    return resume.check(saved, settings, identity or saved.identity, source=workdir)


# One changed key of each section, and a few more; None: the change is rejected.
CHANGES = {
    "mesh.fsdp": (-1, "mesh.fsdp"),
    "rules": ((("batch", ("data", "fsdp")), ("embed", None)), "rules"),
    "train.seed": (7, "train.seed"),
    "train.steps": (9, "train.steps"),
    "train.remat": ("full", "train.remat"),
    "train.dtype": ("bfloat16", "train.dtype"),
    "pipeline.keep": ("residuals", "pipeline.keep"),
    "model.rope_theta": (5.0, None),
    "model.num_layers": (4, None),
    "model.attention": ("l", None),
    "model.z_loss": (1e-4, None),
    "model.build": ("meshtrain.models.other:build", None),
    "model.attention_impl": ("blockwise", "model.attention_impl"),
    "model.loss_chunk_mib": (1, "model.loss_chunk_mib"),
    "data.build": ("meshtrain.data.synthetic:build", None),
    "data.heldout": (0.5, None),
    "data.separator": (10, None),
    "data.seq_len": (8, "data.seq_len"),
    "data.path": ("/elsewhere", "data.path"),  # the digest counts
    "optim.learning_rate": (5.0, "optim.learning_rate"),
    "optim.b1": (0.5, "optim.b1"),
    "optim.build": ("my.own:optimizer", "optim.build"),
    "eval.every": (2, "eval.every"),
    "checkpoint.every": (2, "checkpoint.every"),
    "divergence.spike_sigmas": (float("inf"), "divergence.spike_sigmas"),
    "health.every": (3, "health.every"),
}


@pytest.mark.parametrize("key", CHANGES)
def test_a_changed_key_is_reported_or_rejected_with_the_way_out(finished, text, key):
    value, reported = CHANGES[key]
    config = text_config(text)
    section, _, name = key.partition(".")
    if key == "mesh.fsdp":
        config.mesh.data = 1
    if name:
        config[section][name] = value
    else:
        config[section] = value
    if reported:
        assert reported in changed(finished, config)
        return
    with pytest.raises(ConfigError, match=rf"^{key}=.*allow_change={key}$"):
        changed(finished, config)
    for allowed in (key, f"optim.b1, {section}.*"):
        config.checkpoint.allow_change = allowed
        then, now = changed(finished, config)[key]
        assert now == value and then != value


def test_a_changed_model_is_rejected_before_an_array_is_read(workdir, monkeypatch):
    def restore(*args, **kwargs):
        raise AssertionError("arrays are read")

    monkeypatch.setattr(arrays, "restore", restore)
    c = saving(6)
    c.model.d_model = 64
    with pytest.raises(ConfigError, match=r"^model.d_model=64: .*allow_change=model.d_model$"):
        train(c, workdir=workdir)


def test_nothing_is_reported_if_nothing_changed(finished, text):
    assert changed(finished, text_config(text)) == {}


def test_keys_that_another_version_did_not_have_count_as_their_defaults(finished, text):
    saved = saved_of(finished)
    config = json.loads(json.dumps(saved.config))
    del config["model"]["window"], config["checkpoint"]["allow_change"], config["health"]
    config["train"]["an_old_key"] = 3
    del config["train"]["kernels"]  # earlier versions had plain ones alone
    old = dataclasses.replace(saved, config=config, identity={})
    settings = parse(text_config(text), num_devices=8).to_dict()
    found = resume.check(old, settings, saved.identity, source=finished)
    kernels = settings["train"]["kernels"]
    assert found == {"train.an_old_key": [3, None], "train.kernels": ["plain", kernels]}


def test_only_changes_of_the_asked_keys_are_reported(finished, text):
    saved = saved_of(finished)
    config = text_config(text)
    config.train.log_every, config.eval.every = 7, 9
    settings = parse(config, num_devices=8).to_dict()
    both = resume.check(saved, settings, saved.identity, source=finished)
    assert {"train.log_every", "eval.every"} <= both.keys()
    found = resume.check(saved, settings, saved.identity, source=finished, only=("train.*",))
    assert "train.log_every" in found and "eval.every" not in found


def test_other_tokens_or_another_tokenizer_are_rejected(finished, text):
    identity = dict(saved_of(finished).identity)
    assert identity["data"] and identity["tokenizer"] == tokenizer.BYTES
    config = text_config(text)
    for key in identity:
        with pytest.raises(ConfigError, match=rf"^{key}: .* than .*allow_change={key}$"):
            changed(finished, config, identity | {key: "0123456789abcdef"})
    config.checkpoint.allow_change = "data,tokenizer"
    assert changed(finished, config, {"data": "a", "tokenizer": "b"}).keys() == {*identity}
    assert changed(finished, config, {"data": "", "tokenizer": ""}) == {}  # unknown


@pytest.mark.slow
def test_a_resumed_run_reports_its_changes_and_keeps_the_config_before(text, tmp_path, capsys):
    workdir, config = tmp_path / "run", text_config(text)
    train(config, workdir=workdir)
    first = (workdir / "config.json").read_text()
    capsys.readouterr()

    config.model.rope_theta, config.optim.learning_rate, config.train.steps = 5.0, 5.0, 4
    with pytest.raises(ConfigError, match="^model.rope_theta=5.0: .*trained with 10000.0"):
        train(config, workdir=workdir)
    assert (workdir / "config.json").read_text() == first  # nothing was lost
    assert not (workdir / "config_history").exists()

    config.model.rope_theta = 10000.0
    assert train(config, workdir=workdir).step == 4
    out = capsys.readouterr().out
    assert "changed     optim.learning_rate: 0.0003 -> 5.0\n" in out
    assert "changed     train.steps: 3 -> 4\n" in out
    event = next(event for event in events(workdir) if event["event"] == "changed")
    assert event["settings"]["optim.learning_rate"] == [0.0003, 5.0] and event["step"] == 3
    assert (workdir / "config_history" / "0001.json").read_text() == first
    assert json.loads((workdir / "config.json").read_text())["optim"]["learning_rate"] == 5.0

    train(config, workdir=workdir)  # there is nothing left to do
    assert "train.steps=4: the run is at step 4 already\n" in capsys.readouterr().out

    moved = text.parent / "moved"
    os.symlink(text, moved)
    config.data.path, config.train.steps = str(moved), 5
    assert train(config, workdir=workdir).step == 5  # the same tokens at another place
    (tmp_path / "other.txt").write_text("another text " * 1000)
    config.data.path = str(tmp_path / "other.txt")
    with pytest.raises(ConfigError, match="^data: other tokens"):
        train(config, workdir=workdir)


def test_a_checkpoint_is_read_with_the_model_and_tokenizer_that_it_has(finished, text):
    cfg = parse(text_config(text), num_devices=8)
    generate.restore_params(cfg, finished, tokenizer=tokenizer.BYTES)
    with pytest.raises(ConfigError, match="^tokenizer: another tokenizer"):
        generate.restore_params(cfg, finished, tokenizer="0123456789abcdef")
    other = dataclasses.replace(
        cfg, model=dataclasses.replace(cfg.model, options={**cfg.model.options, "rope_theta": 5.0})
    )
    with pytest.raises(ConfigError, match="^model.rope_theta=5.0"):
        generate.restore_params(other, finished)


# ---- a run is self-contained ----


@pytest.mark.slow
def test_a_run_is_used_from_any_folder_after_its_data_has_moved(tmp_path, monkeypatch, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    bpe.train_from_iterator(["some words and some more words"] * 10, trainer)
    bpe.save(str(tmp_path / "my-words.json"))
    (tmp_path / "input.txt").write_text("some words and some more words\n" * 300)
    monkeypatch.chdir(tmp_path)
    prepare = "input.txt --output=tokens --tokenizer=my-words.json --num_workers=1"
    assert app.main("prepare", prepare.split()) == 0

    config = text_config("tokens")
    size = tokenizer.load(tmp_path / "tokens").vocab_size
    config.model.vocab_size = config.data.vocab_size = size
    train(config, workdir="run")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["data"]["path"] == str(tmp_path / "tokens")
    copy = tmp_path / "run" / "tokenizer"
    assert tokenizer.digest_of(copy) == tokenizer.digest_of(tmp_path / "tokens")
    assert tokenizer.load(copy).eos == tokenizer.load(tmp_path / "tokens").eos

    mixture = {"checkpoint": {}, "data": {"mixture": [[str(tmp_path / "tokens"), 1.0]]}}
    assert run_tokenizer.digest(tmp_path, mixture) == tokenizer.digest_of(copy)  # of an older run

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "tokens").rename(elsewhere / "moved")
    monkeypatch.chdir(elsewhere)
    run = f"--workdir={tmp_path / 'run'}"
    capsys.readouterr()
    assert app.main("generate", [run, "--prompt=some words", "--length=4"]) == 0
    assert capsys.readouterr().out.startswith("some words")
    assert app.main("evaluate", [run]) == 2
    assert "data.path=" in capsys.readouterr().err
    assert app.main("evaluate", [run, "--config.data.path=moved", "--split=all"]) == 0
    (elsewhere / "bytes").mkdir()
    (elsewhere / "bytes" / "a.txt").write_text("other words " * 1000)
    as_bytes = ["--config.data.path=bytes", "--config.data.dtype=uint8", "--split=all"]
    assert app.main("evaluate", [run, *as_bytes]) == 2
    assert "tokenizer: another tokenizer" in capsys.readouterr().err
    assert app.main("generate", [run, "--tokenizer=bytes"]) == 2
    assert "--config.checkpoint.allow_change=tokenizer" in capsys.readouterr().err


def test_paths_in_a_config_json_are_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config()
    config.data = {
        **config.data,
        "path": "text",
        "mixture": (("a", 1.0), ("/b", 2)),
        "cache_path": "../c",
    }
    config.checkpoint.init_from = "runs/x"
    found = parse(config, num_devices=8).to_dict()
    assert found["data"]["path"] == str(tmp_path / "text")
    assert found["data"]["mixture"] == ((str(tmp_path / "a"), 1.0), ("/b", 2))
    assert found["data"]["cache_path"] == str(tmp_path.parent / "c")
    assert found["data"]["build"] == config.data.build
    assert found["checkpoint"]["init_from"] == str(tmp_path / "runs" / "x")


def test_init_from_a_run_with_another_tokenizer_is_logged(finished):
    settings = types.SimpleNamespace(init_from=str(finished), init_only="*")
    params = flat_shapes(finished)
    adapter = AdapterConfig(rank=0)
    for digest, found in (("bytes", 0), ("", 0), ("0123456789abcdef", 1)):
        lines = []
        initial.find_source(
            settings,
            {"tokenizer": digest},
            params,
            adapter=adapter,
            vocabulary=Vocabulary(0, {}),
            log=lines.append,
        )
        assert sum("tokenizer   differs from that of" in line for line in lines) == found


# ---- where a workdir may be ----


def test_a_workdir_that_cannot_be_used_is_rejected_before_anything_is_written(
    text, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    places = {
        "az://bucket/run": "does not read or write az storage",
        "s3://bucket": "use a bucket and a folder of its own",
        "/": "use a folder of its own",
        "//": "use a folder of its own",
        str(text): "is in data.path",
        str(text / "runs" / "x"): "is in data.path",
        str(text.parent): "contains data.path",
        f"{text.parent}/none/..": "contains data.path",
        "run/checkpoints/3": "belongs to the run in .*run; use",
        "run/logs": "belongs to the run",
    }
    (tmp_path / "run").mkdir() or (tmp_path / "run" / "config.json").write_text("{}")
    before = sorted(text.parent.rglob("*"))
    for place, message in places.items():
        with pytest.raises(ConfigError, match=message):
            train(text_config(text), workdir=place)
    config = text_config(text)
    config.data.path, config.data.mixture = "", ((str(text), 1.0),)
    with pytest.raises(ConfigError, match="is in data.path"):
        train(config, workdir=text / "run")
    assert sorted(text.parent.rglob("*")) == before and len([*tmp_path.rglob("*")]) == 2


@pytest.mark.parametrize("there_before", [False, True])
def test_a_fault_at_start_leaves_no_workdir(text, tmp_path, there_before):
    workdir = tmp_path / "new" / "run"
    if there_before:
        workdir.mkdir(parents=True)
    faults = {"checkpoint.init_from": "/nowhere", "data.path": "/nowhere", "train.steps": -1}
    for key, value in faults.items():
        config = text_config(text)
        section, name = key.split(".")
        config[section][name] = value
        with pytest.raises(ConfigError):
            train(config, workdir=workdir)
        assert workdir.exists() == there_before and not list(workdir.rglob("*"))
        assert there_before or not workdir.parent.exists()


def test_a_checkpoint_of_another_optimizer_is_rejected_but_can_initialise_parameters(
    workdir, tmp_path, capsys
):
    c = saving(7)
    with c.unlocked():
        c.optim.build = f"{__name__}:momentum"
        for key in ("b1", "b2", "epsilon", "weight_decay", "no_decay"):
            del c.optim[key]
    with pytest.raises(meshtrain.ConfigError, match="checkpoint.init_from"):
        train(c, workdir=workdir)
    c.checkpoint.init_from, c.train.steps = str(workdir), 0
    result = train(c, workdir=tmp_path / "new")
    assert_bit_equal(flat(result.state.params), params_of(checkpoints(workdir) / "6"))
    assert result.step == 0 and "parameters of" in capsys.readouterr().out


def momentum(learning_rate):
    return optax.sgd(learning_rate, momentum=0.9)


def test_parameters_are_initialised_by_pattern_and_the_others_are_logged(workdir, tmp_path, capsys):
    c = quick(steps=0)
    c.checkpoint.update(
        init_from=str(checkpoints(workdir) / "4"), init_only="layers/*,final_norm/*"
    )
    c.model.vocab_size = 32  # another shape of the embedding
    params = flat(train(c, workdir=tmp_path / "new").state.params)
    saved = params_of(checkpoints(workdir) / "4")
    for path, value in params.items():
        assert np.array_equal(value, saved[path]) == path.startswith(("layers", "final_norm")), path
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("parameters of"))
    assert "new here: output/kernel, tokens/embedding" in line and "not used: output/kernel" in line
    c.checkpoint.init_only = "layers/*, nothing"
    with pytest.raises(meshtrain.ConfigError, match="no parameter has such a name"):
        train(c, workdir=tmp_path / "other")
    c.checkpoint.init_from, c.checkpoint.init_only = str(tmp_path), "*"
    with pytest.raises(
        meshtrain.ConfigError, match="checkpoint.init_from=.*no valid checkpoint there"
    ):
        train(c, workdir=tmp_path / "third")


# A key of the model and its value in the new run, the fault, and what init_only may load.
OTHER_SIZES = {
    "num_layers": (
        3,
        r"layers/attention/key/kernel has shape \(3, 32, 2, 8\) here",
        "final_norm/*,output/*,tokens/*",
    ),
    "d_ff": (
        48,
        r"layers/mlp/down/kernel has shape \(2, 48, 32\) here",
        "final_norm/*,layers/attention/*,layers/attention_norm/*,layers/mlp_norm/*,output/*,"
        "tokens/*",
    ),
    "d_model": (64, r"final_norm/scale has shape \(64,\) here", ""),
    "bias": (
        True,
        r"layers/attention/key/bias has shape \(2, 2, 8\) here and is not there, and 6 more",
        "final_norm/*,layers/attention/key/kernel,layers/attention/out/kernel,"
        "layers/attention/query/kernel,layers/attention/value/kernel,layers/attention_norm/*,"
        "layers/mlp/down/kernel,layers/mlp/gate/kernel,layers/mlp/up/kernel,layers/mlp_norm/*,"
        "output/*,tokens/*",
    ),
}


@pytest.mark.parametrize("key", OTHER_SIZES)
def test_init_from_a_run_of_other_sizes_is_one_line_with_a_way_out(
    finished_run, tmp_path, monkeypatch, key
):
    """It advised to use another --workdir with init_from, which is what the user does."""
    value, fault, fitting = OTHER_SIZES[key]
    c = quick(steps=0)
    c.checkpoint.init_from, c.model[key] = str(finished_run), value
    with monkeypatch.context() as patch:
        patch.setattr(program.Program, "initial_state", None)  # not called
        with pytest.raises(ConfigError, match=f"^checkpoint.init_from=.*: parameter {fault}") as e:
            train(c, workdir=tmp_path / "new")
    (line,) = e.value.faults
    assert str(finished_run) in line and "use the sizes of that run" in line
    assert not (tmp_path / "new" / "config.json").exists()
    advice = re.findall(r'--config.checkpoint.init_only="(.*)"$', line)
    assert advice == [fitting] * bool(fitting)
    if key == "d_ff":  # the advice works
        c.checkpoint.init_only = fitting
        assert train(c, workdir=tmp_path / "new").step == 0


@pytest.mark.parametrize("size", [100, 200])  # within the rows that pad it to 128, and beyond
def test_a_vocabulary_grows_and_old_tokens_keep_their_ids(size, finished_run, tmp_path, capsys):
    c = quick(steps=0)
    c.mesh.update(data=1, fsdp=4, tensor=2)
    old = c.model.vocab_size
    c.checkpoint.init_from, c.model.vocab_size = str(finished_run), size
    found = flat(train(c, workdir=tmp_path).state.params)
    saved = params_of(checkpoints(finished_run) / "6")
    assert found.keys() == saved.keys()
    for path, value in found.items():
        dim = {"tokens/embedding": 0, "output/kernel": 1}.get(path)
        if dim is None:
            assert np.array_equal(value, saved[path]), path
            continue
        kept, added, padding = np.split(value, [old, size], axis=dim)
        expected = np.take(saved[path], np.arange(old), axis=dim)
        assert np.array_equal(kept, expected)
        mean = np.broadcast_to(expected.mean(dim, keepdims=True), added.shape)
        np.testing.assert_allclose(added, mean, atol=1e-6)
        assert not padding.any()
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("parameters of"))
    assert f"vocabulary grows from {old} to {size} tokens, new ones begin as the mean" in line
    # What is not read keeps its own shape.
    c.checkpoint.init_only = "layers/*"
    assert train(c, workdir=tmp_path / "layers").step == 0


def test_a_run_starts_from_a_run_that_removes_the_checkpoint_that_was_chosen(
    workdir, tmp_path, monkeypatch, capsys
):
    """A live run with keep_last: between the choice and the read, a newer one replaces it."""
    folder = checkpoints(workdir)
    read = arrays.restore_params

    def remove_first(directory, *args, **kwargs):
        if directory.name == "6":
            find.remove(directory)
        return read(directory, *args, **kwargs)

    monkeypatch.setattr(arrays, "restore_params", remove_first)
    c = quick(steps=0)
    c.checkpoint.init_from = str(workdir)
    params = flat(train(c, workdir=tmp_path / "new").state.params)
    assert_bit_equal(params, params_of(folder / "4"))
    assert f"parameters of {folder / '4'}" in capsys.readouterr().out
    (record,) = (one for one in events(tmp_path / "new") if one["event"] == "init_from")
    assert record["path"] == str(folder / "4")
