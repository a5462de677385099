"""`meshtrain launch --hosts`: over an ssh server on loopback, whose addresses are the hosts."""

import os
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from meshtrain.cli import app
from meshtrain.errors import ConfigError
from meshtrain.supervise import ssh
from tests.lib.paths import ROOT
from tests.lib.processes import free_port, wait_until_listening
from tests.lib.rows import newest_step, rows
from tests.lib.tiny_run import assert_losses_equal_uninterrupted, tiny_run

HOSTS = "127.0.0.1,127.0.0.2"
SERVER = """
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
"""
CLIENT = """
Host *
  Port {port}
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known
"""


@pytest.mark.parametrize(
    ("hosts", "fault"),
    [
        ("a,,b", "'' is not a host"),
        ("a,-oProxyCommand=x", "is not a host"),
        ("a,b;ls", "is not a host"),
        ("", "'' is not a host"),
        ("a,b c", "'b c' is not a host"),
        ("a,-v@b", "'-v@b' is not a host"),
        ("a,-b", "'-b' is not a host"),
        ("a,b@-c", "'b@-c' is not a host"),
        ("a,b,a", "a host is given twice"),
        ("a,me@A", "a host is given twice"),
    ],
)
def test_hosts_that_are_not_valid_are_rejected(hosts, fault):
    with pytest.raises(ConfigError, match=fault):
        ssh.parse_hosts(hosts)


def test_hosts_are_names_or_addresses_with_or_without_a_user():
    assert ssh.parse_hosts("a, me@b.c,10.0.0.1,fe80::1") == ["a", "me@b.c", "10.0.0.1", "fe80::1"]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--node_rank=1"], "--hosts=a,b: sets --node_rank for each host; omit these"),
        (["--nproc=0"], "--nproc=0: use 1 or more"),
    ],
)
def test_flags_that_hosts_contradict_are_rejected(flags, fault, capsys):
    assert app.main("launch", ["--hosts=a,b", *flags, "--", "--config=quickstart"]) == 2
    assert fault in capsys.readouterr().err


def test_the_secret_and_the_rank_of_this_process_are_not_on_the_command_line(monkeypatch):
    variables = {"NCCL_DEBUG": "INFO", "JAX_NUM_PROCESSES": "7", "MESHTRAIN_SECRET": "s" * 32}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    script = ssh._script(["python", "a b"])
    assert "NCCL_DEBUG=INFO" in script and "a b" in script
    assert "JAX_NUM_PROCESSES" not in script and "s" * 32 not in script


def install():
    if os.geteuid() == 0 and shutil.which("apt-get") and not shutil.which("sshd"):
        environ = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for arguments in (["update"], ["install", "-y", "openssh-server"]):
            subprocess.run(["apt-get", *arguments], env=environ, capture_output=True)
    if os.geteuid() != 0 or not shutil.which("sshd"):
        pytest.skip(
            "an ssh server is not installed, or this is not root, who can install and start it"
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Yields the folder of an ssh server, with a PATH on which `ssh` reaches it."""
    install()
    folder, port = tmp_path_factory.mktemp("ssh"), free_port()
    for name in ("host", "key"):
        make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name]
        subprocess.run(make, check=True)
    for name, text in (("sshd_config", SERVER), ("config", CLIENT)):
        (folder / name).write_text(text.format(port=port, folder=folder))
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(
        f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n'
    )
    (folder / "bin" / "ssh").chmod(0o755)
    os.makedirs("/run/sshd", exist_ok=True)
    command = [shutil.which("sshd"), "-D", "-f", folder / "sshd_config", "-E", folder / "log"]
    process = subprocess.Popen(command)
    for host in HOSTS.split(","):
        wait_until_listening(process, port, host=host)
    yield SimpleNamespace(folder=folder, path=f"{folder / 'bin'}:{os.environ['PATH']}")
    process.terminate()
    process.wait(timeout=30)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_run_on_two_hosts_saves_at_a_signal_and_resumes(server, tmp_path):
    steps = 60
    arguments, environ = tiny_run(tmp_path, steps=steps)
    command = [
        sys.executable,
        "-m",
        "meshtrain",
        "launch",
        f"--hosts={HOSTS}",
        "--simulate_devices=2",
    ]
    environ = {**environ, "PATH": server.path}

    def start():
        return subprocess.Popen([*command, "--", *arguments], cwd=ROOT, env=environ)

    first = start()
    try:
        deadline = time.monotonic() + 200
        while newest_step(tmp_path / "run") < 1 and time.monotonic() < deadline:
            assert first.poll() is None
            time.sleep(0.1)
        first.send_signal(signal.SIGTERM)
        assert first.wait(timeout=120) == 75
    finally:
        first.kill()
    events = rows(tmp_path / "run", "events.jsonl")
    (stopped,) = (row["step"] for row in events if row["event"] == "preempted")
    assert 0 < stopped < steps
    second = start()
    try:
        assert second.wait(timeout=300) == 0
    finally:
        second.kill()
    assert_losses_equal_uninterrupted(tmp_path, steps=steps)


@pytest.fixture
def fake_ssh(tmp_path, monkeypatch):
    """Puts an `ssh` first on the PATH that knows aliases, and runs commands on this host."""
    (tmp_path / "ssh").write_text("""#!/bin/sh
if [ "$1" = -G ]; then
  case $2 in *nowhere) echo "hostname no.such.host.invalid";; *) echo "hostname 127.0.0.1";; esac
else
  for command; do :; done
  exec sh -c "$command"
fi
""")
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_an_alias_of_ssh_is_replaced_by_its_address(fake_ssh):
    assert ssh._name_of("me@alias") == "127.0.0.1"
    ssh._check(["alias", "other"], f"{ssh._name_of('alias')}:1")


def test_a_first_host_that_the_others_cannot_look_up_is_reported_at_once(fake_ssh, capsys):
    arguments = ["--", "--config=quickstart", "--workdir=run"]
    assert app.main("launch", ["--hosts=nowhere,other", *arguments]) == 2
    first, second = capsys.readouterr().err.splitlines()
    text = "cannot look up no.such.host.invalid, the first host: Name or service not known; use"
    assert first.startswith(f"--hosts: nowhere: {text}")
    assert second.startswith(f"--hosts: other: {text}")
    flags = ["--hosts=alias,other", "--coordinator=no.such.host.invalid:1"]
    assert app.main("launch", [*flags, *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.slow
def test_hosts_that_cannot_be_used_are_reported_before_anything_is_started(
    server, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("PATH", server.path)
    monkeypatch.chdir(tmp_path)
    arguments = ["--hosts=127.0.0.1,127.0.0.3", "--", "--config=quickstart", "--workdir=run"]
    assert app.main("launch", arguments) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("--hosts: 127.0.0.3: ") and "Connection refused" in line
    monkeypatch.setattr(sys, "executable", "/no/python")
    assert app.main("launch", [f"--hosts={HOSTS}", *arguments[1:]]) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2 and all("or /no/python, which all hosts need" in one for one in lines)
    assert not (tmp_path / "run").exists()
