"""Fixtures and settings of all tests, which run on eight simulated CPU devices on any machine."""

import collections
import gc
import os
from pathlib import Path

from meshtrain.cli.verify import NO_LOCATIONS, QUICK_COMPILE_FLAGS
from meshtrain.cluster import runtime
from meshtrain.parallel import accelerator
from meshtrain.tools.verify import GC_THRESHOLDS

# Tests spend most of their time compiling; these flags halve it. Child processes inherit them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_COMPILE_FLAGS}"
os.environ.setdefault(*NO_LOCATIONS)

import jax
import numpy as np
import pytest
from jax._src import cache_key, compiler
from jax._src.cudnn import fused_attention_stablehlo

pytest.register_assert_rewrite("tests.lib")  # its failed assertions show their values too
pytest_plugins = ["slow_groups"]  # the options --slow-group and --write-durations
gc.set_threshold(*GC_THRESHOLDS)

# Set before any test initializes a backend.
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
runtime.set_num_threads(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# No persistent compile cache: on CPU a program for several devices that is read from the cache runs
# its collectives in a different order on each device, and hangs (jax 0.10.2 and 0.12.0.1). A test
# that presents one device to a run would turn it on (`runtime.setup`) for those that follow.
# `compile_once` shares programs in memory instead.
jax.config.update("jax_enable_compilation_cache", False)


compile_program, programs = compiler.backend_compile_and_load, {}


def compile_once(backend, module, devices, options, host_callbacks):
    """Returns the program that an earlier test compiled from the same module, if any."""
    if host_callbacks:
        return compile_program(backend, module, devices, options, host_callbacks)
    key = cache_key.get(module, np.array(list(devices)), options, backend)
    if key not in programs:
        programs[key] = compile_program(backend, module, devices, options, host_callbacks)
    return programs[key]


compiler.backend_compile_and_load = compile_once


# Programs that a process keeps: each has 10 to 100 memory mappings, and Linux allows it 65,530.
MAX_PROGRAMS = 2000
# Growth of a process from where it was after its programs were freed: three of them with 7 GB each
# do not fit on a machine of 24 GiB.
MAX_GROWTH = 3 << 30
memory_before = [0]  # bytes, at the start and after programs were freed


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(autouse=True)
def few_programs():
    """Frees the programs when very many are kept, or they take much memory.

    The tests that follow have to trace and compile again what they share with earlier ones, such as
    jax's own functions.
    """
    yield
    if not memory_before[0]:
        memory_before[0] = resident_bytes()
    growth = resident_bytes() - memory_before[0]
    if len(programs) > MAX_PROGRAMS or growth > MAX_GROWTH:
        programs.clear()
        jax.clear_caches()
        gc.collect()
        memory_before[0] = resident_bytes()


@pytest.fixture(autouse=True)
def environment():
    """Undoes a test's changes of variables, which the processes of later tests would inherit.

    The main function of a script sets some for its own children, and tests call it.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(dict(before.items() - os.environ.items()))


@pytest.fixture(scope="module", autouse=True)
def locations(request):
    """In these folders, operations have the lines of the code that made them."""
    if request.path.parent.name not in ("audit", "hlo", "profile"):
        yield
        return
    programs.clear()  # the key of a program does not contain them
    jax.clear_caches()
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


def pytest_collection_modifyitems(items):
    """Runs the files with most slow tests first: a worker that starts one last delays the end."""
    weights = collections.Counter()
    for item in items:
        weights[item.path] += 20 if item.get_closest_marker("slow") else 1
    items.sort(key=lambda item: -weights[item.path])  # stable: the order within a file stays


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def tiny():
    """A config of three quick training steps; each test gets its own copy, which it may change."""
    from tests.lib.configs import tiny_config  # after register_assert_rewrite

    return tiny_config()


KILLS = pytest.StashKey[dict]()


@pytest.fixture
def kill_table(pytestconfig):
    """The finding for each planted bug (None: not found), printed at the end of the session."""
    return pytestconfig.stash.setdefault(KILLS, {})


def pytest_terminal_summary(terminalreporter, config):
    kills = config.stash.get(KILLS, {})
    if not kills:
        return
    num_killed = sum(found is not None for found in kills.values())
    terminalreporter.section(f"planted bugs: {num_killed} of {len(kills)} found")
    for name, found in kills.items():
        terminalreporter.write_line(f"{name}: {(found or 'SURVIVED')[:110]}")


@pytest.fixture
def simulated_gpu(monkeypatch):
    """Lets a host without a GPU lower programs for one; skips the checks for the cuDNN library."""
    monkeypatch.setattr(accelerator, "platform", lambda: "gpu")
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(
        fused_attention_stablehlo, "is_cuda_compute_capability_equal", lambda _: False
    )
