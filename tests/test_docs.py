"""README.md, benchmarks/README.md and docs/: commands run, links lead somewhere, lists are true.

Every ```bash and ```python block runs, in the order of its page, in a folder that looks like the
repository. A comment directly above a block changes that:

  <!-- not run: REASON -->                     it is not run
  <!-- slow -->                                it runs with the slow tests
  <!-- slow, on 8 simulated devices -->        the same; a command for 8 GPUs runs on CPU devices
  <!-- run as part of docs/PAGE.md -->         that page runs the same commands
  <!-- output of the block above -->           for a block without a language, which must
                                               equal the output; a line `...` stands for any lines
"""

import argparse
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import meshtrain
from meshtrain import errors
from meshtrain.cli import verbs
from meshtrain.cluster import distributed, environment
from meshtrain.config import describe
from meshtrain.configs import default
from meshtrain.monitor import divergence
from tests.lib.paths import ROOT

README = ROOT / "README.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in (README, ROOT / "benchmarks" / "README.md", *sorted(ROOT.glob("docs/**/*.md")))
}
NOTEBOOKS = {
    path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.glob("docs/tutorials/*.ipynb"))
}
BIN = Path(sys.executable).parent
SECONDS = 600  # time limit of a block
OUTPUT = "output of the block above"
MARKER = re.compile(r"not run: .{10,}|slow(, on 8 simulated devices)?|run as part of \S+|" + OUTPUT)
# The left column of the glossary, as far as it can be searched for.
UNCLEAR = (
    r"told|astray|wished|begun|narrow(ed|s)?|beside|anew|heeds?|whole|the like|and so|of it|those "
    r"of|that of"
    r"|(go(es|ing)?|went) on|so many|worked off|(by|at) chance|in turns?|set aside|cut( up| "
    r"over|s|ting)?"
    r"|(bad|good) ones?|(is|are) refused|does without|is had|what comes in|turns round|mortal"
)


class Block(NamedTuple):
    page: str
    line: int  # of its first line, from 1
    language: str
    marker: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_run(self) -> bool:
        return self.language in ("bash", "sh", "python") and not self.marker.startswith("slow")

    @property
    def is_slow(self) -> bool:
        return self.marker.startswith("slow")

    @property
    def commands(self) -> set[str]:
        joined = re.sub(r"\s*\\\n\s*", " ", self.text).splitlines()
        return {line.partition("  #")[0].strip() for line in joined if line.strip()}


def blocks_of(page: str, text: str) -> list[Block]:
    lines, found, start = text.splitlines(), [], None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        above = re.fullmatch(r"<!-- (.*) -->", lines[start - 1]) if start else None
        inside = "\n".join(lines[start + 1 : number]) + "\n"
        marker = above[1] if above else ""
        found.append(Block(page, start + 2, lines[start][3:], marker, inside))
        start = None
    assert start is None, f"{page}:{start + 1}: a block without an end"
    return found


BLOCKS = {page: blocks_of(page, path.read_text()) for page, path in PAGES.items()}
SKIPPED = ("not run", "run as part of")


def pages_with(is_wanted) -> list[str]:
    def wanted(block: Block) -> bool:
        return is_wanted(block) and not block.marker.startswith(SKIPPED)

    return [page for page, blocks in BLOCKS.items() if any(map(wanted, blocks))]


def prose_of(page: str) -> str:
    """Returns a page without its blocks, with the same line numbers."""
    parts = re.split(r"^```.*$", (ROOT / page).read_text(), flags=re.MULTILINE)
    return "".join(part if i % 2 == 0 else "\n" * part.count("\n") for i, part in enumerate(parts))


# ---- the commands ----


def link_repository(folder: Path) -> None:
    """Links the files of the repository into a folder, except what runs write."""
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("runs", "data", "models"):
            (folder / path.name).symlink_to(path)
    texts = folder / "my_text"  # used in docs/guides/text.md
    texts.mkdir()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("meshtrain/**/*.py"), *ROOT.glob("tests/**/*.py")):
        name = path.relative_to(ROOT).as_posix().replace("/", "-")
        (texts / f"{name}.txt").write_text(path.read_text())


def run(block: Block, folder: Path) -> str:
    text = block.text.replace(".venv/bin/", f"{BIN}/")
    command = (
        [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
    )
    environ = {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "80"}
    environ |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PAGER": "cat"}
    environ["XDG_CACHE_HOME"] = str(folder / "cache")
    if "8 simulated devices" in block.marker:
        environ["JAX_NUM_CPU_DEVICES"] = "8"
    pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(
        [*command, text], cwd=folder, env=environ, text=True, start_new_session=True, **pipes
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output = f"{process.communicate()[0]}\nnot done after {SECONDS} s"
    if process.returncode:
        why = f"{block.where}: exit code {process.returncode}\n{block.text}{output}"
        pytest.fail(why, pytrace=False)
    return output


def run_page(page: str, folder: Path, *, slow: bool) -> None:
    link_repository(folder)
    output = None
    for block in BLOCKS[page]:
        if block.marker == OUTPUT and output is not None:
            lines = [re.escape(line.rstrip()) for line in block.text.splitlines()]
            pattern = "\n".join(r"(.*\n)*?.*" if line == r"\.\.\." else line for line in lines)
            printed = "\n".join(line.rstrip() for line in output.splitlines())
            assert re.fullmatch(pattern, printed), f"{block.where}: it printed\n{output}"
        elif block.language:
            is_selected = block.is_slow if slow else block.is_run
            skipped = block.marker.startswith(SKIPPED) or not is_selected
            output = None if skipped else run(block, folder)


FIRST_PAGES = ("README.md", "docs/start.md")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[] if page in FIRST_PAGES else pytest.mark.slow)
        for page in pages_with(lambda block: block.is_run)
    ],
)
def test_the_commands_of_a_page_run(page, tmp_path):
    if page == "docs/guides/evaluate.md":
        pytest.importorskip("lm_eval", reason="needs the extra `evals`")
    run_page(page, tmp_path, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", pages_with(lambda block: block.is_slow))
def test_the_slow_commands_of_a_page_run(page, tmp_path):
    run_page(page, tmp_path, slow=True)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_is_run_or_says_why_not(page):
    for block in BLOCKS[page]:
        assert block.language in ("", "bash", "sh", "python"), f"{block.where}: {block.language}"
        assert not block.marker or MARKER.fullmatch(block.marker), f"{block.where}: {block.marker}"
        if other := block.marker.partition("run as part of ")[2]:
            runs = [one for one in BLOCKS[other] if one.is_run or one.is_slow]
            elsewhere = set().union(*(one.commands for one in runs))
            assert block.commands <= elsewhere, f"{block.where}: not in {other}"


def test_a_failing_block_is_reported_with_its_line(tmp_path):
    text = "# Page\n\n```bash\necho before; false\n```\n"
    (block,) = blocks_of("page.md", text)
    with pytest.raises(pytest.fail.Exception, match=r"page.md:4: exit code 1\n(.*\n)*before"):
        run(block, tmp_path)


# ---- what the pages list ----


def test_the_readme_is_one_page():
    assert len(README.read_text().splitlines()) <= 200


def anchors_of(page: str) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_a_file_and_a_heading(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = (PAGES[page].parent / name).resolve() if name else PAGES[page]
        assert path.exists(), f"{page}: no {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors_of(path.relative_to(ROOT).as_posix()), f"{page}: no {target}"


def test_every_page_is_in_the_index():
    index = PAGES["docs/pages.md"].read_text()
    missing = [page for page in PAGES if f"]({os.path.relpath(page, 'docs')})" not in index]
    assert missing == ["docs/pages.md"]


def test_every_benchmark_is_on_its_page():
    text = PAGES["benchmarks/README.md"].read_text()
    scripts = [path.relative_to(ROOT) for path in ROOT.glob("benchmarks/**/*.py")]
    missing = [path for path in scripts if path.parent.name != "lib" and f"{path}" not in text]
    assert not missing


def text_of(page: str) -> str:
    """Returns a page, or the texts between the code of a notebook."""
    if page in PAGES:
        return PAGES[page].read_text()
    cells = json.loads(NOTEBOOKS[page].read_text())["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_words_are_those_of_the_field(page):
    text = text_of(page)
    found = [
        f"{page}:{text[: hit.start()].count(chr(10)) + 1}: {hit[0]}"
        for hit in re.finditer(rf"(?<![\w-])({UNCLEAR})(?![\w-])", text, re.IGNORECASE)
    ]
    assert not found


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS])
def test_files_and_config_keys_that_a_page_names_exist(page):
    text, config = text_of(page), default.get_config().to_dict()
    folders = "benchmarks|configs|docs|launch|meshtrain|tests|parallel"
    text = text.replace("configs/NAME.py", "")
    names = re.findall(rf"(?<![\w/.])(?:{folders})/[\w/.-]+\.(?:py|sh|md|json|txt|yaml)\b", text)
    names += [f"benchmarks/results/{name}" for name in re.findall(r"[\w-]+_cpu-[\w-]+\.\w+", text)]
    missing = [
        name
        for name in names
        if not (ROOT / name).exists() and not (ROOT / "meshtrain" / name).exists()
    ]
    sections = "|".join(config)
    pattern = rf"(?:`|--config\.|\bconfig\.)({sections})\.(\w+)\b(?!\()"
    keys = re.findall(pattern, text)
    files = ("py", "bin")  # train.py, train.bin
    missing += [
        f"{section}.{key}"
        for section, key in keys
        if key not in config[section] and key not in files
    ]
    assert not missing


def flags_of(add_flags) -> set[str]:
    parser = argparse.ArgumentParser(add_help=False)
    add_flags(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


@pytest.mark.parametrize("verb", verbs.NAMES)
def test_the_flags_of_a_verb_are_listed(verb):
    assert re.search(rf"^\| .*`{verb}`.* \|", README.read_text(), re.MULTILINE)
    text = PAGES["docs/reference/verbs.md"].read_text()
    section = re.search(rf"^## {verb}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]
    rows = "\n".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))
    shared = flags_of(environment.add_flags) | {"--config", "--workdir"}
    actual = flags_of(verbs.load(verb).add_flags)
    assert {*re.findall(r"--[\w-]+", rows)} - shared == actual - shared


def test_events_are_listed():
    text = PAGES["docs/reference/metrics.md"].read_text().partition("## events.jsonl")[2]
    listed = {*re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)}
    code = "\n".join(path.read_text() for path in (ROOT / "meshtrain").rglob("*.py"))
    recorded = {*re.findall(r"\bevent\(\s*\"(\w+)\"", code)}
    assert (
        recorded <= listed and {f'"{name}"' for name in listed if f'"{name}"' not in code} == set()
    )


def test_exit_codes_are_listed():
    text = PAGES["docs/reference/files.md"].read_text()
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert {*map(int, re.findall(r"^\| (\d+) \|", text, re.MULTILINE))} == {0, *codes}


def test_no_text_installs_meshtrain_by_its_name():
    """The name belongs to others on PyPI. A checkout has launch/setup.sh; else a path or URL."""
    # Split, so that this file does not match.
    by_name = re.compile(
        r"mesh"
        + r"train\[|\b(?:install|add)\s+(?:-\S+\s+)*['\"`]?mesh"
        + r"train(?:-jax)?\b(?![/.])"
    )
    kinds = {".py", ".md", ".sh", ".sbatch", ".yml", ".yaml", ".toml", ""}
    folders = ("meshtrain", "docs", "launch", "benchmarks", "tests", "configs", ".ci", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    files += [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    files += [ROOT / "pyproject.toml"]
    found = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in files
        if path.is_file() and path.suffix in kinds
        for match in by_name.finditer(path.read_text(errors="replace"))
    }
    assert not found


def test_the_distribution_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == meshtrain.__version__ == distributed.versions()["meshtrain"]


def test_the_numbers_of_spikes_are_those_of_the_code():
    guide = " ".join(PAGES["docs/guides/resume.md"].read_text().split())
    (sigmas,) = re.findall(r"with the default of (\d+) a spike", guide)
    assert float(sigmas) == default.get_config().divergence.spike_sigmas
    texts = [guide, PAGES["docs/reference/metrics.md"].read_text()]
    texts += [(ROOT / "meshtrain/configs/default.py").read_text()]
    for text in texts:
        (warmup,) = set(re.findall(r"[Ii]n the first (\d+) steps", text))
        assert int(warmup) == divergence.WARMUP_STEPS
    for text in (guide, texts[-1]):
        (percent,) = re.findall(r"at least ([\d.]+) % of the mean", text)
        assert float(percent) == 100 * divergence.MIN_DEVIATION
    (decay,) = re.findall(r"by a factor of ([\d.]+) per step", guide)
    assert float(decay) == divergence.DECAY
    (in_a_row,) = map(int, re.findall(r"\((\d+) in a row\)", guide))
    share = 1 - divergence.DECAY ** (in_a_row - np.arange(2))  # after that many, and one fewer
    assert share[0] > divergence.MAX_SPIKE_SHARE > share[1]
    assert "a tenth of the recent steps" in guide and divergence.MAX_SPIKE_SHARE == 0.1
    assert "The third rollback" in guide and divergence.MAX_ROLLBACKS == 3


def test_messages_in_troubleshooting_are_those_of_the_code():
    files = [*(ROOT / "meshtrain").rglob("*.py"), *(ROOT / "launch").glob("*.sh")]
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    rows = re.findall(r"^\| (.*?) \|", PAGES["docs/troubleshooting.md"].read_text(), re.MULTILINE)
    word = r"[A-Za-z][\w'-]*"
    messages = [span for row in rows for span in row.split("`")[1::2] if " " in span]
    for message in messages:
        parts = re.findall(rf"{word}(?: {word})+", message)  # without values, which come between
        longest = max(parts, key=len, default="")
        assert longest in code or longest.rpartition(" ")[0] in code, message


# ---- the page that is generated ----


@pytest.fixture
def generator():
    path = ROOT / "docs" / "config_reference.py"
    spec = importlib.util.spec_from_file_location("config_reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_config_keys_is_what_the_generator_prints(generator):
    remedy = "run: python docs/config_reference.py > docs/reference/config.md"
    assert generator.page() == PAGES["docs/reference/config.md"].read_text(), remedy


def test_every_config_key_has_a_row_with_its_meaning():
    listed = {name: comment for name, _, comment in describe.entries(describe.source())}
    config = default.get_config().to_dict()
    keys = {f"{name}.{key}" for name in config if name != "rules" for key in config[name]}
    assert keys | {*config} == {*listed}
    assert [key for key in keys if not listed[key]] == []


def test_a_comment_stands_above_its_key_or_on_its_line():
    text = """
def get_config():
    config = ConfigDict()

    # above the section
    config.a = a = ConfigDict()
    a.one = 1  # on the line
    a.two = 2  # on the line,
    # and below
    a.three = 3  # again
    # above
    # its key
    a.four = 4
    a.five = (
        5  # within
    )

    config.b = b = ConfigDict()  # used later
    b.six = a.get_oneway_ref("one")  # last
    return config
"""
    assert [(name, comment) for name, _, comment in describe.entries(text)] == [
        ("a", "above the section"),
        ("a.one", "on the line"),
        ("a.two", "on the line, and below"),
        ("a.three", "again"),
        ("a.four", "above its key"),
        ("a.five", "within"),
        ("b", "used later"),
        ("b.six", "last"),
    ]


def names_of_the_package():
    """Returns what the pages, and the docstrings and messages of the package, call meshtrain.NAME.

    Imports are left out: they load the module that they name.
    """
    texts = [path.read_text(encoding="utf-8") for path in PAGES.values()]
    for path in (ROOT / "meshtrain").rglob("*.py"):
        if path.name != "moved.py":  # the table of old names
            texts.append(path.read_text(encoding="utf-8"))
    name = re.compile(r"(?<!from )(?<!import )(?<!-m )(?<![\w/.-])meshtrain(?:\.[a-zA-Z]\w*)+")
    found = {match for text in texts for match in name.findall(text)}
    return sorted(found - {"meshtrain.NAME", "meshtrain.sqsh"})


def test_every_dotted_name_is_found_after_import_meshtrain():
    """In a new process, where nothing else has loaded the modules."""
    names = names_of_the_package()
    assert "meshtrain.ops.embedding.lookup" in names and "meshtrain.weighted" in names
    program = """
import functools, sys, meshtrain
assert not {"jax", "flax", "orbax"} & {*sys.modules}, "import meshtrain loads jax"
for name in sys.argv[1:]:
    try:
        functools.reduce(getattr, name.split(".")[1:], meshtrain)
    except AttributeError as error:
        print(f"{name}: {error}")
"""
    result = subprocess.run(
        [sys.executable, "-c", program, *names], capture_output=True, text=True, check=True
    )
    assert result.stdout == ""
