"""launch/skypilot.yaml matches SkyPilot's schema, and its commands train.

Processes on this machine stand in for hosts.
"""

import argparse
import json
import os
import secrets
import subprocess
import sys

import jsonschema
import pytest
import yaml

from meshtrain.cli.launch import add_flags
from meshtrain.supervise import messages
from tests.lib.paths import ROOT
from tests.lib.processes import free_port
from tests.lib.tiny_run import assert_losses_equal_uninterrupted, tiny_run

TASK = yaml.safe_load((ROOT / "launch" / "skypilot.yaml").read_text())
SCHEMA = json.loads((ROOT / "tests" / "lib" / "skypilot_task_schema.json").read_text())


def test_the_task_matches_the_schema_of_skypilot():
    jsonschema.validate(TASK, SCHEMA)
    with pytest.raises(jsonschema.ValidationError, match="num_node"):
        jsonschema.validate({**TASK, "num_node": 2}, SCHEMA)


def test_the_task_does_not_start_without_a_workdir_and_a_secret():
    # `sky launch` ends with an error for a variable that is null.
    assert TASK["envs"]["WORKDIR"] is None
    assert TASK["secrets"] == {messages.SECRET_VARIABLE: None}


def test_each_host_starts_a_supervisor_with_its_rank_and_the_first_address():
    environ = {
        "PATH": os.environ["PATH"],
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "CONFIG": TASK["envs"]["CONFIG"],
        "WORKDIR": "s3://bucket/my run",
    }
    command = TASK["run"].replace("exec .venv/bin/python", "printf '%s\\n'")
    printed = subprocess.check_output(["bash", "-euc", command], env=environ, text=True)
    module, name, verb, *arguments = printed.splitlines()
    assert [module, name, verb] == ["-m", "meshtrain", "launch"]
    given, run = arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :]
    assert given[:3] == ["--nnodes=2", "--node_rank=1", "--coordinator=10.0.0.1:8476"]
    flags = argparse.ArgumentParser()
    add_flags(flags)
    flags.parse_args(given)
    assert run == ["--config=configs/default.py", "--workdir=s3://bucket/my run"]


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_commands_of_the_task_train_on_two_hosts(tmp_path):
    arguments, environ = tiny_run(tmp_path, steps=40)
    command = TASK["run"].replace(".venv/bin/python", sys.executable)
    command = command.replace(":8476", f":{free_port()}").replace(
        '--config="$CONFIG" --workdir="$WORKDIR"', '"$@"'
    )
    assert '"$@"' in command and ":8476" not in command
    environ |= {
        "JAX_NUM_CPU_DEVICES": "2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
        messages.SECRET_VARIABLE: secrets.token_hex(32),
    }
    environ.pop("XLA_FLAGS", None)
    hosts = [
        subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments, "--config.mesh.data=-1"],
            cwd=ROOT,
            env={**environ, "SKYPILOT_NODE_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [host.wait(300) for host in hosts] == [0, 0]
    assert (tmp_path / "run" / "logs" / "rank-1.log").exists()
    assert_losses_equal_uninterrupted(tmp_path, steps=40)
