"""The number of simulated devices and of processes is bounded, before jax is imported."""

import subprocess
import sys

import pytest

from meshtrain.cluster import limits
from meshtrain.errors import ConfigError
from tests.lib.paths import ROOT


@pytest.fixture
def machine(monkeypatch):
    """Sets the number of cores and the free memory in GiB."""

    def set_to(cores, gib):
        monkeypatch.setattr(limits, "_num_cores", lambda: cores)
        monkeypatch.setattr(limits, "available_memory", lambda: gib * 2.0**30)

    return set_to


@pytest.mark.parametrize(
    ("cores", "gib", "num_devices", "allowed"),
    [
        (1, 0.1, 8, True),
        (2, 16, 64, True),
        (2, 16, 256, True),
        (2, 16, 257, False),
        (2, 4, 256, True),
        (2, 1, 64, True),
        (2, 1, 65, False),  # memory
        (64, 512, 2048, True),
        (1, float("inf"), 128, True),
    ],
)
def test_devices_are_bounded_by_cores_and_memory(machine, cores, gib, num_devices, allowed):
    machine(cores, gib)
    faults = limits.device_faults("--simulate_devices", num_devices, force=False)
    assert faults == [] if allowed else "use fewer, or --force" in faults[0]
    assert limits.device_faults("--simulate_devices", num_devices, force=True) == []


@pytest.mark.parametrize("num_devices", [0, -1, 2049, 100000, 10**30])
def test_numbers_of_devices_that_cannot_work_are_rejected_even_with_force(num_devices):
    (fault,) = limits.device_faults("--simulate_devices", num_devices, force=True)
    assert fault.startswith(f"--simulate_devices={num_devices}: ")


@pytest.mark.parametrize(
    ("variables", "fault"),
    [
        ({"JAX_NUM_CPU_DEVICES": "100000"}, "JAX_NUM_CPU_DEVICES=100000: jax has at most 2048"),
        ({"JAX_NUM_CPU_DEVICES": "many"}, "JAX_NUM_CPU_DEVICES=many: use a number"),
        (
            {"XLA_FLAGS": "--a=b --xla_force_host_platform_device_count=2000"},
            "XLA_FLAGS=--xla_force_host_platform_device_count=2000: this machine has",
        ),
        ({"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}, None),
        ({"JAX_NUM_CPU_DEVICES": "-1"}, None),
    ],
)
def test_jaxs_own_variables_are_bounded_too(machine, variables, fault):
    machine(2, 16)
    if fault is None:
        return limits.check_devices(None, variables, force=False)
    with pytest.raises(ConfigError, match=fault):
        limits.check_devices(None, variables, force=False)
    return limits.check_devices(8, variables, force=False)  # the flag overrides them


def test_launch_counts_the_devices_of_all_its_processes(machine):
    machine(2, 16)
    devices = limits.device_faults("--simulate_devices", 100, num_processes=3, force=False)
    assert "=100 in each of 3 processes: this machine has 2 cores" in devices[0]
    assert limits.process_faults(8, force=False) == []
    assert "--nproc=33: this machine has 2 cores" in limits.process_faults(33, force=False)[0]
    assert limits.process_faults(33, force=True) == []
    assert limits.process_faults(10**30, force=True)


def test_the_memory_limit_of_a_container_counts(tmp_path, monkeypatch):
    (tmp_path / "max").write_text("3000\n")
    (tmp_path / "current").write_text("1000\n")
    files = ((str(tmp_path / "max"), str(tmp_path / "current")), (str(tmp_path / "no"), "/no"))
    monkeypatch.setattr(limits, "CGROUP_FILES", files)
    assert limits.available_memory() == 2000
    (tmp_path / "max").write_text("max\n")
    assert limits.available_memory() > 2000


PROGRAM = """
import sys
from meshtrain.__main__ import main
sys.argv = ["meshtrain", *sys.argv[1:]]
code = main()
# These two import jax with their own modules.
assert "jax" not in sys.modules or sys.argv[1] in ("generate", "info")
sys.exit(code)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        "train --config=configs/quickstart.py",
        "verify --config=configs/quickstart.py",
        "audit --config=configs/quickstart.py",
        "profile --config=configs/quickstart.py",
        "generate --workdir=WORKDIR",
        "info",
        "launch --nproc=2 -- --config=configs/quickstart.py --workdir=WORKDIR",
    ],
)
def test_too_many_devices_are_rejected_before_jax_is_imported(arguments, tmp_path):
    words = arguments.replace("WORKDIR", str(tmp_path / "run")).split()
    words.insert(1, "--simulate_devices=100000")
    command = [sys.executable, "-c", PROGRAM, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--simulate_devices=100000"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
