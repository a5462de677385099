"""The command line: which verbs there are, and that mistakes are reported before jax is loaded."""

import ast
import os
import re
import subprocess
import sys

import jax
import pytest

import meshtrain
from meshtrain import errors
from meshtrain.cli import app, verbs
from meshtrain.config import load
from tests.lib.paths import ROOT

HEAVY = ("jax", "flax", "orbax", "optax", "rich", "tokenizers", "pyarrow")
QUICKSTART = "--config=configs/quickstart.py"
JOIN = ["train", "--coordinator=localhost:9", "--num_processes=2", "--process_id=1"]
PROGRAM = f"""
import sys
try:
    from meshtrain import __main__
    code = __main__.main()
except SystemExit as error:  # --help
    code = error.code
print("loaded:", code, [name for name in {HEAVY} if name in sys.modules])
"""


def run(*arguments):
    """Returns exit code of `meshtrain ARGUMENTS...`, the HEAVY modules loaded, and errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=ROOT, capture_output=True, text=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("loaded: "))
    code, _, loaded = line.removeprefix("loaded: ").partition(" ")
    return int(code), ast.literal_eval(loaded), done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--help"], 0, ""),
        (["help"], 0, ""),
        (["--version"], 0, ""),
        *(([verb, "--help"], 0, "") for verb in verbs.NAMES),
        (["completion", "bash"], 0, ""),
        (["completion", "csh"], 2, "csh: use one of bash, zsh, fish"),
        (["schedule", "--schedule=1f1b", "--stages=2", "--microbatches=4"], 0, ""),
        (["launch", "--", "--config=configs/nope.py"], 2, "rank 0"),
        ([], 0, ""),
        (
            ["train"],
            2,
            "the following arguments are required: --config; see meshtrain train --help",
        ),
        (
            ["launch", "--", "trian"],
            2,
            'trian: neither a verb nor a script (did you mean "train"?)',
        ),
        (["launch", "--", "bash", "x.sh"], 2, "bash: neither a verb nor a script; use a verb of"),
        (["trian"], 2, "trian: unknown verb; use one of train, launch"),
        ([QUICKSTART, "--config.train.stepz=3"], 2, 'did you mean "train.steps"?'),
        ([QUICKSTART, "--config.train.dtype=int8"], 2, "train.dtype='int8': use one of"),
        (["generate", "--wrkdir=x"], 2, '--wrkdir: unknown argument (did you mean "--workdir"?)\n'),
        (["evaluate", "--max_batchs=2", "--workdir=x"], 2, "x: not a run"),
        (
            ["verify", QUICKSTART, "--quik"],
            2,
            '--quik: unknown argument (did you mean "--quick"?)\n',
        ),
        (
            ["launch", QUICKSTART],
            2,
            "--config: unknown argument; the arguments of the run come after --\n",
        ),
        ([QUICKSTART, "--config.mesh.fsdp=3", "--simulate_devices=4"], 2, "mesh.fsdp=3 needs"),
        (["verify", "--config=configs/nope.py"], 2, "configs/nope.py: no such file"),
        ([QUICKSTART, "--platform=rocm"], 2, "--platform=rocm: use one of cpu, cuda, tpu"),
        ([QUICKSTART, "--backend=nccl"], 2, "--backend: unknown argument; --platform=cpu, cuda or"),
        (
            [QUICKSTART, "--platform=gpu", "--simulate_devices=2"],  # as many call it
            2,
            "--platform=cuda and --simulate_devices=2: simulated devices are CPUs; give one of",
        ),
        (
            [QUICKSTART, "--platform=tpu", "--simulate_devices=2"],
            2,
            "--platform=tpu and --simulate_devices=2: simulated devices are CPUs; give one of",
        ),
        ([QUICKSTART, "--num_devices=0"], 2, "--num_devices=0: use 1 or more"),
        (
            [QUICKSTART, "--simulate_devices=4", "--num_devices=5"],
            2,
            "--num_devices=5: --simulate_devices=4 makes 4 in all; use 4 or fewer",
        ),
        (
            [QUICKSTART, "--simulate_devices=8", "--num_devices=4", "--config.mesh.fsdp=8"],
            2,
            "use sizes whose product divides 4, or --num_devices=8",
        ),
        (
            [*JOIN, QUICKSTART, "--simulate_devices=8", "--num_devices=3"],
            2,
            "--num_devices=3: is not divisible by the 2 processes; use 2 or 4",
        ),
        (
            ["plan", QUICKSTART, "--device=h100", "--devices=8", "--num_devices=4"],
            2,
            "--num_devices=4: is for devices that are here; --devices says how many to plan for",
        ),
        (
            ["launch", "--nproc=2", "--min_nproc=1", "--", QUICKSTART, "--num_devices=4"],
            2,
            "--min_nproc=1 and, after --, --num_devices=4: a run that continues with fewer",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_needs_no_devices_does_not_load_jax(arguments, code, message):
    found, loaded, errors = run(*arguments)
    assert (found, loaded) == (code, [])
    assert message in errors


def test_the_package_loads_jax_when_a_name_needs_it():
    program = (
        "import sys, meshtrain; assert 'jax' not in sys.modules; meshtrain.Metrics; assert 'jax' "
        "in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", meshtrain.__all__)
def test_every_public_name_is_there_and_shadows_no_module(name):
    assert getattr(meshtrain, name).__name__ == name
    assert not (ROOT / "meshtrain" / name).exists()
    assert not (ROOT / "meshtrain" / f"{name}.py").exists()


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'trainn'"):
        meshtrain.trainn  # noqa: B018


def test_help_lists_the_verbs_and_describes_one(capsys):
    def printed(*arguments):
        assert app.command([*arguments]) == 0
        return capsys.readouterr().out

    overview = printed("--help")
    assert printed("help") == printed("-h") == overview
    listed = {line.split()[0]: line for line in overview.splitlines() if line.startswith("  ")}
    assert [*listed] == [*verbs.NAMES] and max(map(len, overview.splitlines())) < 80
    assert all(verbs.load(verb).summary in line for verb, line in listed.items())
    for arguments in (["help", "audit"], ["audit", "--help"], ["audit", "-h"]):
        assert printed(*arguments).startswith("usage: meshtrain audit")
    assert printed("--config=x.py", "--help").startswith("usage: meshtrain train")
    assert printed("--version") == f"meshtrain {meshtrain.__version__}\n"
    assert app.command(["help", "trian"]) == 2
    assert "trian: unknown verb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        ("trian", '(did you mean "train"?)'),
        ("verifyx", '(did you mean "verify"?)'),
        ("launhc -- --config=x", '(did you mean "launch"?)'),
        ("xyz", "schedule, checkpoint, completion"),
        ("checkpoint verifx x", '(did you mean "verify"?)'),
        ("convert --dtype=float23 a b", '(did you mean "float32"?)'),
    ],
)
def test_a_misspelt_verb_or_choice_gets_the_nearest_one(arguments, end, capsys):
    assert app.command(arguments.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "use one of " in line and line.endswith(end)


@pytest.mark.parametrize("verb", verbs.NAMES)
def test_every_verb_has_a_help_text(verb, capsys):
    assert app.main(verb, ["--help"]) == 0
    assert f"usage: meshtrain {verb}" in capsys.readouterr().out


DEVICE_MESSAGES = {
    "RESOURCE_EXHAUSTED: Out of memory allocating 256000000000000 bytes.": "256,000.000 GB could "
    "not be",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4770354232 "
    "bytes.\nStats:": "4.770 GB could",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 2.99GiB (3206250496B) on device ordinal "
    "0": "2.99GiB",
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 21G": "hbm",
    "RESOURCE_EXHAUSTED: Attempting to reserve 13.50G at the bottom of memory.": "13.50G",
    "INTERNAL: CUDA_ERROR_OUT_OF_MEMORY: out of memory": "CUDA_ERROR",
    "INTERNAL: cuBLAS: CUBLAS_STATUS_ALLOC_FAILED": "ALLOC_FAILED",
}


@pytest.mark.parametrize("message", DEVICE_MESSAGES)
def test_out_of_memory_on_a_device_is_one_line_that_says_what_to_lower(message, capsys):
    def run():
        raise jax.errors.JaxRuntimeError(message)

    assert app.report_errors(run, "train") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("out of memory: ") and DEVICE_MESSAGES[message] in line
    assert "train.num_microbatches" in line and "train.remat=full" in line and "mesh.fsdp" in line


def test_out_of_memory_on_the_host_is_one_line_too(capsys):
    def wrapped():
        try:
            raise MemoryError
        except MemoryError as error:
            raise RuntimeError("reading failed") from error

    assert app.report_errors(wrapped, "evaluate") == 2
    assert capsys.readouterr().err == "out of memory; lower --batch, or use more devices\n"


@pytest.mark.parametrize(
    "error",
    [
        ValueError("RESOURCE_EXHAUSTED: Failed writing: No space left on device"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Received message larger than max"),
        jax.errors.JaxRuntimeError("INTERNAL: an all-reduce failed"),
    ],
    ids=str,
)
def test_other_errors_are_not_taken_for_a_lack_of_memory(error):
    assert errors.memory_fault(error) is None


def test_a_model_that_no_machine_can_hold_ends_with_exit_code_2():
    sizes = {
        "model.d_model": 2**20,
        "model.d_ff": 2**30,
        "data.build": "meshtrain.data.synthetic:build",
        "train.steps": 1,
    }
    flags = [f"--config.{key}={value}" for key, value in sizes.items()]
    done = subprocess.run(
        [sys.executable, "-m", "meshtrain", "train", "--config=configs/default.py", *flags],
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    (fault,) = done.stderr.splitlines()
    assert re.match("model: parameters and optimizer state take .* GB on each device, ", fault)
    assert fault.endswith(" or shard it over more devices with mesh.fsdp")


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", QUICKSTART, f"--simulate_devices={10**30}"],
        ["train", QUICKSTART, f"--config.train.steps={10**30}"],
        ["train", QUICKSTART, "--config.optim.learning_rate=1e400"],
        ["schedule", "--schedule=1f1b", f"--stages={2**64}", "--microbatches=4"],
        ["checkpoint", "prune", ".", f"--keep={2**64}"],
        ["launch", f"--max_restarts={2**64}", "--", QUICKSTART],
    ],
    ids=lambda arguments: arguments[-1][:40],
)
def test_numbers_that_are_too_large_are_one_line_for_every_verb(arguments, capsys):
    assert app.main(arguments[0], arguments[1:]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--") or line.startswith(("train.", "optim."))


@pytest.mark.parametrize(
    "line",
    [
        "train --config=quickstart --workdir=az://b/run",
        "convert az://b/model out",
        "convert model hf://b/run",
        "verify --config=quickstart --output=gs://b/x",
        "prepare text --output=az://b/x",
        "checkpoint ls az://b/run",
        "generate --workdir=az://b/run --prompt=http://x",
        "schedule --stages=2 --microbatches=2 --schedule=gpipe --output=gs://b/x.svg",
    ],
)
def test_a_url_is_not_taken_for_a_folder(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert app.command(line.split()) == 2
    (fault,) = capsys.readouterr().err.splitlines()
    assert re.match(
        r"(--\w+=)?\w+:/.*: this version does not read or write \w+ storage; use a folder", fault
    )
    assert not list(tmp_path.iterdir())


def test_missing_data_is_reported_before_jax_is_loaded():
    program = """
import sys
from meshtrain.cli import app
code = app.main("train", ["--config=quickstart", "--config.data.path=/nonexistent"])
sys.exit(9 if "jax" in sys.modules else code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert (
        done.stderr
        == "data.path=/nonexistent: no such file or folder; give a file or a folder of data\n"
    )


@pytest.mark.parametrize(
    ("num_devices", "num_processes", "advice"),
    [
        (3, 3, "use a number of processes that divides 4, or set one axis to -1"),
        (2, 2, "use --simulate_devices=2, or set one axis to -1"),
        (1, 1, "use --simulate_devices=4, or set one axis to -1"),
    ],
)
def test_the_advice_for_a_mesh_that_does_not_fit_is_of_each_process(
    num_devices, num_processes, advice
):
    config = load.read("quickstart", ["--config.mesh.data=4"], environ={})[0]
    cfg, faults = app._parse(
        config, num_devices, flag="--simulate_devices", num_processes=num_processes
    )
    assert cfg is None
    assert faults == [f"mesh.data=4 needs 4 devices and there are {num_devices}; {advice}"]
