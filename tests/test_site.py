"""The site of docs/: no warning, nothing from other hosts, lists that are true."""

import importlib.util
import json
import os
import re
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


class Loads(HTMLParser):
    """Collects what the browser loads with a page."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if attrs.get("rel") not in ("prev", "next", "canonical"):
            self.found += filter(None, [attrs.get(LOADED.get(tag, ""))])


@pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None for name in ("material", "mkdocstrings", "nbconvert")
    ),
    reason="needs the extra docs: bash launch/setup.sh docs",
)
@pytest.mark.slow
def test_the_site_builds_strictly_and_loads_nothing_from_other_hosts(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", f"--site-dir={tmp_path}"]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    pages = {path.relative_to(tmp_path).as_posix(): path for path in tmp_path.rglob("*.html")}
    assert {"index.html", "start.html", "reference/api.html", "project/overview.html"} <= {*pages}
    notebook = pages["tutorials/first_model.html"].read_text()
    assert 'src="first_model_' in notebook and 'href="layouts.html"' in notebook
    foreign = re.compile(r"^(https?:)?//")
    for name, path in pages.items():
        loads = Loads()
        loads.feed(path.read_text())
        assert loads.found and not [one for one in loads.found if foreign.match(one)], name
    for path in tmp_path.rglob("*.css"):
        assert not re.search(r"(url\(|@import )['\"]?(https?:)?//", path.read_text()), path
    api = pages["reference/api.html"].read_text()
    assert "Trains a model, or resumes" in api and "from_blocks" in api
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())
    assert any("hybrid sharding" in entry["text"].lower() for entry in index["docs"])


def test_pictures_are_what_their_script_draws():
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    stored = {path.name: path.read_text() for path in (DOCS / "pictures").iterdir()}
    assert module.pictures() == stored, "run: python docs/pictures.py"
    pages = "\n".join(path.read_text() for path in DOCS.rglob("*.md"))
    assert [name for name in stored if f"pictures/{name})" not in pages] == []


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
