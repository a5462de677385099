"""The structure of the package: two wings, imports in one direction, each library in one place."""

import ast
import importlib
import io
import os
import re
import subprocess
import sys
import tokenize

import jax
import pytest

from meshtrain.config.build import resolve
from meshtrain.config.schema import AXES
from meshtrain.configs import default
from meshtrain.parallel import sharding
from tests.lib.imports import (
    FILES,
    MODULES,
    imported_names,
    module_of,
    mutual_folders,
    own_imports,
    parsed,
)
from tests.lib.paths import ROOT
from tests.lib.processes import free_port

# A folder or root module imports only names before its own: on a line above, or to its left.
LAYERS = """
errors lazy moved foreign object_store storage console metrics schedules
configs config hardware
cluster supervise parallel
data ops optim models
state grads pipeline step
checkpoint huggingface monitor program inference run train
tools
cli __main__ main
""".split()
# The core trains without tools/. It imports these, within functions, when they are used.
DOORS = {
    "train": {"tools.plan.auto", "tools.plan.predict"},  # mesh.auto; the predicted step time
    "run": {"tools.hlo.oom_advice"},  # what to change when memory runs out
}
CONFIGS = sorted((ROOT / "meshtrain" / "configs").glob("[!_]*.py"))


def importers_of(library):
    return {
        file
        for file in FILES
        if library in {name.partition(".")[0] for name in imported_names(file)}
    }


def layer_of(module):
    """Returns the name in LAYERS that a module belongs to: that of its folder, or its own."""
    layer = module.partition(".")[0]
    assert layer in LAYERS, f"meshtrain/{module} has no layer"
    return layer


def is_core(module):
    return not module.startswith(("tools", "cli", "__main__", "main"))


@pytest.mark.parametrize("file", sorted(FILES))
def test_a_folder_imports_only_from_lower_layers(file):
    module = module_of(file)
    if module == ".":
        return  # the package's own names, each imported when it is first used
    for imported in own_imports(file) - DOORS.get(module, set()):
        layer, imported_layer = layer_of(module), layer_of(imported)
        assert LAYERS.index(imported_layer) <= LAYERS.index(layer), f"{file} imports {imported}"


def test_no_two_folders_import_each_other():
    """The folders of tools/ are told apart."""
    assert mutual_folders() == []


def test_the_core_imports_the_tools_at_three_places_only():
    imported = {
        module: {name for name in own_imports(file) if name.startswith("tools")}
        for module, file in MODULES.items()
        if is_core(module)
    }
    assert {module: names for module, names in imported.items() if names} == DOORS


def test_imports_within_functions_are_those_of_the_doors_and_of_the_command_line():
    """Of the command line, so that --help and a misspelt key do not wait for jax.

    And of the kernels that Pallas compiles: its import takes 0.2 s.
    """
    imported = {
        module: own_imports(file, in_functions=True)
        for module, file in MODULES.items()
        if not module.startswith("cli.")
    }
    imported = {module: names for module, names in imported.items() if names}
    kernels = {"ops.norms": {"ops.norm_kernel"}, "ops.losses": {"ops.loss_kernel"}}
    kernels |= {"ops.splash": {"ops.splash_kernel"}, "ops.grouped": {"ops.grouped_kernel"}}
    assert imported == DOORS | kernels | {"__main__": {"cli.app"}}


def test_the_layers_in_the_readme_are_the_tested_ones():
    blocks = re.findall(r"^```\w*\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    block = next(block for block in blocks if block.startswith("cli "))
    lines = [re.split(r"\s{2,}", line)[0].split() for line in reversed(block.splitlines())]
    assert [name for line in lines for name in line] == LAYERS


def test_no_test_file_imports_another_one():
    """What several share is in tests/lib; programs in strings, for other processes, count too."""
    test_file = re.compile(
        r"^\s*(?:from|import)\s+(?:[\w.]+\.)?(?:test_\w+|conftest)\b", re.MULTILINE
    )
    found = {
        path.relative_to(ROOT).as_posix(): lines
        for path in (ROOT / "tests").rglob("*.py")
        if (lines := test_file.findall(path.read_text()))
    }
    assert found == {}


def test_no_two_test_files_have_the_same_name():
    """pytest imports a test file by its name alone, so it could not collect the second one."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted({*names})


# The private names of jax that the package uses: why, and what breaks without them. No other file
# uses any.
PRIVATE_API = {
    "meshtrain/cluster/distributed.py": {
        # The key-value store and the barriers of jax.distributed have no public name. Without them
        # processes cannot compare their configs, agree on the step to stop at, or wait for a slow
        # compiler.
        "jax._src"  # .distributed
    },
    "meshtrain/cluster/runtime.py": {
        # Whether a backend has started has no public name. Without it a script that uses a device
        # before it joins the others waits for them, and then ends with a traceback of jax.
        "jax._src"  # .xla_bridge
    },
    "meshtrain/ops/chunk_kernels.py": {
        # jax.nn returns the log-sum-exp of cuDNN's attention in 16 bits, and has no backward pass
        # that accepts one. Without them a ring cannot use the kernel.
        "jax._src.cudnn"
    },
    "meshtrain/tools/hlo/target.py": {
        # jax allows fused attention with head dims above 128 by the compute capability of the local
        # device. Without it a step for an absent Hopper GPU cannot be compiled.
        "jax._src.cudnn"
    },
}


@pytest.mark.parametrize("file", sorted(FILES))
def test_private_names_of_jax_are_listed(file):
    private = re.compile(r"jax\.(_src|interpreters|lib|core)\b|jaxlib\.(?!__version__)")
    found = {name for name in imported_names(file) if private.match(name)}
    assert found == PRIVATE_API.get(file, set())


def test_the_private_names_of_jax_work_as_they_are_used():
    program = """
import jax, sys
from jax._src import distributed, xla_bridge
assert not xla_bridge.backends_are_initialized()
jax.distributed.initialize(sys.argv[1], 1, 0, cluster_detection_method="deactivate")
state = distributed.global_state
assert (state.num_processes, state.process_id) == (1, 0)
state.client.key_value_set("a/b", "c")
assert state.client.blocking_key_value_get("a/b", 1000) == "c"
assert state.client.key_value_dir_get("a/") == [("a/b", "c")]
state.client.key_value_delete("a/b")
state.client.wait_at_barrier("d", 1000)
jax.devices()
assert xla_bridge.backends_are_initialized()
"""
    address = f"127.0.0.1:{free_port()}"
    environ = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", program, address], env=environ, check=True, timeout=60)


def test_modules_of_every_package_are_loaded_as_its_attributes():
    """After `import meshtrain`, which imports none of them."""
    for init in (ROOT / "meshtrain").rglob("__init__.py"):
        name = ".".join(init.parent.relative_to(ROOT).parts)
        package = importlib.import_module(name)
        for path in init.parent.glob("[!_]*.py"):
            module = importlib.import_module(f"{name}.{path.stem}")
            # An attribute already, as this imports it: the function that finds others is asked.
            find = vars(package).get("__getattr__")
            imports_its_modules = f"from {name} import" in init.read_text()
            assert find(path.stem) is module if find else imports_its_modules


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
    """Each place is listed with what limits the names.

    tests/config/test_trust.py runs hostile configs.
    """
    places = {
        "meshtrain/__init__.py": "names of this package",
        "meshtrain/cli/verbs.py": "NAMES",
        "meshtrain/lazy.py": "modules of this package",
        "meshtrain/moved.py": "MODULES",
        "meshtrain/config/build.py": "the keys `build`, which files.py restricts to meshtrain in a "
        "config.json",
        "meshtrain/config/load.py": "the config file that the user names",
        "meshtrain/errors.py": "optional dependencies, named in the code",
    }
    risky = re.compile(r"import_module|__import__|spec_from_file_location|\bexec_module|runpy")
    assert {name for name, path in FILES.items() if risky.search(path.read_text())} == {*places}


def test_the_modules_of_every_package_are_found_after_import_meshtrain():
    """See lazy.py; the package of families imports all of them itself."""
    packages = {name: path for name, path in FILES.items() if name.endswith("/__init__.py")}
    del packages["meshtrain/__init__.py"], packages["meshtrain/huggingface/families/__init__.py"]
    for name, path in packages.items():
        assert "lazy.load_modules_of(__name__)\n" in path.read_text(encoding="utf-8"), name


def without_encoding(path):
    """Returns the lines of a file that open a text in the encoding of the locale."""
    lines = []
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        arguments = [ast.unparse(argument) for argument in node.args]
        arguments += [ast.unparse(keyword.value) for keyword in node.keywords]
        is_mode = [re.fullmatch(r"'[rwaxbt+]+'", argument) for argument in arguments]
        if name == "open":
            is_text = True
        elif name.endswith(".open"):  # of a Path; others have arguments of other kinds
            is_text = not arguments or any(is_mode)
        elif name in ("os.fdopen", "io.TextIOWrapper") or name.endswith("TemporaryFile"):
            is_text = name == "io.TextIOWrapper" or any(is_mode)
        else:
            is_text = name.endswith((".read_text", ".write_text"))
        is_binary = any(mode and "b" in mode.string for mode in is_mode)
        if is_text and not is_binary and "encoding" not in {one.arg for one in node.keywords}:
            lines.append(node.lineno)
    return sorted(lines)


def test_every_text_is_opened_with_its_encoding():
    """In the encoding of the locale a file is another text, and ruff knows only some calls."""
    paths = [*FILES.values()]
    for folder in ("benchmarks", "docs", "launch"):
        paths += (ROOT / folder).rglob("*.py")
    found = {str(path.relative_to(ROOT)): without_encoding(path) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


def count_keys(section):
    return sum(count_keys(value) if isinstance(value, dict) else 1 for value in section.values())


def comments_of_keys(path):
    """Returns the comment of each key of a config file, on its line or directly above."""
    text = path.read_text()
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
    found = {}
    for node in ast.walk(parsed(path)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        if ast.unparse(node.value) in {"ConfigDict()", "Section()"}:  # opens a section
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
    assert len(comments) == count_keys(default.get_config().to_dict())
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


# These print text of our own, or that of a host that the user has named.
PRINTS = (
    "meshtrain/console.py",  # below all others
    "meshtrain/moved.py",  # imports nothing
    "meshtrain/parallel/xla.py",
    "meshtrain/cluster/",
    "meshtrain/supervise/",
)


def test_what_verbs_print_passes_through_one_function():
    """console.say, since names in files of others may hold codes that a terminal obeys."""
    found = []
    for file, path in FILES.items():
        calls = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.Call)]
        names = [call.func.id for call in calls if isinstance(call.func, ast.Name)]
        if "print" in names and not file.startswith(PRINTS):
            found.append(file)
    assert found == []
