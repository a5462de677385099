"""The structure of the package: imports go in one direction, files and functions are short."""

import ast
import functools
import importlib
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import jax
import pytest
from conftest import free_port

from meshtrain.config.build import resolve
from meshtrain.config.schema import AXES
from meshtrain.configs import default
from meshtrain.parallel import sharding

ROOT = Path(__file__).resolve().parent.parent
# A folder or root module imports only names before its own: on a line above, or to its left.
LAYERS = """
errors storage
console analysis.hardware analysis.hlo
parallel.pipeline.schedules configs config
metrics cluster parallel
ops data
models optim optimizers blocks
grads state parallel.pipeline checkpoint
plan step program monitor train
huggingface inference verify analysis report
commands cli main __main__
""".split()
FILES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "meshtrain").rglob("*.py")}
CONFIGS = sorted((ROOT / "meshtrain" / "configs").glob("[!_]*.py"))
LONGER = {
    "meshtrain/train.py:train": 120,  # the loop, to be read in one go
    "meshtrain/configs/default.py:get_config": 295,  # a list of keys, fewer than 132
}


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


def module_of(file):
    """meshtrain/data/loader.py -> data.loader"""
    parts = Path(file).with_suffix("").parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "."


def imports_of(path):
    """Yields every dotted name that a file imports, at the top or within a function."""
    for node in ast.walk(parsed(path)):
        yield from imports_of_node(node, path)


def imports_of_node(node, path):
    """Yields the dotted names that one statement imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{path}: relative import"
        for alias in node.names:
            name = f"{node.module}.{alias.name}"
            file = ROOT / name.replace(".", "/")
            is_module = file.is_dir() or file.with_suffix(".py").is_file()
            yield name if is_module else node.module


def importers_of(library):
    return {
        name
        for name, path in FILES.items()
        if library in {imported.partition(".")[0] for imported in imports_of(path)}
    }


def layer_of(module):
    """Returns the name in LAYERS that a module belongs to: the longest prefix of its own name."""
    names = [name for name in LAYERS if f"{module}.".startswith(f"{name}.")]
    assert names, f"meshtrain/{module} has no layer"
    return max(names, key=len)


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_folder_imports_only_from_lower_layers(file):
    if (module := module_of(file)) == ".":
        return  # the package's own names, each imported when it is first used
    for imported in imports_of(FILES[file]):
        package, _, other = imported.partition(".")
        if package != "meshtrain" or not other:
            continue
        layer, imported_layer = layer_of(module), layer_of(other)
        assert LAYERS.index(imported_layer) <= LAYERS.index(layer), f"{file} imports {imported}"


def test_no_two_test_files_have_the_same_name():
    """pytest imports a test file by its name alone, so it could not collect the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted({*names})


def test_no_chain_of_imports_is_longer_than_eight():
    """Counts only imports at the top of a module; an import within a function runs when it is used."""
    graph = {}
    for file, path in FILES.items():
        names = (name for node in parsed(path).body for name in imports_of_node(node, path))
        own = {n.removeprefix("meshtrain.") for n in names if n.startswith("meshtrain.")}
        graph[module_of(file)] = own - {module_of(file)}

    @functools.cache
    def longest(module):
        return max(
            ([module, *longest(one)] for one in graph.get(module, ())), key=len, default=[module]
        )

    chain = max(map(longest, graph), key=len)
    assert len(chain) <= 8, " -> ".join(chain)


# The private names of jax that the package uses: why, and what breaks without them. No other file uses any.
PRIVATE_API = {
    "meshtrain/cluster/distributed.py": {
        # The key-value store and the barriers of jax.distributed have no public name. Without them processes
        # cannot compare their configs, agree on the step to stop at, or wait for a slow compiler.
        "jax._src"  # .distributed
    },
    "meshtrain/tools/hlo/target.py": {
        # jax allows fused attention with head dims above 128 by the compute capability of the local device.
        # Without it a step for an absent Hopper GPU cannot be compiled.
        "jax._src.cudnn"
    },
}


@pytest.mark.parametrize("file", sorted(FILES))
def test_private_names_of_jax_are_listed(file):
    private = re.compile(r"jax\.(_src|interpreters|lib|core)\b|jaxlib\.(?!__version__)")
    found = {name for name in imports_of(FILES[file]) if private.match(name)}
    assert found == PRIVATE_API.get(file, set())


def test_the_private_names_of_jax_work_as_they_are_used():
    program = """
import jax, sys
from jax._src import distributed
jax.distributed.initialize(sys.argv[1], 1, 0, cluster_detection_method="deactivate")
state = distributed.global_state
assert (state.num_processes, state.process_id) == (1, 0)
state.client.key_value_set("a/b", "c")
assert state.client.blocking_key_value_get("a/b", 1000) == "c"
assert state.client.key_value_dir_get("a/") == [("a/b", "c")]
state.client.key_value_delete("a/b")
state.client.wait_at_barrier("d", 1000)
"""
    address = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program, address], env=environ, check=True, timeout=60)


@pytest.mark.parametrize(
    ("library", "files"),
    [
        ("flax", "meshtrain/models/"),
        ("orbax", "meshtrain/checkpoint/"),
        ("ml_collections", ("meshtrain/config/load.py", "meshtrain/configs/")),
    ],
)
def test_a_library_is_imported_in_one_place_only(library, files):
    importers = importers_of(library)
    assert importers and {file for file in importers if not file.startswith(files)} == set()


def test_checkpoints_and_data_cannot_run_code():
    """A config file is code, which the user chooses to run; checkpoints and data never are."""
    risky = re.compile(
        r"allow_pickle=True|(?<!allow_)pickle|marshal|\bdill\b|joblib|torch\.load|yaml\.load"
        r"|(?<![\w.])(?:eval|exec)\("
    )
    found = {name: risky.findall(path.read_text()) for name, path in FILES.items()}
    assert {name: hits for name, hits in found.items() if hits} == {}


def test_modules_named_by_text_are_imported_in_few_places():
    """Each place is listed with what limits the names; tests/config/test_trust.py runs hostile configs."""
    places = {
        "meshtrain/__init__.py": "names of this package",
        "meshtrain/cli/app.py": "VERBS",
        "meshtrain/config/build.py": "the keys `build`, which files.py restricts to meshtrain in a config.json",
        "meshtrain/config/load.py": "the config file that the user names",
        "meshtrain/data/tokenizer.py": "optional dependencies, named in the code",
    }
    risky = re.compile(r"import_module|__import__|spec_from_file_location|\bexec_module|runpy")
    assert {name for name, path in FILES.items() if risky.search(path.read_text())} == {*places}


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


def comments_of_keys(path):
    """Returns the comment of each key of a config file, on its line or in the comment lines directly above."""
    text = path.read_text()
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        if ast.unparse(node.value) == "ConfigDict()":  # opens a section
            continue
        first = node.lineno
        while lines[first - 2].strip().startswith("#"):
            first -= 1
        # Comments inside a value of several lines are not the key's.
        own = {*range(first, node.lineno), node.end_lineno}
        found[ast.unparse(node.targets[0])] = [comments[n] for n in sorted(own & {*comments})]
    return found


def test_every_key_of_the_default_config_has_a_comment_on_its_line_or_directly_above():
    comments = comments_of_keys(ROOT / "configs" / "default.py")
    # Few enough to be read in one go. 107 until latent attention, whose four sizes are those of every paper about it;
    # the rest is for the slices of a mesh and how they synchronise, and for adapters.
    assert len(comments) == count_keys(default.get_config().to_dict()) < 132
    without = [key for key, comment in comments.items() if not comment]
    assert not without, f"without a comment: {', '.join(without)}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_config_builds_its_model_with_a_rule_for_each_dim(path):
    config = importlib.import_module(f"meshtrain.configs.{path.stem}").get_config().to_dict()
    model = resolve(config["model"].pop("build"), key="model.build")(**config["model"])

    def check(leaf, names):
        spec = sharding.spec_for(names, leaf.shape, config["rules"], dict.fromkeys(AXES, 1))
        assert len(spec) == leaf.ndim

    jax.tree.map(check, jax.eval_shape(model.init, jax.random.key(0)), model.axes)
