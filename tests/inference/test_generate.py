"""The verbs `generate` and `evaluate`, on a run whose model learned to count."""

import dataclasses
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import types
import unittest.mock

import jax
import numpy as np
import pytest

from meshtrain import state as states
from meshtrain.checkpoint import run_tokenizer
from meshtrain.cli import app
from meshtrain.config.build import build_data, build_model
from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.data import tokenizer as tokenizers
from meshtrain.inference import generate, generation_config
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import GOLDEN
from tests.lib.hf import run as run_convert
from tests.lib.paths import ROOT
from tests.lib.prepare import TEXTS, hugging_face, sentence_piece, write_jsonl


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Bytes 32, 33, 34, ... 126, repeated, at a different offset in each window."""
    file = tmp_path_factory.mktemp("text") / "count.bin"
    (np.arange(95 * 40) % 95 + 32).astype(np.uint8).tofile(file)
    return file


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, text):
    """A run whose model learned to count."""
    folder = tmp_path_factory.mktemp("count")
    c = tiny_config()
    c.train.steps, c.optim.learning_rate, c.eval.batches = 150, 1e-2, 0
    c.model.vocab_size = 128
    c.data.build = "meshtrain.data.tokens:build"
    c.data.update(path=str(text), heldout=0.25)
    train(c, workdir=folder)
    return folder


def run_verb(verb, *arguments, capsys):
    code = app.main(verb, [*map(str, arguments)])
    output = capsys.readouterr()
    return code, output.out, output.err


@pytest.mark.slow
def test_a_text_continues_past_the_context(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=0", "--prompt=ABC", "--length=40"]
    code, out, _ = run_verb("generate", *options, capsys=capsys)
    assert (code, out) == (0, "".join(map(chr, range(65, 65 + 43))) + "\n")


@pytest.mark.slow
def test_several_prompts_give_the_same_text_on_every_mesh(workdir, tmp_path, capsys):
    (tmp_path / "prompts").write_text("XYZ\n0\n")
    options = [f"--workdir={workdir}", "--temperature=0.5", "--prompt=!", "--length=5"]
    options += [f"--prompt_file={tmp_path / 'prompts'}"]
    default = run_verb("generate", *options, capsys=capsys)
    sharded = run_verb(
        "generate", *options, "--config.mesh.tensor=2", "--config.mesh.data=4", capsys=capsys
    )
    assert sharded == default
    assert sharded[1].splitlines() == ["--- 0", '!"#$%&', "--- 1", "XYZ[\\]^_", "--- 2", "012345"]


@pytest.mark.slow
def test_a_pipeline_mesh_gives_the_text_of_one_device(tmp_path, capsys, monkeypatch):
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.num_layers = 0, 0, 4
    c.model.vocab_size = c.data.vocab_size = 128
    train(c, workdir=tmp_path)
    capsys.readouterr()
    bytes_of = []

    def record(cfg, path, real=generate.restore_params, **options):
        program, params = real(cfg, path, **options)
        bytes_of.append(states.bytes_per_device(params))
        return program, params

    monkeypatch.setattr(generate, "restore_params", record)
    options = [f"--workdir={tmp_path}", "--temperature=0.9", "--prompt=abcdefgh", "--length=7"]
    layouts = [
        ["mesh.data=8", "mesh.fsdp=1"],
        ["mesh.fsdp=8"],
        ["mesh.pipeline=2"],
        ["mesh.pipeline=2", "pipeline.schedule=interleaved", "pipeline.num_chunks=2"],
        ["mesh.pipeline=2", "mesh.tensor=2", "train.zero_stage=0"],
        ["mesh.data=2", "mesh.context=4", "model.attention_impl=blockwise"],
    ]
    one, *others = [
        run_verb("generate", *options, *(f"--config.{flag}" for flag in layout), capsys=capsys)
        for layout in layouts
    ]
    assert one[0] == 0 and others == [one] * 5
    # No device needs more memory than with mesh.fsdp alone; norms are not sharded over tensor.
    assert bytes_of[2] == bytes_of[3] == bytes_of[1] < bytes_of[0] / 7
    assert bytes_of[4] <= 1.1 * bytes_of[1]


def test_a_stop_token_ends_the_text_and_is_not_printed(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=0", "--prompt=A", "--length=20"]
    assert run_verb("generate", *options, "--stop=F", capsys=capsys)[1] == "ABCDE\n"
    assert run_verb("generate", *options, "--stop=70", capsys=capsys)[1] == "ABCDE\n"


@pytest.mark.slow
def test_a_text_ends_before_a_stop_text(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=0", "--prompt=A", "--length=20"]
    assert run_verb("generate", *options, "--stop=DEF", capsys=capsys)[1] == "ABC\n"
    flags = ["--prompt=X", "--stop=bc", "--stop=GH"]
    _, out, _ = run_verb("generate", *options, *flags, capsys=capsys)
    assert out == "--- 0\nABCDEF\n--- 1\nXYZ[\\]^_`a\n"


@pytest.mark.slow
def test_each_prompt_is_continued_several_times(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=3", "--length=9", "--num_return_sequences=3"]
    code, out, _ = run_verb("generate", *options, "--prompt=A", "--prompt=X", capsys=capsys)
    assert code == 0
    titles = [line for line in out.splitlines() if line.startswith("--- ")]
    assert titles == ["--- 0.0", "--- 0.1", "--- 0.2", "--- 1.0", "--- 1.1", "--- 1.2"]
    texts = out.split("--- 1.0")[0].split("--- 0.")[1:]
    assert len({text[2:] for text in texts}) == 3
    code, _, err = run_verb("generate", *options, "--temperature=0", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "--num_return_sequences=3" in err


@pytest.mark.slow
def test_generation_config_has_the_defaults_and_flags_replace_them(workdir, tmp_path, capsys):
    run = shutil.copytree(workdir, tmp_path / "run")
    file = run / "generation_config.json"
    options = [f"--workdir={run}", "--prompt=A"]

    def generated(config, *flags):
        file.write_text(json.dumps(config))
        return run_verb("generate", *options, *flags, capsys=capsys)

    config = {"do_sample": False, "max_new_tokens": 4, "temperature": None, "top_k": 50}
    expected = f"sampling: top_k=50, temperature=0, as {file} says; flags replace them\n"
    assert generated(config) == (0, "ABCDE\n", expected)
    assert generated({**config, "stop_strings": ["DE"]})[1] == "ABC\n"
    assert generated(config, "--length=6")[1] == "ABCDEFG\n"
    # Below 1 it prefers the tokens that there are.
    assert generated({**config, "repetition_penalty": 1e-4})[1] != "ABCDE\n"
    code, out, err = generated({"typical_p": 0.9, "num_beams": 1, "max_new_tokens": 2})
    assert (code, len(out)) == (0, 4)
    assert err == f"{file}: typical_p=0.9: is not supported, ignored\n"
    code, _, err = generated({"top_p": 7.0})
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"{file}: --top_p=7.0: use a number above 0, up to 1")
    assert generated({"top_p": 7.0, "max_new_tokens": 1}, "--top_p=0.5")[0] == 0


def test_what_transformers_samples_with_is_read():
    folder = pathlib.Path(__file__).parent

    def read(config):
        with unittest.mock.patch.object(
            generation_config.run_tokenizer, "generation_config", lambda _: (folder, config)
        ):
            return generation_config.read([folder])

    assert read({"do_sample": True}).sampling == {"temperature": 1.0, "top_k": 50}
    assert read({"do_sample": True, "top_k": 20, "min_p": 0}).sampling == {
        "temperature": 1.0,
        "top_k": 20,
        "min_p": 0.0,
    }
    found = read({"temperature": "hot", "top_k": 2.5, "top_p": True, "max_new_tokens": -1})
    assert found.sampling == {} and found.length is None
    assert generation_config.read([folder]) == generation_config.Defaults()


def streamed(tokenizer, ids, tokens, stop_texts=()):
    """Returns the pieces of text that tokens add, the last of them what was held back."""
    stream = generate.TextStream(tokenizer, ids, stop_texts)
    pieces = [stream.add(token) for token in tokens]
    return [*pieces, stream.end()], stream.is_stopped


def test_a_multibyte_character_is_printed_once_it_is_complete():
    tokenizer = generate.tokenizers.load("bytes")
    pieces, _ = streamed(tokenizer, [65], [*"né €".encode(), 0x82])
    assert [piece for piece in pieces if piece] == ["n", "é", " ", "€", "\ufffd"]


@pytest.mark.parametrize(
    ("stop_texts", "text", "pieces", "is_stopped"),
    [
        (["bc"], "abcd", ["a", "", "", "", ""], True),
        (["bcx"], "abcd", ["a", "", "", "bcd", ""], False),
        (["bcx"], "abc", ["a", "", "", "bc"], False),  # the end of what is held back
        (["aab"], "aaab", ["", "", "a", "", ""], True),
        (["zz", "b"], "abzz", ["a", "", "", "", ""], True),
        (["€"], "a€b", ["a", "", "", "", "", ""], True),  # three bytes
        ([], "ab", ["a", "b", ""], False),
    ],
)
def test_what_may_begin_a_stop_text_is_held_back(stop_texts, text, pieces, is_stopped):
    tokenizer = generate.tokenizers.load("bytes")
    assert streamed(tokenizer, [65], text.encode(), stop_texts) == (pieces, is_stopped)


def test_a_leading_space_that_decode_drops_at_the_start_is_printed():
    def decode(ids):  # as SentencePiece does
        return "".join([" a", " b", "c"][token] for token in ids).removeprefix(" ")

    tokenizer = types.SimpleNamespace(decode=decode)
    assert streamed(tokenizer, [0], [1, 2, 0])[0] == [" b", "c", " a", ""]
    long = [0, 1] * generate.DECODE_CONTEXT
    # The text of `long` alone lacks its first space.
    assert "".join(streamed(tokenizer, long, [1, *long])[0]) == f" b {decode(long)}"


@pytest.fixture
def encoded(monkeypatch):
    """Records the prompts as token ids."""
    recorded = []
    original = generate.sampling.generator

    def recording(program, params, **options):
        generate_rows = original(program, params, **options)

        def record(prompts, **options):
            recorded.extend(prompts)
            return generate_rows(prompts, **options)

        return record

    monkeypatch.setattr(generate.sampling, "generator", recording)
    return recorded


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """A converted model whose own length is 64; its config trains with rows of 16 tokens."""
    folder = tmp_path_factory.mktemp("imported")
    config = "from tests.lib.configs import tiny_config as get_config"
    (folder / "rows_of_16.py").write_text(config)
    run_convert(GOLDEN / "llama3", folder / "run", f"--config={folder / 'rows_of_16.py'}")
    return folder / "run"


@pytest.fixture
def spelling(tmp_path):
    """A Hugging Face folder with a tokenizer of single characters, from "(" to "a"."""
    package = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    folder = shutil.copytree(GOLDEN / "llama3", tmp_path / "hf")
    vocabulary = {chr(40 + number): number for number in range(58)}
    vocabulary |= {"<s>": 58, "</s>": 59, "<END>": 60}
    tokenizer = package.Tokenizer(package.models.BPE(vocabulary, []))
    tokenizer.decoder = package.decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>", "<END>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_a_prompt_of_a_converted_model_begins_as_its_tokenizer_says(
    spelling, tmp_path, encoded, capsys
):
    for config, prefix in (
        ({"add_bos_token": True, "bos_token": "<END>"}, [60]),
        ({"add_bos_token": False}, []),
    ):
        (spelling / "tokenizer_config.json").write_text(json.dumps(config))
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        run_convert(spelling, tmp_path / "run")
        encoded.clear()
        flags = [f"--workdir={tmp_path / 'run'}", "--prompt=()", "--length=1"]
        assert run_verb("generate", *flags, capsys=capsys)[0] == 0
        assert run_verb("generate", *flags, "--no-bos", capsys=capsys)[0] == 0
        assert encoded == [[*prefix, 0, 1], [0, 1]]


@pytest.mark.slow
def test_a_text_ends_at_each_token_that_the_files_of_a_model_list(spelling, tmp_path, capsys):
    """transformers ends it there too, in this order of the files."""
    config = json.loads((spelling / "config.json").read_text())
    (spelling / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))
    run_convert(spelling, tmp_path / "run")
    capsys.readouterr()
    flags = [f"--workdir={tmp_path / 'run'}", "--prompt=0", "--length=9", "--temperature=3"]
    code, out, _ = run_verb("generate", *flags, capsys=capsys)
    assert code == 0
    number = next(number for number in range(3, len(out)) if out[number] not in out[:number])
    end = ord(out[number]) - 40
    expected = out[:number] + "\n"
    for name, content, ends in (
        ("huggingface.json", {"eos_token_id": end}, True),
        ("generation_config.json", {"eos_token_id": [60, True, "2", -1, None]}, False),
        ("generation_config.json", {"eos_token_id": [60, end]}, True),
        ("generation_config.json", [], True),  # as the other file says
        ("huggingface.json", {"text_config": {"eos_token_id": [60]}}, False),
    ):
        (tmp_path / "run" / name).write_text(json.dumps(content))
        _, found, _ = run_verb("generate", *flags, capsys=capsys)
        assert found == (expected if ends else out), content


def test_ids_of_another_tokenizer_end_no_text(spelling, tmp_path):
    run_convert(spelling, tmp_path / "start")
    (tmp_path / "start" / "generation_config.json").write_text('{"eos_token_id": [7]}')
    (tmp_path / "mine").mkdir()
    text = (spelling / "tokenizer.json").read_text().replace("<END>", "<STOP>")
    (tmp_path / "mine" / "tokenizer.json").write_text(text)
    config = {"data": {"tokenizer_path": str(tmp_path / "mine")}}
    config["checkpoint"] = {"init_from": str(tmp_path / "start")}
    for name, ends in (("mine", []), ("start", [7])):
        config["data"]["tokenizer_path"] = str(tmp_path / name)
        workdir = tmp_path / f"run of {name}"
        workdir.mkdir()
        run_tokenizer.copy_tokenizer(workdir, config, "")
        tokenizer = tokenizers.load(workdir / "tokenizer")
        folders = run_tokenizer.folders(workdir, config)
        assert generate.listed_end_tokens(folders, tokenizer) == ends
    # A folder may have its tokenizer in two formats, with the same ids.
    (tmp_path / "start" / "tokenizer.model").write_bytes(b"the same tokenizer")
    digests = tokenizers.digests_of(tmp_path / "start")
    assert len(digests) == 2
    for digest in digests:
        assert run_tokenizer.with_tokenizer(folders, digest)[-1] == tmp_path / "start"


DIGITS = "0123456789" * 4


@pytest.mark.slow
def test_a_converted_model_sees_as_many_tokens_as_it_was_made_for(imported, capsys):
    """And not as many as the rows have that it would be trained with next."""
    flags = [f"--workdir={imported}", f"--prompt={DIGITS}", "--length=8", "--temperature=0"]
    default = run_verb("generate", *flags, capsys=capsys)
    assert default == run_verb("generate", *flags, "--context=64", capsys=capsys)
    assert default[0] == 0 and default[2] == ""
    code, out, err = run_verb("generate", *flags, "--context=16", capsys=capsys)
    assert code == 0 and out != default[1]
    assert err == (
        "prompt 0: its first 24 of 40 tokens are dropped: the model sees the last 16; "
        "use a shorter prompt, or --context=40\n"
    )


@pytest.mark.slow
def test_a_run_that_began_with_a_converted_model_keeps_its_length(imported, tmp_path, capsys):
    c = load_config(str(imported / "config.json"))
    c.train.update(steps=0, global_batch=8)
    c.checkpoint.init_from, c.eval.batches = str(imported), 0
    train(c, workdir=tmp_path)
    capsys.readouterr()
    flags = [f"--workdir={tmp_path}", f"--prompt={DIGITS}", "--length=8"]
    default = run_verb("generate", *flags, capsys=capsys)
    assert default == run_verb("generate", *flags, "--context=64", capsys=capsys)
    assert default[0] == 0 and default[2] == ""


@pytest.mark.slow
def test_every_way_to_lose_the_beginning_of_a_prompt_is_reported(workdir, imported, capsys):
    flags = [f"--workdir={workdir}", "--temperature=0", "--length=2"]
    prompts = ["--prompt=ABC", f"--prompt={DIGITS}"]
    code, out, err = run_verb("generate", *flags, *prompts, capsys=capsys)
    assert (code, out.splitlines()[1]) == (0, "ABCDE")
    # More than the rows that it was trained with are no way out.
    assert err == (
        "prompt 1: its first 24 of 40 tokens are dropped: the model sees the last 16; "
        "use a shorter prompt\n"
    )
    code, _, err = run_verb("generate", *flags, "--prompt=ABC", "--length=14", capsys=capsys)
    assert code == 0 and err.count("\n") == 1
    assert err.startswith("--length=14: with the prompt it is more than the 16 tokens")
    code, _, err = run_verb("generate", *flags, "--prompt=ABC", "--length=13", capsys=capsys)
    assert (code, err) == (0, "")


def run_on_prepared_text(folder, *flags):
    """Makes a run of 0 steps on prepared text, with a tokenizer that has a bos.

    Returns flags for generate.
    """
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    vocabulary = {chr(number): number for number in range(32, 127)} | {"<s>": 0, "</s>": 1}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text("abc " * 100)
    out = [str(folder / "a.txt"), f"--output={folder / 'out'}", "--num_workers=1"]
    assert app.main("prepare", [*out, f"--tokenizer={folder / 'tokenizer.json'}", *flags]) == 0
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.vocab_size = 0, 0, 128
    c.data.update(build="meshtrain.data.tokens:build", path=str(folder / "out"))
    train(c, workdir=folder / "run")
    return [f"--workdir={folder / 'run'}", "--length=1"]


@pytest.mark.slow
def test_a_prompt_starts_with_bos_if_the_data_or_the_flag_says_so(tmp_path, encoded, capsys):
    for name, flags, default in (("with", ["--bos"], [0]), ("without", [], [])):
        run = run_on_prepared_text(tmp_path / name, *flags)
        for flag, prefix in ((None, default), ("--bos", [0]), ("--no-bos", [])):
            encoded.clear()
            code, out, _ = run_verb(
                "generate", *run, "--prompt=ab", *filter(None, [flag]), capsys=capsys
            )
            assert (code, encoded) == (0, [[*prefix, 97, 98]])
            assert out.splitlines()[-1].startswith("ab")
        assert run_verb("generate", *run, "--prompt=", "--bos", capsys=capsys)[0] == 0
        assert encoded[-1] == [0]


def test_a_prompt_file_may_have_a_byte_order_mark_and_crlf(workdir, tmp_path, encoded, capsys):
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfXYZ\r\n0 1\r\n")
    flags = [f"--workdir={workdir}", f"--prompt_file={tmp_path / 'prompts'}", "--length=1"]
    assert run_verb("generate", *flags, capsys=capsys)[0] == 0
    assert encoded == [[*b"XYZ"], [*b"0 1"]]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bos"], "--bos: tokenizer bytes has no begin-of-document token"),
        (["--prompt=\udcff"], "--prompt='\\udcff': is not valid UTF-8"),
        (["--seed=4294967296"], "--seed=4294967296: use a number below 2^32"),
        (["--length=0"], "--length=0"),
        (["--temperature=-1"], "--temperature=-1"),
        (["--top_p=0"], "--top_p=0"),
        (["--prompt="], "--prompt=''"),
        (["--stop="], "--stop=''"),
        (["--num_return_sequences=0"], "--num_return_sequences=0"),
        (["--repetition_penalty=0"], "--repetition_penalty=0"),
        (["--prompt_file=nowhere"], "--prompt_file=nowhere"),
        (["--prompt_file=LICENSE"], "line 1 is empty"),
        (["--prompt=é"], "holds token 195, but model.vocab_size=128"),
        (["--tokenizer=nowhere"], "nowhere"),
        (["--config.mesh.tensr=2"], "did you mean"),
        (["--config.mesh.pipeline=3"], "mesh.pipeline=3"),
        (["--lenght=3"], "--lenght"),
    ],
)
def test_invalid_generate_flags_are_reported_in_one_line(workdir, flags, message, capsys):
    code, out, err = run_verb("generate", f"--workdir={workdir}", *flags, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_folder_without_a_run_is_reported(tmp_path, capsys):
    for verb in ("generate", "evaluate"):
        code, _, err = run_verb(verb, f"--workdir={tmp_path}", capsys=capsys)
        assert code == 2 and "not a run" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "config",
    ["", "{}", "[]", "7", '{"mesh": []}', '{"mesh": {}, "train": {}}', '{"model": 7, "data": null}']
    + [{"data": {}}, {"data": []}, {"train": {}}, {"mesh": None}, {"model": []}, {"rules": 7}],
    ids=str,
)
def test_a_damaged_config_of_a_run_is_reported(config, workdir, tmp_path, capsys):
    if isinstance(config, dict):  # one section damaged
        config = json.dumps(json.loads((workdir / "config.json").read_text()) | config)
    (tmp_path / "config.json").write_text(config)
    for verb in ("generate", "evaluate"):
        code, out, err = run_verb(verb, f"--workdir={tmp_path}", capsys=capsys)
        assert (code, out) == (2, "") and err.strip() and "Traceback" not in err


@pytest.mark.slow
def test_positions_beyond_the_learned_table_are_rejected(tmp_path, text, capsys):
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.positions, c.model.vocab_size = 0, 0, "learned", 128
    c.data.update(build="meshtrain.data.tokens:build", path=str(text))
    train(c, workdir=tmp_path)
    flags = [f"--workdir={tmp_path}"]
    code, _, err = run_verb("generate", *flags, "--context=17", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "model.max_seq_len=16" in err
    code, _, err = run_verb("evaluate", *flags, "--config.data.seq_len=17", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "model.max_seq_len=16" in err
    flags += ["--length=20", "--config.data.seq_len=17"]
    assert run_verb("generate", *flags, capsys=capsys)[0] == 0


# ---- evaluate ----


def numbers(out):
    # Other programs, such as a supervisor, may print lines between these.
    found = {line[:13].strip(): line[14:].split() for line in out.splitlines()}
    return {name: values[0] for name, values in found.items() if values}


@pytest.fixture(scope="module")
def expected(workdir, text):
    """Returns the loss and the number of tokens of each split, computed by the reference step."""
    raw = json.loads((workdir / "config.json").read_text())
    cfg = parse(raw, num_devices=8)
    model = build_model(cfg)
    params = jax.device_get(generate.restore_params(cfg, workdir)[1])
    expected = {}
    for split, heldout in {"heldout": 0.25, "train": 0.25, "all": 0.0}.items():
        options = {**cfg.data.options, "heldout": heldout}
        section = dataclasses.replace(cfg.data, options=options)
        source = build_data(section, "train" if split == "all" else split)
        batch = source.read(np.arange(source.size))
        sums = reference_step.run_compiled(
            lambda params, b=batch: reference_step.loss(model, params, b), params
        )
        expected[split] = float(sums.loss / sums.weight), int(sums.weight)
    return expected


def test_data_of_another_tokenizer_is_reported(workdir, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc " * 100)
    flags = [f"--workdir={workdir}", "--split=all", f"--config.data.path={tmp_path / 'out'}"]
    assert app.main("prepare", [str(tmp_path / "a.txt"), f"--output={tmp_path / 'out'}"]) == 0
    flags.append("--config.data.vocab_size=256")
    shutil.copytree(workdir, tmp_path / "run")
    for content, reported in (("", False), ("{}", True)):
        if content:
            (tmp_path / "run" / "tokenizer.json").write_text(content)
        flags[0] = f"--workdir={tmp_path / 'run'}"
        _, _, err = run_verb("evaluate", *flags, capsys=capsys)
        assert ("another tokenizer" in err) == reported


@pytest.mark.parametrize("split", ["heldout", "train", "all"])
@pytest.mark.slow
def test_every_token_of_a_split_counts_once_on_every_mesh(workdir, expected, split, capsys):
    flags = [f"--workdir={workdir}", f"--split={split}"]
    layouts = [[]]
    if split == "heldout":
        layouts += [["--config.mesh.tensor=2", "--batch=12"], ["--config.mesh.context=4"]]
    for layout in layouts:
        _, out, _ = run_verb("evaluate", *flags, *layout, capsys=capsys)
        printed, (loss, weight) = numbers(out), expected[split]
        assert int(printed["tokens"].replace(",", "")) == weight
        assert float(printed["loss"]) == pytest.approx(loss, abs=2e-6)
        assert float(printed["perplexity"]) == pytest.approx(math.exp(loss), abs=2e-4)


def test_bits_per_byte_count_the_text_bytes_of_tokens(workdir, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(32, 128)) * 3)
    flags = [f"--workdir={workdir}", "--split=all", f"--config.data.path={tmp_path / 'text'}"]
    _, out, _ = run_verb("evaluate", *flags, capsys=capsys)
    printed = numbers(out)
    weight = int(printed["tokens"].replace(",", ""))
    bits = float(printed["loss"]) * weight / math.log(2)
    line = next(line for line in out.splitlines() if line.startswith("bits per byte"))
    num_bytes = int(line.split()[-2].replace(",", ""))
    assert num_bytes == weight - 1  # the end-of-document token has no bytes
    assert float(printed["bits per byte"]) == pytest.approx(bits / num_bytes, abs=1e-5)


def prefix_space(folder):
    """Writes a tokenizer.json that puts a space before each text, and returns its path."""
    file = hugging_face(folder)
    described = json.loads(file.read_text())
    described["pre_tokenizer"]["add_prefix_space"] = True
    described["added_tokens"].append({**described["added_tokens"][0], "id": 320, "content": "<s>"})
    file.write_text(json.dumps(described))
    return file


@pytest.mark.parametrize(
    "make", [prefix_space, pytest.param(sentence_piece, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_bits_per_byte_leave_out_the_space_that_a_tokenizer_adds(make, tmp_path, capsys):
    texts = [text for text in TEXTS if text[0].isalpha()]
    flags = [f"--tokenizer={make(tmp_path / 'tokenizer')}", "--bos", "--num_workers=1"]
    flags += [str(write_jsonl(tmp_path / "in", texts)), f"--output={tmp_path / 'out'}"]
    assert app.main("prepare", flags) == 0
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.vocab_size = 0, 0, 384
    c.data.update(build="meshtrain.data.tokens:build", path=str(tmp_path / "out"))
    c.data.packing, c.data.seq_len = "best_fit", 16
    train(c, workdir=tmp_path / "run")
    _, out, _ = run_verb("evaluate", f"--workdir={tmp_path / 'run'}", "--split=all", capsys=capsys)
    size = sum(len(text.encode()) for text in texts)
    assert f"over {size:,} bytes" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--batch=3"], "--batch=3"),
        (["--batch=0"], "--batch=0"),
        (["--max_batches=-1"], "--max_batches=-1"),
        (["--split=test"], "--split"),
        (["--config.data.path=nowhere"], "data.path=nowhere"),
        (["--config.data.build=meshtrain.data.synthetic:build"], "no size"),
    ],
)
def test_invalid_evaluate_flags_are_reported_in_one_line(workdir, flags, message, capsys):
    code, out, err = run_verb("evaluate", f"--workdir={workdir}", *flags, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_print_the_same_as_one(workdir, capsys):
    def launched(*arguments):
        command = [sys.executable, "-m", "meshtrain", "launch", "--nproc=2", "--simulate_devices=2"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*command, "--", *arguments],
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return [line[4:] for line in done.stdout.splitlines() if line.startswith("[0] ")]

    flags = [f"--workdir={workdir}", "--temperature=0.5", "--prompt=!", "--prompt=0", "--length=40"]
    alone = run_verb("generate", *flags, capsys=capsys)[1].splitlines()
    assert alone == [line for line in launched("generate", *flags) if line in alone]
    flags = [f"--workdir={workdir}", "--config.mesh.tensor=2", "--batch=16"]
    printed = numbers("\n".join(launched("evaluate", *flags)))
    alone = numbers(run_verb("evaluate", *flags, capsys=capsys)[1])
    for name in ("tokens", "loss", "perplexity"):
        assert printed[name] == alone[name]
