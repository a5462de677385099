"""The site of docs/: no warning, nothing from other hosts, lists that are true."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

import meshtrain
from tests.lib.paths import ROOT

DOCS = ROOT / "docs"
# Elements that a browser loads by itself. A link of another kind is loaded when the reader clicks
# on it.
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


# What people type, and the pages that answer it.
SEARCHES = {
    "install": "start",
    "tutorial": "tutorial",
    "notebook": "guides/notebooks",
    "jupyter": "guides/notebooks",
    "colab": "guides/notebooks",
    "bf16": "concepts/precision",
    "bfloat16": "concepts/precision",
    "mixed precision": "concepts/precision",
    "fp8": "not_here",
    "DPO": "not_here",
    "RLHF": "not_here",
    "gguf": "not_here",
    "checkpoints": "concepts/checkpoints",
    "checkpointing": "concepts/checkpoints",
    "resume": "guides/resume",
    "OOM": "concepts/speed",
    "out of memory": "concepts/speed",
    "flash attention": "concepts/speed",
    "activation checkpointing": "concepts/speed",
    "remat": "concepts/speed",
    "gradient accumulation": "concepts/sync",
    "FSDP": "concepts/zero",
    "ZeRO-3": "concepts/zero",
    "DDP": "guides/coming_from",
    "DeepSpeed": "guides/coming_from",
    "tensor parallel": "concepts/mesh",
    "TP": "concepts/mesh",
    "PP": "concepts/pipelines",
    "CP": "concepts/context",
    "EP": "concepts/experts",
    "MoE": "concepts/experts",
    "SLURM": "guides/slurm",
    "k8s": "guides/hosts",
    "kubernetes": "guides/hosts",
    "multi-node": "guides/hosts",
    "torchrun": "guides/hosts",
    "TPU": "guides/gke",
    "nccl": "faq",
    "infiniband": "faq",
    "nvidia-smi": "faq",
    "sysctl": "faq",
    "NCCL_IB_DISABLE": "faq",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "faq",
    "XLA_PYTHON_CLIENT_MEM_FRACTION": "faq",
    "s3": "guides/object_stores",
    "gcs": "guides/object_stores",
    "lora": "guides/finetune",
    "peft": "guides/finetune",
    "sft": "guides/finetune",
    "safetensors": "guides/huggingface",
    "llama": "guides/huggingface",
    "qwen": "guides/huggingface",
    "wandb": "reference/metrics",
    "mfu": "guides/profiling",
    "seed": "concepts/data",
    "determinism": "concepts/data",
    "alternatives": "when",
    "num_layers": "reference/config",
    "train.num_microbatches": "reference/config",
}


class Loads(HTMLParser):
    """Collects what the browser loads with a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("rel") not in ("prev", "next", "canonical"):
            self.found += filter(None, [attrs.get(LOADED.get(tag, ""))])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Returns the folder of the built site."""
    for name in ("material", "mkdocstrings", "nbconvert"):
        if importlib.util.find_spec(name) is None:
            pytest.skip("needs the extra docs: bash launch/setup.sh docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={folder}"]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(site):
    pages = {path.relative_to(site).as_posix(): path for path in site.rglob("*.html")}
    assert {"index.html", "start.html", "reference/api.html", "project/overview.html"} <= {*pages}
    notebook = pages["tutorials/first_model.html"].read_text()
    assert 'src="first_model_' in notebook and 'href="layouts.html"' in notebook
    foreign = re.compile(r"^(https?:)?//")
    for name, path in pages.items():
        loads = Loads()
        loads.feed(path.read_text())
        assert loads.found and not [one for one in loads.found if foreign.match(one)], name
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text()), path
    api = pages["reference/api.html"].read_text()
    assert "Trains a model, or resumes" in api and "from_blocks" in api
    index = json.loads((site / "search" / "search_index.json").read_text())
    assert any("hybrid sharding" in entry["text"].lower() for entry in index["docs"])


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("node"), reason="needs node, which runs the site's search")
def test_a_search_for_what_people_type_finds_the_page_that_answers_it(site):
    command = ["node", ROOT / "tests" / "lib" / "search_site.js", site, *SEARCHES]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = json.loads(printed)
    missed = {
        word: found[word][:3]
        for word, page in SEARCHES.items()
        if f"{page}.html" not in found[word][:3]
    }
    assert not missed


@pytest.mark.slow
def test_keys_and_flags_break_only_after_dots(site):
    page = (site / "reference" / "config.html").read_text()
    assert '<code class="key">train.<wbr>num_microbatches</code>' in page
    blocks = re.findall(r"<pre.*?</pre>", page, re.DOTALL)
    assert blocks and not [block for block in blocks if "<wbr>" in block]
    flags = (site / "reference" / "verbs.html").read_text()
    assert '<code><span class="word">--simulate_devices</span>=N</code>' in flags
    front = (site / "index.html").read_text()
    assert '<span class="word">--workdir</span><span class="o">=</span>' in front
    style = (site / "site.css").read_text()
    assert ".md-typeset code { word-break: normal; overflow-wrap: break-word; }" in style


@pytest.mark.slow
def test_the_navigation_has_three_levels_and_every_page(site):
    page = (site / "index.html").read_text()
    tabs = re.findall(r'class="md-tabs__link">\s*(.+?)\s*</a>', page, re.DOTALL)
    assert tabs == ["Home", "Start", "Deeper", "Reference", "Project", "All pages"]
    linked = {*re.findall(r'<a href="([\w/]+\.html)" class="md-nav__link', page)}
    pages = {path.relative_to(site).as_posix() for path in site.rglob("*.html")}
    assert pages - linked <= {"index.html", "404.html"}


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert module.pictures() == stored, "run: python docs/pictures.py"
    pages = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert [name for name in stored if f"pictures/{name})" not in pages] == []
    assert [
        name for name in stored if "@media (prefers-color-scheme:dark)" not in stored[name]
    ] == []


def test_the_page_of_the_api_has_every_public_name():
    text = (DOCS / "reference" / "api.md").read_text()
    for name in meshtrain.__all__:
        path = f"meshtrain.{meshtrain._MODULES[name]}.{name}"
        assert f"::: {path}\n    options: {{heading: meshtrain.{name}}}\n" in text, name


def test_each_fault_of_the_page_on_reliability_names_tests_that_exist():
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", (DOCS / "reliability.md").read_text(), re.M)
    assert [int(number) for number, _ in rows] == [*range(1, 54)]
    files = {path.name: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    for number, cell in rows:
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", cell)
        assert named and len(named) == cell.count("`") / 2, f"fault {number}: {cell}"
        for file, test in named:
            assert re.search(rf"^def {test}\(", files[file], re.M), f"fault {number}: {test}"
