"""The shape of the package itself: imports flow one way, files and functions stay short."""

import ast
import functools
import importlib
import io
import re
import tokenize
from pathlib import Path

import jax
import pytest

from configs import default
from meshtrain.config.parse import resolve
from meshtrain.parallel import mesh, sharding

ROOT = Path(__file__).resolve().parent.parent
# A module may import those before it; one that is not here needs a place first.
ORDER = """
errors compiler mesh pipeline pipeline.schedules sections config configfile place rendezvous distributed
progress signals metrics sharding
data data.permute data.source data.cutting data.manifest data.tokenizer data.indexed data.inputs data.bpe
data.tokenising data.shards data.corpus data.checking data.packing data.mixture data.tokens data.synthetic data.loader
ops ops.blockwise ops.attention ops.losses optim models models.base models.layers models.section models.transformer
huggingface.names huggingface.families huggingface.config_json huggingface.files huggingface
grads pipeline.ring pipeline.stages pipeline.executor state checkpoint.manifest checkpoint.lock
checkpoint.arrays checkpoint checkpoint.initial checkpoint.saver step program summary writer divergence
health trained sampling train cli prepare convert generate evaluate
collectives info workers nodes attempts supervisor launch
checkpoint.__main__ pipeline.drawing schedule
covering certificate reference plain subject layouts laws verify
audit.hlo audit.groups audit.dataflow audit.collectives audit.layout audit.minimum audit.ledger
audit.stages audit.explain audit.warn audit.report audit audit.__main__ profile.trace profile.label profile.report
profile profile.__main__ . main __main__
""".split()  # the dot is the package itself, meshtrain/__init__.py
FILES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "meshtrain").rglob("*.py")}
CONFIGS = sorted((ROOT / "configs").glob("*.py"))
LONGER = {"meshtrain/train.py:train": 120}  # the loop, to be read in one go


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def module_of(file):
    """meshtrain/data/loader.py -> data.loader"""
    parts = Path(file).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."


def imports_of(path):
    """Every dotted name that a file imports, at the top or within a function."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                file = ROOT / whole.replace(".", "/")
                is_module = file.is_dir() or file.with_suffix(".py").is_file()
                yield whole if is_module else node.module


def importers_of(library):
    files = {**FILES, **{path.relative_to(ROOT).as_posix(): path for path in CONFIGS}}
    return {
        name
        for name, path in files.items()
        if library in {imported.partition(".")[0] for imported in imports_of(path)}
    }


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_module_imports_only_those_before_it(file):
    place = ORDER.index(module_of(file))
    for imported in imports_of(FILES[file]):
        package, _, module = imported.partition(".")
        if package == "meshtrain":
            assert ORDER.index(module or ".") < place, f"{file} imports {imported}"


@pytest.mark.parametrize(
    ("library", "files"),
    [
        ("flax", "meshtrain/models/"),
        ("orbax", "meshtrain/checkpoint/"),
        ("ml_collections", ("meshtrain/config/files.py", "configs/")),
    ],
)
def test_a_library_stays_behind_one_door(library, files):
    importers = importers_of(library)
    assert importers and {file for file in importers if not file.startswith(files)} == set()


def test_nothing_that_is_read_can_run_code():
    """A config is code, from a file that the user names; checkpoints and data never are."""
    risky = re.compile(
        r"allow_pickle=True|(?<!allow_)pickle|marshal|\bdill\b|joblib|torch\.load|yaml\.load"
        r"|(?<![\w.])(?:eval|exec)\("
    )
    found = {name: risky.findall(path.read_text()) for name, path in FILES.items()}
    assert {name: hits for name, hits in found.items() if hits} == {}


@pytest.mark.parametrize("file", sorted(FILES))
def test_files_and_functions_are_short(file):
    text = FILES[file].read_text()
    assert len(text.splitlines()) <= 300
    lengths = {
        f"{file}:{node.name}": node.end_lineno - node.lineno + 1
        for node in ast.walk(parsed(FILES[file]))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: n for name, n in lengths.items() if n > LONGER.get(name, 60)} == {}


def count_keys(section):
    return sum(count_keys(value) if isinstance(value, dict) else 1 for value in section.values())


def test_every_key_of_the_default_config_has_a_comment_on_its_line():
    text = (ROOT / "configs" / "default.py").read_text()
    marks = tokenize.generate_tokens(io.StringIO(text).readline)
    commented = {mark.start[0] for mark in marks if mark.type == tokenize.COMMENT}
    keys = {
        ast.unparse(node.targets[0]): range(node.lineno, node.end_lineno + 1)
        for node in ast.walk(parsed(ROOT / "configs" / "default.py"))
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Attribute)
        and ast.unparse(node.value) != "ConfigDict()"  # which opens a section
    }
    assert len(keys) == count_keys(default.get_config().to_dict()) < 100
    bare = [key for key, lines in keys.items() if not commented & {*lines}]
    assert not bare, f"without a comment: {', '.join(bare)}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_builds_its_model_with_a_rule_for_each_dim(path):
    config = importlib.import_module(f"configs.{path.stem}").get_config().to_dict()
    model = resolve(config["model"].pop("build"), key="model.build")(**config["model"])

    def check(leaf, names):
        spec = sharding.spec_for(names, leaf.shape, config["rules"], dict.fromkeys(mesh.AXES, 1))
        assert len(spec) == leaf.ndim

    jax.tree.map(check, jax.eval_shape(model.init, jax.random.key(0)), model.axes)
