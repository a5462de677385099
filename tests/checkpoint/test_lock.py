"""One run at a time in a workdir."""

import signal
import subprocess
import sys

import pytest

import meshtrain
from meshtrain import storage
from meshtrain.checkpoint import lock
from meshtrain.train import train
from tests.lib.configs import quick
from tests.lib.paths import ROOT

HOLD = """
import sys, time
from meshtrain import storage
from meshtrain.checkpoint import lock
with lock.held(storage.open_workdir(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


def test_a_second_run_in_a_workdir_is_rejected_while_the_first_is_alive(tmp_path):
    first = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert first.stdout.readline() == "held\n"
        with pytest.raises(
            meshtrain.ConfigError, match=f"another run is in it, pid {first.pid} on "
        ):
            train(quick(steps=1), workdir=tmp_path)
        assert not (tmp_path / "events.jsonl").exists()
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
        first.stdout.close()
    with lock.held(storage.open_workdir(tmp_path)):  # the lock of a dead process is released
        pass
