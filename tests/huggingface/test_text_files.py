"""Exports say what begins and ends a text, and transformers reads the tokens of a run from them."""

import json
import shutil

import numpy as np
import pytest

from meshtrain.cli import app
from meshtrain.data import tokenizer as tokenizers
from meshtrain.huggingface import text_files
from meshtrain.train import train
from tests.lib.configs import tiny_config
from tests.lib.hf import GOLDEN, run
from tests.lib.paths import ROOT
from tests.lib.prepare import TEXTS, hugging_face, sentence_piece, write_jsonl

CHAT = ROOT / "tests" / "data" / "chat"


def read(folder):
    """Returns the JSON files of an export by name; None for one that is missing."""
    names = ("config", "generation_config", "tokenizer_config")
    files = {name: folder / f"{name}.json" for name in names}
    return {
        name: json.loads(file.read_text()) if file.is_file() else None
        for name, file in files.items()
    }


def train_tiny(folder, *, init_from="", build="meshtrain.data.tokens:build", steps=0, **data):
    """Makes a run on this data, by default of 0 steps."""
    c = tiny_config()
    c.train.steps, c.eval.batches, c.model.vocab_size = steps, 0, 384
    c.optim.learning_rate = 1e-2
    c.checkpoint.init_from = str(init_from)
    c.data.update(build=build, **data)
    train(c, workdir=folder)
    return folder


def prepare(folder, file, *flags):
    """Returns a prepared folder with the tokenizer in `file`."""
    flags = [str(write_jsonl(folder / "in")), f"--output={folder / 'out'}", *flags]
    assert app.main("prepare", [*flags, f"--tokenizer={file}", "--num_workers=1"]) == 0
    return folder / "out"


@pytest.mark.slow
def test_an_export_of_a_run_from_scratch_says_what_ends_a_text(tmp_path):
    file = hugging_face(tmp_path / "t")
    described = json.loads(file.read_text())
    described["pre_tokenizer"]["add_prefix_space"] = True
    for number, content in ((320, "<s>"), (321, "<END>")):
        token = {**described["added_tokens"][0], "id": number, "content": content}
        described["added_tokens"].append(token)
    file.write_text(json.dumps(described))
    data = prepare(tmp_path, file, "--bos", "--eos=<END>")
    run(train_tiny(tmp_path / "run", path=str(data)), tmp_path / "hf")
    assert read(tmp_path / "hf") == {
        "config": read(tmp_path / "hf")["config"] | {"eos_token_id": 321, "bos_token_id": 320},
        "generation_config": {"eos_token_id": 321, "bos_token_id": 320},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": True,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "bos_token": "<s>",
            "eos_token": "<END>",
        },
    }
    # What is imported again has the same ends and begins.
    run(tmp_path / "hf", tmp_path / "again")
    loaded = tokenizers.load(tmp_path / "again")
    assert (loaded.eos, loaded.bos, loaded.adds_bos) == (321, 320, True)
    run(tmp_path / "again", tmp_path / "same")
    assert read(tmp_path / "same") == read(tmp_path / "hf")


def test_an_export_with_a_sentencepiece_model_names_its_class(tmp_path):
    data = prepare(tmp_path, sentence_piece(tmp_path / "t"))
    run(train_tiny(tmp_path / "run", path=str(data)), tmp_path / "hf")
    found = read(tmp_path / "hf")
    assert found["config"]["eos_token_id"] == found["generation_config"]["eos_token_id"] == 2
    assert found["config"]["bos_token_id"] is None
    assert found["tokenizer_config"]["tokenizer_class"] == "LlamaTokenizer"
    assert found["tokenizer_config"]["add_bos_token"] is False
    assert found["tokenizer_config"]["eos_token"] == "</s>"


@pytest.mark.parametrize(("separator", "eos"), [(7, 7), (-1, None)])
def test_tokens_without_a_tokenizer_end_with_the_separator(separator, eos, tmp_path):
    (np.arange(4000) % 300).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    data = {"path": str(tmp_path / "tokens.bin"), "dtype": "uint16", "separator": separator}
    run(train_tiny(tmp_path / "run", **data), tmp_path / "hf")
    found = read(tmp_path / "hf")
    assert found["config"]["eos_token_id"] == eos
    assert found["generation_config"] == (None if eos is None else {"eos_token_id": eos})
    assert found["tokenizer_config"] is None


REPLY = "all is well"
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def chat_tokenizer(folder, template=CHATML):
    """Writes a tokenizer with a chat template whose replies end with <|im_end|>."""
    folder.mkdir()
    shutil.copy(CHAT / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def ids_of(folder, *texts):
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    return [vocabulary[text] for text in texts]


def tune(folder, tokenizer, **options):
    """Makes a run that learns one reply to everything."""
    lines = [json.dumps({"prompt": f"count {n}", "completion": REPLY}) for n in range(99)]
    (folder / "chat.jsonl").write_text("\n".join(lines))
    return train_tiny(
        folder / "tuned",
        build="meshtrain.data.chat:build",
        path=str(folder / "chat.jsonl"),
        tokenizer_path=str(tokenizer),
        packing="best_fit",
        seq_len=64,
        heldout=0.1,
        **options,
    )


@pytest.mark.slow
def test_after_chat_tuning_the_end_of_a_turn_is_one_of_the_ends(tmp_path):
    pytest.importorskip("jinja2")
    # A base whose texts end with </s>, from scratch, exported and imported again.
    base = chat_tokenizer(tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    data = prepare(tmp_path, base)
    run(train_tiny(tmp_path / "scratch", path=str(data)), tmp_path / "hf")
    assert read(tmp_path / "hf")["config"]["eos_token_id"] == ids_of(base, "</s>")[0]
    run(tmp_path / "hf", tmp_path / "start")

    chatml = chat_tokenizer(tmp_path / "chatml")
    run(tune(tmp_path, chatml, init_from=tmp_path / "start", steps=1), tmp_path / "chat")
    ends = ids_of(base, "</s>", "<|im_end|>")
    found = read(tmp_path / "chat")
    assert found["config"]["eos_token_id"] == found["generation_config"]["eos_token_id"] == ends
    config = found["tokenizer_config"]
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert config["eos_token"] == "</s>" and config["chat_template"] == CHATML


def test_what_an_imported_model_says_is_not_changed(tmp_path):
    source = shutil.copytree(GOLDEN / "llama3", tmp_path / "source")
    shutil.copy(CHAT / "tokenizer.json", source)
    written = {
        "generation_config.json": {"eos_token_id": [2, 7], "temperature": 0.6},
        "tokenizer_config.json": {"eos_token": "<|im_end|>", "model_max_length": 64},
    }
    for name, content in written.items():
        (source / name).write_text(json.dumps(content))
    run(source, tmp_path / "run")
    run(tmp_path / "run", tmp_path / "back")
    for name in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert read(tmp_path / "back")["config"]["eos_token_id"] == 2


@pytest.mark.parametrize("name", ["TokenizersBackend", None, "Qwen2Tokenizer"])
def test_the_class_of_a_tokenizer_is_one_that_all_versions_know(name, tmp_path):
    folder = chat_tokenizer(tmp_path / "t")
    config = {"tokenizer_class": name, "model_max_length": 7, "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    used = tokenizers.load(folder)
    text_files._write_tokenizer_config(folder, used, is_imported=True)
    assert read(folder)["tokenizer_config"] == config
    text_files._write_tokenizer_config(folder, used, is_imported=False)
    written = read(folder)["tokenizer_config"]
    if name == "Qwen2Tokenizer":
        assert written == config
    else:
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert written["chat_template"] == CHATML
        assert written["model_max_length"] == 7 and written["eos_token"] == "<|im_end|>"


def test_a_tokenizer_that_cannot_be_read_is_reported(tmp_path, capsys):
    data = prepare(tmp_path, chat_tokenizer(tmp_path / "t"))
    workdir = train_tiny(tmp_path / "run", path=str(data))
    (workdir / "tokenizer" / "tokenizer_config.json").write_text("{")
    capsys.readouterr()
    assert app.main("convert", [str(workdir), str(tmp_path / "hf")]) == 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "the export may not say what ends a text" in error


# ---- with transformers installed ----


@pytest.mark.slow
def test_transformers_ends_a_reply_where_meshtrain_does(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    workdir = tune(tmp_path, chat_tokenizer(tmp_path / "chatml"), steps=60)
    run(workdir, tmp_path / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    messages = [{"role": "user", "content": "count 5"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        (ids,) = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    new = ids[inputs["input_ids"].shape[1] :].tolist()
    assert new[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    capsys.readouterr()
    flags = [f"--workdir={workdir}", "--chat", "--prompt=count 5", "--temperature=0"]
    assert app.main("generate", [*flags, "--length=40"]) == 0
    reply = capsys.readouterr().out.strip()
    assert tokenizer.decode(new, skip_special_tokens=True).strip() == reply == REPLY


@pytest.mark.parametrize("kind", ["tokenizer.json", "prefix", "sentencepiece"])
def test_transformers_reads_the_tokens_that_a_run_was_trained_with(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if kind == "sentencepiece":
        file = sentence_piece(tmp_path / "t")
    else:
        file = hugging_face(tmp_path / "t")
    if kind == "prefix":
        described = json.loads(file.read_text())
        described["pre_tokenizer"]["add_prefix_space"] = True
        file.write_text(json.dumps(described))
    data = prepare(tmp_path, file)
    run(train_tiny(tmp_path / "run", path=str(data)), tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = tokenizers.load(data)
    assert theirs.eos_token_id == ours.eos
    for text in (*TEXTS, "it 's , ok ."):
        ids = ours.encode(text).tolist()
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids) == text or kind == "prefix"
