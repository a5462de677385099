"""The notebooks of docs/tutorials: they run, and the outputs in them are those of a run."""

import importlib.util
import json
import re
import shutil

import nbformat
import pytest

from tests.lib import smollm2
from tests.lib.paths import ROOT

FOLDER = ROOT / "docs" / "tutorials"
NAMES = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def load_execute():
    """Returns docs/tutorials/execute.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("execute", FOLDER / "execute.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def outputs_of(notebook):
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [output for cell in cells for output in cell.outputs]


def printed(notebook):
    """Returns the text of all outputs."""
    texts = []
    for output in outputs_of(notebook):
        data = output.get("data", {})
        texts.append(output.get("text", "") + "".join(data.get("text/plain", "")))
    return "\n".join(texts)


def pictures(notebook):
    return [output for output in outputs_of(notebook) if "image/png" in output.get("data", {})]


@pytest.fixture
def execute(tmp_path, monkeypatch):
    """Returns a function that executes a notebook in a checkout that has nothing but it."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    folder = tmp_path / "docs" / "tutorials"
    folder.mkdir(parents=True)
    for name in ("configs", "launch"):
        (tmp_path / name).symlink_to(ROOT / name)

    def run(name):
        copy = shutil.copy(FOLDER / f"{name}.ipynb", folder)
        return load_execute().execute(copy, folder)

    return run


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_first_model_trains_resumes_and_writes(execute):
    notebook = execute("first_model")
    text = printed(notebook)
    assert "Result(step=150" in text and "restored step 150 from runs/first_model" in text
    assert len(pictures(notebook)) == 3  # two runs, and the plot
    losses = [float(loss) for loss in re.findall(r"done: \d+ steps · held-out loss (\S+)", text)]
    assert len(losses) == 2 and losses[1] < losses[0] < 3
    assert text.rpartition("The function ")[2].count(" ") > 20


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_loss_is_the_same_on_all_layouts(execute):
    text = printed(execute("layouts"))
    differences = re.findall(r"\.\d{6} +(\d\.\de[+-]\d+)$", text, re.MULTILINE)
    assert len(differences) == 4 and max(map(float, differences)) < 1e-4


@pytest.mark.slow
@pytest.mark.multiprocess
def test_smollm2_learns_to_reply_in_json(execute, tmp_path):
    smollm2.fetch(tmp_path / "models" / "smollm2")
    text = printed(execute("finetune_smollm2"))
    before, _, after = text.partition("done: ")
    assert "The capital of Norway is Oslo" in before
    replies = [json.loads(line) for line in after.splitlines() if line.startswith("{")]
    assert [reply["country"] for reply in replies] == ["Norway", "Peru", "Thailand"]
    assert all(reply.keys() == {"country", "capital"} for reply in replies)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_saved_as_it_was_executed(name):
    notebook = read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    command = f"run: python docs/tutorials/execute.py {name}.ipynb"
    assert [cell.execution_count for cell in cells] == [*range(1, len(cells) + 1)], command
    assert not [output for output in outputs_of(notebook) if output.output_type == "error"]
    assert pictures(notebook) and (FOLDER / f"{name}.ipynb").stat().st_size < 500_000
    # Nothing of the machine on which it ran.
    assert not re.search(r"(?<![\w.])/(home|root|tmp|work|usr)/", printed(notebook))


@pytest.mark.parametrize("name", NAMES)
def test_links_of_a_notebook_lead_to_files_and_the_index_has_it(name):
    text = "\n".join(cell.source for cell in read(name).cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and not [link for link in links if not (FOLDER / link).exists()]
    assert f"](tutorials/{name}.ipynb)" in (ROOT / "docs" / "pages.md").read_text()
