"""`meshtrain generate` and `meshtrain evaluate`, on a run that learned to count."""

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import types

import jax
import numpy as np
import pytest
from conftest import ROOT, tiny_config

from meshtrain import cli
from meshtrain.config.build import build_data, build_model
from meshtrain.config.parse import parse
from meshtrain.inference import evaluate, generate
from meshtrain.inference import restore as trained
from meshtrain.train import train
from meshtrain.verify import reference_step as reference


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Bytes 32, 33, 34, ... 126, over and over, at another place in each window."""
    file = tmp_path_factory.mktemp("text") / "count.bin"
    (np.arange(95 * 40) % 95 + 32).astype(np.uint8).tofile(file)
    return file


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, text):
    """A run that learned to count."""
    folder = tmp_path_factory.mktemp("count")
    c = tiny_config()
    c.train.steps, c.optim.learning_rate, c.eval.batches = 150, 1e-2, 0
    c.model.vocab_size = 128
    c.data.build = "meshtrain.data.tokens:build"
    c.data.update(path=str(text), heldout=0.25)
    train(c, workdir=folder)
    return folder


def ran(verb, *arguments, capsys):
    code = cli.main(verb, [*map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def test_a_text_goes_on_past_the_context(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=0", "--prompt=ABC", "--length=40"]
    code, out, _ = ran("generate", *options, capsys=capsys)
    assert (code, out) == (0, "".join(map(chr, range(65, 65 + 43))) + "\n")


def test_several_prompts_on_a_mesh_are_those_on_one_device(workdir, tmp_path, capsys):
    (tmp_path / "prompts").write_text("XYZ\n0\n")
    options = [f"--workdir={workdir}", "--temperature=0.5", "--prompt=!", "--length=5"]
    options += [f"--prompt_file={tmp_path / 'prompts'}"]
    sharded = ran("generate", *options, capsys=capsys)
    wide = ran(
        "generate", *options, "--config.mesh.tensor=2", "--config.mesh.data=4", capsys=capsys
    )
    assert sharded == wide
    assert sharded[1].splitlines() == ["--- 0", '!"#$%&', "--- 1", "XYZ[\\]^_", "--- 2", "012345"]


def test_a_stop_token_ends_the_text_and_is_not_shown(workdir, capsys):
    options = [f"--workdir={workdir}", "--temperature=0", "--prompt=A", "--length=20"]
    assert ran("generate", *options, "--stop=F", capsys=capsys)[1] == "ABCDE\n"
    assert ran("generate", *options, "--stop=70", capsys=capsys)[1] == "ABCDE\n"


def test_a_character_of_several_bytes_is_printed_when_it_is_whole():
    words = generate.tokenizer.load("bytes")
    spoken = [*"né €".encode(), 0x82, None, 65]
    told = list(generate.pieces(words, [65], spoken))
    assert told == ["n", "é", " ", "€", "\ufffd"]


def test_a_space_that_its_vocabulary_shows_only_within_a_text_is_printed():
    def decode(ids):  # as SentencePiece does
        return "".join([" a", " b", "c"][one] for one in ids).removeprefix(" ")

    words = types.SimpleNamespace(decode=decode)
    assert list(generate.pieces(words, [0], [1, 2, 0])) == [" b", "c", " a", ""]
    long = [0, 1] * generate.BEFORE
    assert "".join(generate.pieces(words, long, [1, *long])) == " b" + decode(long).join([" ", ""])


@pytest.fixture
def encoded(monkeypatch):
    """Lists the prompts that are gone on from, as ids."""
    found = []
    generated = generate.sampling.generate

    def listen(program, params, prompts, **options):
        found.extend(prompts)
        return generated(program, params, prompts, **options)

    monkeypatch.setattr(generate.sampling, "generate", listen)
    return found


def learned_from(folder, *flags):
    """A run of no steps on prepared text, of a tokenizer that has a token to begin documents with."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra `tokenizers`")
    vocabulary = {chr(number): number for number in range(32, 127)} | {"<s>": 0, "</s>": 1}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    words.decoder = tokenizers.decoders.Fuse()
    words.add_special_tokens(["<s>", "</s>"])
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text("abc " * 100)
    out = [str(folder / "a.txt"), f"--output={folder / 'out'}", "--num_workers=1"]
    assert cli.main("prepare", [*out, f"--tokenizer={folder / 'tokenizer.json'}", *flags]) == 0
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.vocab_size = 0, 0, 128
    c.data.update(build="meshtrain.data.tokens:build", path=str(folder / "out"))
    train(c, workdir=folder / "run")
    return [f"--workdir={folder / 'run'}", "--length=1"]


def test_a_prompt_begins_as_the_documents_of_the_run_do_or_as_a_flag_says(
    tmp_path, encoded, capsys
):
    for name, flags, default in (("with", ["--bos"], [0]), ("without", [], [])):
        run = learned_from(tmp_path / name, *flags)
        for flag, first in ((None, default), ("--bos", [0]), ("--no-bos", [])):
            encoded.clear()
            code, out, _ = ran(
                "generate", *run, "--prompt=ab", *filter(None, [flag]), capsys=capsys
            )
            assert (code, encoded) == (0, [[*first, 97, 98]]) and out.splitlines()[-1].startswith(
                "ab"
            )
        assert ran("generate", *run, "--prompt=", "--bos", capsys=capsys)[0] == 0
        assert encoded[-1] == [0]


def test_prompts_of_a_file_from_windows_are_its_lines(workdir, tmp_path, encoded, capsys):
    (tmp_path / "prompts").write_bytes(b"\xef\xbb\xbfXYZ\r\n0 1\r\n")
    flags = [f"--workdir={workdir}", f"--prompt_file={tmp_path / 'prompts'}", "--length=1"]
    assert ran("generate", *flags, capsys=capsys)[0] == 0
    assert encoded == [[*b"XYZ"], [*b"0 1"]]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--bos"], "--bos: tokenizer bytes has no token"),
        (["--prompt=\udcff"], "--prompt='\\udcff': is no valid UTF-8"),
        (["--seed=4294967296"], "--seed=4294967296: use a number below 2^32"),
        (["--length=0"], "--length=0"),
        (["--temperature=-1"], "--temperature=-1"),
        (["--top_p=0"], "--top_p=0"),
        (["--prompt="], "--prompt=''"),
        (["--stop=AB"], "--stop='AB'"),
        (["--prompt_file=nowhere"], "--prompt_file=nowhere"),
        (["--prompt_file=LICENSE"], "line 1 is empty"),
        (["--prompt=é"], "holds token 195, and model.vocab_size=128"),
        (["--stop=<|endoftext|>"], "--stop='<|endoftext|>'"),
        (["--tokenizer=nowhere"], "nowhere"),
        (["--config.mesh.tensr=2"], "did you mean"),
        (["--config.mesh.pipeline=2"], "mesh.pipeline=2"),
        (["--lenght=3"], "--lenght"),
    ],
)
def test_what_cannot_be_generated_is_told_in_a_line(workdir, flags, told, capsys):
    code, out, err = ran("generate", f"--workdir={workdir}", *flags, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


def test_a_folder_without_a_run_is_told(tmp_path, capsys):
    for verb in (generate, evaluate):
        code, _, err = ran(verb, f"--workdir={tmp_path}", capsys=capsys)
        assert code == 2 and "no run there" in err and err.count("\n") == 1


def test_positions_that_no_row_of_a_table_has_are_refused(tmp_path, text, capsys):
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.positions, c.model.vocab_size = 0, 0, "learned", 128
    c.data.update(build="meshtrain.data.tokens:build", path=str(text))
    train(c, workdir=tmp_path)
    flags = [f"--workdir={tmp_path}"]
    code, _, err = ran("generate", *flags, "--context=17", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "model.max_seq_len=16" in err
    code, _, err = ran("evaluate", *flags, "--config.data.seq_len=17", capsys=capsys)
    assert (code, err.count("\n")) == (2, 1) and "model.max_seq_len=16" in err
    assert ran("generate", *flags, "--length=20", "--config.data.seq_len=17", capsys=capsys)[0] == 0


# ---- evaluate ----


def numbers(out):
    return {line[:13].strip(): line[14:].split()[0] for line in out.splitlines()}


@pytest.fixture(scope="module")
def due(workdir, text):
    """Loss, tokens and bytes by plain maths, of all windows of the split."""
    raw = json.loads((workdir / "config.json").read_text())
    cfg = parse(raw, num_devices=8)
    model = build_model(cfg)
    params = jax.device_get(trained.restore(cfg, workdir)[1])
    found = {}
    for split, heldout in {"heldout": 0.25, "train": 0.25, "all": 0.0}.items():
        options = {**cfg.data.options, "heldout": heldout}
        section = dataclasses.replace(cfg.data, options=options)
        source = build_data(section, "train" if split == "all" else split)
        batch = source.read(np.arange(source.size))
        sums = reference.run(lambda params, b=batch: reference.loss(model, params, b), params)
        found[split] = float(sums.loss / sums.weight), int(sums.weight)
    return found


def test_data_of_another_tokenizer_is_told(workdir, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("abc " * 100)
    flags = [f"--workdir={workdir}", "--split=all", f"--config.data.path={tmp_path / 'out'}"]
    assert cli.main("prepare", [str(tmp_path / "a.txt"), f"--output={tmp_path / 'out'}"]) == 0
    flags.append("--config.data.vocab_size=256")
    shutil.copytree(workdir, tmp_path / "run")
    for content, told in (("", False), ("{}", True)):
        if content:
            (tmp_path / "run" / "tokenizer.json").write_text(content)
        flags[0] = f"--workdir={tmp_path / 'run'}"
        _, _, err = ran("evaluate", *flags, capsys=capsys)
        assert ("another tokenizer" in err) == told


def test_data_of_another_tokenizer_than_that_of_a_mixture_is_told(workdir, tmp_path, capsys):
    folders = [tmp_path / name for name in ("learned from", "measured on")]
    (tmp_path / "a.txt").write_text("abc " * 100)
    for folder in folders:
        out = [str(tmp_path / "a.txt"), f"--output={folder}", "--num_workers=1"]
        assert cli.main("prepare", out) == 0
    shutil.copytree(workdir, tmp_path / "run")
    raw = json.loads((workdir / "config.json").read_text())
    raw["data"] |= dict(path="", mixture=[[str(folders[0]), 1.0]])
    (tmp_path / "run" / "config.json").write_text(json.dumps(raw))
    flags = [f"--workdir={tmp_path / 'run'}", "--split=all", "--config.data.mixture=()"]
    flags += [f"--config.data.path={folders[1]}", "--config.data.vocab_size=256"]
    for digest, told in (("bytes", False), ("of another", True)):
        text = (folders[0] / "manifest.json").read_text().replace('"bytes"', f'"{digest}"')
        (folders[0] / "manifest.json").write_text(text)
        code, _, err = ran("evaluate", *flags, capsys=capsys)
        assert code == 0 and ("another tokenizer" in err) == told


@pytest.mark.parametrize("split", ["heldout", "train", "all"])
def test_every_token_of_a_split_counts_once_on_any_mesh(workdir, due, split, capsys):
    flags = [f"--workdir={workdir}", f"--split={split}"]
    layouts = [[]] if split != "heldout" else [[], ["--config.mesh.tensor=2", "--batch=12"]]
    for layout in layouts:
        _, out, _ = ran("evaluate", *flags, *layout, capsys=capsys)
        told, (loss, weight) = numbers(out), due[split]
        assert int(told["tokens"].replace(",", "")) == weight
        assert float(told["loss"]) == pytest.approx(loss, abs=2e-6)
        assert float(told["perplexity"]) == pytest.approx(math.exp(loss), abs=2e-4)


def test_bits_per_byte_count_the_bytes_that_tokens_stand_for(workdir, tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(bytes(range(32, 128)) * 3)
    flags = [f"--workdir={workdir}", "--split=all", f"--config.data.path={tmp_path / 'text'}"]
    _, out, _ = ran("evaluate", *flags, capsys=capsys)
    told = numbers(out)
    weight = int(told["tokens"].replace(",", ""))
    expected = float(told["loss"]) * weight / math.log(2)
    line = next(line for line in out.splitlines() if line.startswith("bits per byte"))
    num_bytes = int(line.split()[-2].replace(",", ""))
    assert num_bytes == weight - 1  # the byte that ends the file is none of the text
    assert float(told["bits per byte"]) == pytest.approx(expected / num_bytes, abs=1e-5)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--batch=3"], "--batch=3"),
        (["--batch=0"], "--batch=0"),
        (["--max_batches=-1"], "--max_batches=-1"),
        (["--split=test"], "--split"),
        (["--config.data.path=nowhere"], "data.path=nowhere"),
        (["--config.data.build=meshtrain.data.synthetic:build"], "no size"),
    ],
)
def test_what_cannot_be_evaluated_is_told_in_a_line(workdir, flags, told, capsys):
    code, out, err = ran("evaluate", f"--workdir={workdir}", *flags, capsys=capsys)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert told in err


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_say_what_one_does(workdir, capsys):
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
    alone = ran("generate", *flags, capsys=capsys)[1].splitlines()
    assert alone == [line for line in launched("generate", *flags) if line in alone]
    flags = [f"--workdir={workdir}", "--config.mesh.tensor=2", "--batch=16"]
    told = numbers("\n".join(launched("evaluate", *flags)))
    alone = numbers(ran("evaluate", *flags, capsys=capsys)[1])
    for name in ("tokens", "loss", "perplexity"):
        assert told[name] == alone[name]
