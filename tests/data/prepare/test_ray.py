"""`meshtrain prepare --ray` on a local cluster writes the same files as one process."""

import importlib.util
import subprocess
import sys

import pytest

from tests.lib.paths import ROOT
from tests.lib.prepare import content, prose, run, write_jsonl

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs the extra `ray`"
)
# argv: arguments of `meshtrain prepare`. The cluster ends with the process.
PROGRAM = """
import sys
import ray
sys.path[:0] = ["."]
from meshtrain.cli import app
if __name__ == "__main__":
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    sys.exit(app.main("prepare", sys.argv[1:]))
"""


def run_on_ray(*flags):
    command = [sys.executable, "-c", PROGRAM, *map(str, flags), "--ray"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@needs_ray
@pytest.mark.multiprocess
@pytest.mark.slow
def test_tasks_of_a_cluster_write_the_same_files_as_one_process(tmp_path):
    for number in range(5):
        texts = [prose(10 * number + seed, 40) for seed in range(10)]
        write_jsonl(tmp_path / "in" / "", texts).rename(tmp_path / "in" / f"{number}.jsonl")
    flags = [tmp_path / "in", "--shard_tokens=900", r"--template={text}\n"]
    assert run(*flags, f"--output={tmp_path / 'reference'}") == 0
    ran = run_on_ray(*flags, f"--output={tmp_path / 'out'}")
    assert ran.returncode == 0, ran.stderr
    assert content(tmp_path / "out") == content(tmp_path / "reference")
    assert "documents" in ran.stdout
    again = run_on_ray(*flags, f"--output={tmp_path / 'out'}")
    assert "is already prepared" in again.stdout and again.returncode == 0
    # A fault of a document is that of its part; the other parts are finished, and remain.
    (tmp_path / "in" / "1.jsonl").write_text("no JSON\n")
    failed = run_on_ray(*flags, f"--output={tmp_path / 'failed'}")
    assert failed.returncode == 2
    assert f"{tmp_path / 'in' / '1.jsonl'}:1: not JSON" in failed.stderr
    ran = run_on_ray(*flags, f"--output={tmp_path / 'failed'}", "--skip_bad")
    assert ran.returncode == 0, ran.stderr


@needs_ray
@pytest.mark.parametrize(
    "address, cause",
    [
        ("127.0.0.1:1", "RAY_ADDRESS=127.0.0.1:1: [Errno 111] Connection refused"),
        ("nowhere", "Invalid address format: nowhere"),
    ],
)
def test_without_a_cluster_the_error_is_one_line(address, cause, tmp_path, capsys, monkeypatch):
    # Without an address Ray takes any cluster of this machine, also one of another test.
    monkeypatch.setenv("RAY_ADDRESS", address)
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--ray") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"--ray: no Ray cluster is reached from here: {cause}; start one")


def test_ray_and_a_part_exclude_each_other(tmp_path, capsys):
    path = write_jsonl(tmp_path / "in")
    assert run(path, f"--output={tmp_path / 'out'}", "--ray", "--part=0/2") == 2
    assert "--part=0/2 and --ray: give one of them" in capsys.readouterr().err
