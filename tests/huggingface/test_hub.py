"""Models and tokenizers named as on the Hugging Face hub, from a hub on loopback.

The command that a message names is run as it is printed.
"""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from meshtrain.checkpoint import run_tokenizer
from meshtrain.data import hub, tokenizer
from meshtrain.errors import ConfigError
from meshtrain.huggingface import files
from tests.lib import fake_hub, hf
from tests.lib.paths import ROOT
from tests.lib.prepare import hugging_face

huggingface_hub = pytest.importorskip(
    "huggingface_hub", reason="needs the extra hub: bash launch/setup.sh dev"
)
BIN = Path(sys.executable).parent
COMMAND = re.escape(hub.command("org/none", hub.MODEL))
READ = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A hub with models that can be read, and others."""
    root = tmp_path_factory.mktemp("hub")
    tiny = shutil.copytree(hf.GOLDEN / "qwen3", root / "tiny")
    (root / "text").mkdir()
    shutil.copy(hugging_face(root / "text"), tiny)
    (tiny / "tokenizer_config.json").write_text("{}")
    # What nobody reads: other formats, and the same model in subfolders.
    for name in ("pytorch_model.bin", "consolidated.safetensors", "README.md"):
        (tiny / name).write_text("not read")
    (tiny / "onnx").mkdir()
    (tiny / "onnx" / "config.json").write_text("{}")
    unsupported = shutil.copytree(tiny, root / "unsupported")
    config = json.loads((tiny / "config.json").read_text()) | {"architectures": ["OtherForLM"]}
    (unsupported / "config.json").write_text(json.dumps(config | {"model_type": "other"}))
    without = shutil.copytree(tiny, root / "without", ignore=shutil.ignore_patterns("*.safet*"))
    (root / "empty").mkdir()
    with fake_hub.serving() as one:
        one.models = {
            "org/tiny": tiny,
            "org/gated": tiny,
            "org/unsupported": unsupported,
            "org/without": without,
            "org/empty": root / "empty",
        }
        one.gated = {"org/gated"}
        yield one


@pytest.fixture
def meshtrain(server, tmp_path):
    """Runs a verb in a process of its own, which reads the variables of the hub."""
    server.downloads.clear()

    def run(*arguments, **environ):
        return subprocess.run(
            [sys.executable, "-m", "meshtrain", *map(str, arguments)],
            cwd=ROOT,
            env=server.environ(tmp_path / "cache") | {"JAX_PLATFORMS": "cpu"} | environ,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def fault_of(done):
    """Returns the last line of a command that must fail with exit code 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr.splitlines()[-1]


def run_advice(message, server, folder):
    """Runs the command that a message names, in a folder."""
    if not (BIN / "hf").exists():
        pytest.skip("no command hf; bash launch/setup.sh dev")
    command = re.search(r"run: (hf download .*?);", message)[1]
    environ = server.environ(folder / "cache")
    environ["PATH"] = f"{BIN}:{environ['PATH']}"
    subprocess.run(["bash", "-c", command], cwd=folder, env=environ, check=True, timeout=120)


# ---- names ----


@pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B"])
def test_names_of_models(name):
    assert hub.is_name(name)


@pytest.mark.parametrize(
    "path",
    ["", ".", "../gpt2", "/gpt2", "a/b/c", "tokenizer.json", "a/b.model", "a b", "-x", "a--b"],
)
def test_paths_are_not_names(path):
    assert not hub.is_name(path)


def test_all_files_that_are_read_are_downloaded():
    shard = "model-00001-of-00002.safetensors"
    of_model = {"config.json", files.SINGLE_FILE, files.INDEX, shard, *run_tokenizer.FILES}
    of_tokenizer = {*tokenizer.FILES, "tokenizer_config.json", "chat_template.jinja"}
    of_tokenizer |= {"special_tokens_map.json"}  # in place of tokenizer_config.json
    for patterns, names in ((hub.MODEL, of_model), (hub.TOKENIZER, of_tokenizer)):
        for name in names:
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns), name
    assert not any(fnmatch.fnmatch("consolidated.safetensors", one) for one in hub.MODEL)


# ---- convert ----


def test_the_command_for_a_model_downloads_what_convert_reads(server, tmp_path):
    with pytest.raises(
        ConfigError, match=r"exit code 2: org/tiny: no such folder; if it is"
    ) as info:
        hf.run("org/tiny", tmp_path / "run")
    assert str(info.value).rstrip().endswith("; then convert models/tiny")
    run_advice(str(info.value), server, tmp_path)
    downloaded = tmp_path / "models" / "tiny"
    assert sorted(path.name for path in downloaded.glob("[!.]*")) == READ
    hf.run(downloaded, tmp_path / "run")
    assert tokenizer.digest_of(tmp_path / "run") == tokenizer.digest_of(downloaded)


@pytest.mark.parametrize("path", ["./nothere", "/nothere", "../nothere"])
def test_a_path_gets_no_advice_on_the_hub(path, tmp_path):
    with pytest.raises(ConfigError, match=r"^exit code 2: \S*/nothere: no such folder\n$"):
        hf.run(path, tmp_path / "run")


def test_without_huggingface_hub_the_advice_names_the_extra(tmp_path, monkeypatch):
    def advice():
        with pytest.raises(ConfigError) as info:
            hf.run("org/tiny", tmp_path / "run")
        return str(info.value)

    assert "use --download, or run: hf" in advice()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # its import is an error
    assert "use --download (needs the extra hub), or run: hf" in advice()


@pytest.mark.slow
def test_convert_downloads_once_and_then_needs_no_network(server, meshtrain, tmp_path):
    done = meshtrain("convert", "org/tiny", tmp_path / "run", "--download")
    assert done.returncode == 0, done.stderr
    assert "step 0, a Qwen3ForCausalLM" in done.stdout
    assert sorted(server.downloads) == READ
    again = meshtrain("convert", "org/tiny", tmp_path / "2", "--download", HF_HUB_OFFLINE="1")
    assert again.returncode == 0, again.stderr
    assert len(server.downloads) == len(READ)


@pytest.mark.slow
def test_an_unsupported_model_is_rejected_before_its_weights_are_downloaded(
    server, meshtrain, tmp_path
):
    done = meshtrain("convert", "org/unsupported", tmp_path / "run", "--download")
    assert "OtherForLM" in fault_of(done) and server.downloads == ["config.json"]


@pytest.mark.parametrize(
    ("name", "environ", "fault"),
    [
        ("org/none", {}, "org/none: http.* has no public model of this name; correct it"),
        ("org/gated", {}, "org/gated: is gated; accept its terms at http.*/org/gated, then set HF"),
        (
            "org/none",
            {"HF_HUB_OFFLINE": "1"},
            f"HF_HUB_OFFLINE is set, and the cache lacks .*{COMMAND}$",
        ),
        (
            "org/none",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            f"http://127.0.0.1:9 cannot be reached: ConnectError.*: {COMMAND}$",
        ),
        pytest.param(
            "org/without",
            {},
            "org/without: has no model.*safetensors on the hub",
            marks=pytest.mark.slow,
        ),
        ("org/empty", {}, "org/empty: has no config.json"),
        ("configs", {}, "--download: configs exists here; leave --download out"),
        ("./org/tiny", {}, "--download: /.*/org/tiny is no name on the Hugging Face hub; use one"),
        ("/org/tiny", {}, "--download: /org/tiny is no name on the Hugging Face hub; use one such"),
        ("org/tiny", {"target": "."}, "exists already; use another TARGET"),
        (
            "org/tiny",
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
            "--download: each process would download org/tiny; run once: hf download .*; then",
        ),
    ],
)
def test_what_cannot_be_downloaded_is_one_line(name, environ, fault, server, meshtrain, tmp_path):
    target = tmp_path / environ.pop("target", "run")
    line = fault_of(meshtrain("convert", name, target, "--download", **environ))
    assert re.search(fault, line), line
    assert "model.safetensors" not in server.downloads


@pytest.mark.slow
def test_a_token_opens_a_gated_model(meshtrain, tmp_path):
    done = meshtrain(
        "convert", "org/gated", tmp_path / "run", "--download", HF_TOKEN=fake_hub.TOKEN
    )
    assert done.returncode == 0, done.stderr


def test_a_hub_that_fails_is_reported_with_its_answer(server, meshtrain, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "broken", True)
    line = fault_of(meshtrain("convert", "org/tiny", tmp_path / "run", "--download"))
    assert "cannot be reached: HfHubHTTPError: Server error '500" in line
    assert line.endswith(f": {hub.command('org/tiny', hub.MODEL)}")


def test_an_older_huggingface_hub_is_one_line(monkeypatch, tmp_path):
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    oldest = ".".join(map(str, hub.OLDEST))
    assert f"huggingface-hub>={oldest}" in extras["hub"]
    monkeypatch.setattr(huggingface_hub, "__version__", "0.36.0")
    line = f"huggingface_hub 0.36.0 is too old: --download needs {oldest} or newer; .*setup.sh hub;"
    with pytest.raises(ConfigError, match=line):
        hf.run("org/tiny", tmp_path / "run", "--download")
    # Versions are compared as numbers.
    monkeypatch.setattr(huggingface_hub, "__version__", "10.0.0rc1")
    assert hub._huggingface_hub() is huggingface_hub


# ---- tokenizers ----


def test_the_command_for_a_tokenizer_downloads_its_files_only(server, tmp_path):
    with pytest.raises(
        ConfigError, match=r"tokenizer org/tiny: no such file or folder; use b"
    ) as info:
        tokenizer.load("org/tiny")
    run_advice(str(info.value), server, tmp_path)
    downloaded = tmp_path / "models" / "tiny"
    assert sorted(path.name for path in downloaded.glob("[!.]*")) == READ[2:]
    assert tokenizer.load(downloaded).kind == "huggingface"


def test_prepare_downloads_a_tokenizer(server, meshtrain, tmp_path):
    (tmp_path / "text.txt").write_text("some text")
    prepare = ("prepare", tmp_path / "text.txt", f"--output={tmp_path / 'data'}", "--download")
    assert "name the tokenizer too" in fault_of(meshtrain(*prepare))
    assert "--tokenizer=configs exists here" in fault_of(meshtrain(*prepare, "--tokenizer=configs"))
    done = meshtrain(*prepare, "--tokenizer=org/tiny")
    assert done.returncode == 0, done.stderr
    assert sorted(server.downloads) == READ[2:]
    assert tokenizer.load(tmp_path / "data").kind == "huggingface"
