"""--target names devices that the host lacks; the step is compiled for them."""

import json
import os
import subprocess
import sys

import pytest
from jax._src.cudnn import fused_attention_stablehlo

from meshtrain import hardware
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.errors import ConfigError, install_command
from meshtrain.tools.hlo import target
from tests.lib.paths import ROOT


@pytest.fixture
def wheels(monkeypatch):
    monkeypatch.setattr(target, "_is_installed", lambda module: True)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("h200:1", (1, 1)),
        ("h200:8", (1, 8)),
        ("h200:64", (8, 8)),
        ("h200:32x8", (32, 8)),
        ("v5e:4x4", (4, 4)),
        ("v5p:4x4x4", (4, 4, 4)),
        ("v5e:4x4:2", (4, 4)),
    ],
)
def test_a_size_is_hosts_and_devices_of_gpus_and_the_torus_of_tpus(wheels, text, sizes):
    device, found = target.parse(text)
    assert (device.name, found) == (text.partition(":")[0], sizes)
    assert target.num_slices(text) == (2 if text.endswith(":2") else 1)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("h20:8", 'unknown device (did you mean "h200"?); use one of v100, '),
        ("h200", "nothing is no size of a cluster; use h200:8"),
        ("h200:0", "0 is no size"),
        ("h200:13", "13 is no size"),
        ("h200:2x2x2", "2x2x2 is no size"),
        ("v5e:16", "16 is no size of a cluster; use v5e:4x4"),
        ("v5e:4x", "4x is no size"),
        ("v5e:4x4:0", "4x4:0 is no size of a cluster; use v5e:4x4, a torus, or 4x4:2, two slices"),
        ("v5e:4x4:2:2", "4x4:2:2 is no size"),
        ("h200:8:2", "8:2 is no size"),
    ],
)
def test_a_target_that_is_none_is_one_fault(wheels, text, fault):
    with pytest.raises(ConfigError) as error:
        target.parse(text)
    assert fault in str(error.value) and "\n" not in str(error.value)


def test_jax_checks_fused_attention_for_the_target(monkeypatch):
    for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(
            fused_attention_stablehlo, name, getattr(fused_attention_stablehlo, name)
        )
    for capability, is_hopper in (("8.6", False), ("9.0", True), ("10.0", True)):
        target._set_capability(capability)
        assert fused_attention_stablehlo.check_compute_capability("9.0") == is_hopper
        assert fused_attention_stablehlo.is_cuda_compute_capability_equal(capability)
        assert not fused_attention_stablehlo.is_cuda_compute_capability_equal("10.3")


@pytest.mark.parametrize(("text", "extra"), [("h200:8", "aot-gpu"), ("v5e:4x4", "aot-tpu")])
def test_missing_wheels_are_one_line(monkeypatch, capsys, text, extra):
    monkeypatch.setattr(target, "_is_installed", lambda module: False)
    assert app.main("audit", ["--config=quickstart", f"--target={text}"]) == 2
    error = capsys.readouterr().err
    assert error.endswith(f"is not installed; {install_command(extra)}\n")
    assert error.count("\n") == 1


@pytest.mark.parametrize("flag", ["--output", "--keep_hlo"])
def test_a_file_that_cannot_be_written_is_found_before_compiling(flag, tmp_path, capsys):
    for file in (tmp_path, tmp_path / "missing" / "audit.json"):
        assert app.main("audit", ["--config=quickstart", f"{flag}={file}"]) == 2
        expected = f"{flag}={file}: use a file in a folder that can be written\n"
        assert capsys.readouterr().err == expected


def test_every_gpu_of_the_table_can_be_a_target():
    for device in hardware.devices().values():
        if device.chip:
            text = target.gpu_config(device)
            assert (
                f'name: "{device.kinds[0]}"' in text and f"core_count: {device.chip.cores} " in text
            )


def audited(name, *arguments):
    """Runs the verb in a process of its own; skips the test without the compiler."""
    try:
        target.parse(name)
    except ConfigError as error:
        pytest.skip(str(error))
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "meshtrain",
            "audit",
            "--config=quickstart",
            f"--target={name}",
            *arguments,
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_the_step_is_compiled_for_gpus_that_are_not_there(tmp_path):
    options = ["--config.mesh.data=2", "--config.mesh.fsdp=4", "--config.train.dtype=bfloat16"]
    outputs = [f"--output={tmp_path}/audit.json", f"--keep_hlo={tmp_path}/step.hlo"]
    done = audited("h200:8", *options, *outputs)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "audit.json").read_text())
    assert found["device"] == "8 NVIDIA H200" and 0 < found["roofline"]["mfu"] < 1
    assert "__cudnn$fmhaSoftmax" in (tmp_path / "step.hlo").read_text()
    rows = {row["name"]: row for row in found["roofline"]["rows"]}
    c = load.load_config("quickstart")
    kv_width, d = c.model.num_kv_heads * c.model.d_model // c.model.num_heads, c.model.d_model
    layer = 2 * d * d + 2 * d * kv_width + 3 * d * c.model.d_ff
    tokens = c.train.global_batch * c.data.seq_len / 8
    # 6 FLOPs per token and weight of the matrix products, output head included.
    weights = c.model.num_layers * layer + d * c.model.vocab_size
    assert rows["matrix products"]["flops"] == 6 * weights * tokens
    # Of S x S x d: 2 products forward, 5 backward, half of it masked.
    assert rows["attention"]["flops"] == c.model.num_layers * 7 * c.data.seq_len * d * tokens
    memory = found["memory"]
    parts = ("parameters", "optimizer_state", "batch", "activations", "gradients", "temporaries")
    assert sum(memory[part] for part in parts) == memory["peak"] < memory["capacity"] == 141e9
    assert "fits" in done.stdout and "MFU at most" in done.stdout


@pytest.mark.slow
def test_two_compilers_for_tpus_run_at_once():
    """libtpu's lock file admits one process, which is right for TPUs that are there."""
    try:
        target.parse("v5e:2x2")
    except ConfigError as error:
        pytest.skip(str(error))
    program = """
import sys
from meshtrain.tools.hlo import target
target.prepare()
print(len(target.devices_of("v5e:2x2")), flush=True)
sys.stdin.read()
"""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    with (
        subprocess.Popen([sys.executable, "-c", program], **pipes) as first,
        subprocess.Popen([sys.executable, "-c", program], **pipes) as second,
    ):
        # Both have loaded libtpu before either ends.
        found = [process.stdout.readline() for process in (first, second)]
        for process in (first, second):
            process.communicate()
    assert found == ["4\n", "4\n"]


@pytest.mark.slow
def test_a_mesh_that_does_not_fit_the_target_is_one_line():
    done = audited("h200:8", "--config.mesh.data=2")
    assert done.returncode == 2
    expected = (
        "mesh.data=2 needs 2 devices and there are 8; use --target=h200:2, or set one axis to -1"
    )
    assert done.stderr.splitlines()[-1] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"), [("h200:16", dict(data=2, fsdp=8)), ("v5e:4x4:2", dict(data=2, fsdp=16))]
)
def test_of_hybrid_sharding_only_the_gradients_of_data_leave_a_slice(name, sizes, tmp_path):
    file, num_devices = tmp_path / "audit.json", sizes["data"] * sizes["fsdp"]
    flags = [f"--config.mesh.{axis}={size}" for axis, size in (sizes | dict(slices=2)).items()]
    dtype, batch = "--config.train.dtype=bfloat16", f"--config.train.global_batch={num_devices}"
    done = audited(name, *flags, dtype, batch, f"--output={file}")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    links = {row["axes"]: row for row in found["links"]["by_axes"]}
    of_slice = found["links"]["leaving_slice"]
    # 2 (n - 1) / n of a shard in float32, n = 2 slices; TPUs pad small shards to tiles of 8 x 128.
    padding = 1.0001 if name.startswith("h200") else 1.5
    assert found["param_bytes"] <= of_slice / (num_devices / 2) <= padding * found["param_bytes"]
    assert links["fsdp"]["slices"] == links["data"]["host"] == 0 < links["fsdp"]["host"]
    rate = {row["name"]: row["rate"] for row in found["roofline"]["transfers"]}
    network, link = (50e9, 450e9) if name.startswith("h200") else (3.125e9, 90e9)
    assert (rate["data"], rate["fsdp"]) == (network, link)
