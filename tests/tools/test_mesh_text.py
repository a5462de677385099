"""`meshtrain info --mesh`: the drawing shows which device holds what, as jax places it."""

import jax
import numpy as np
import pytest

from meshtrain import hardware
from meshtrain import state as states
from meshtrain.cli import app
from meshtrain.config.build import build
from meshtrain.config.load import load_config
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.parallel.mesh import make_mesh
from meshtrain.program import assemble
from meshtrain.tools import mesh_drawing
from meshtrain.tools.hlo import target

QUICKSTART = ["--mesh", "--config=quickstart"]
CUBE = [f"--config.mesh.{axis}=2" for axis in ("data", "fsdp", "tensor")]


@pytest.fixture(autouse=True)
def same_environment(monkeypatch):
    """What `--device` sets before jax is imported would stay for later tests."""
    monkeypatch.setattr(target, "prepare", lambda: None)


def printed(capsys, *flags):
    code = app.main("info", [*QUICKSTART, *flags])
    out, err = capsys.readouterr()
    return code, out.splitlines(), err


def test_the_drawing_of_eight_devices(capsys):
    code, lines, _ = printed(capsys, *CUBE)
    assert code == 0
    assert lines[:12] == [
        "mesh data 2 x fsdp 2 x tensor 2 · 8 cpu · 1 host",
        "",
        "                  tensor 0  tensor 1",
        "  data 0  fsdp 0  d0        d1",
        "          fsdp 1  d2        d3",
        "  data 1  fsdp 0  d4        d5",
        "          fsdp 1  d6        d7",
        "",
        "axis    size  link           in a step",
        "data       2  within a host  gradients, once",
        "fsdp       2  within a host  parameters and gradients, for each micro-batch",
        "tensor     2  within a host  activations, in each layer",
    ]
    rows = [line.split("  ") for line in lines]
    assert ["vocab, embed", "vocab: tensor, embed: fsdp", "1/4", "tokens/embedding"] in [
        [cell.strip() for cell in row if cell.strip() and "." not in cell] for row in rows
    ]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_the_bytes_on_a_device_are_those_of_the_program(capsys, zero_stage):
    flags = [*CUBE, f"--config.train.zero_stage={zero_stage}"]
    _, lines, _ = printed(capsys, *flags)
    cfg = parse(load_config("quickstart", flags), num_devices=8)
    state = assemble(cfg, build(cfg, data=[])).abstract_state
    expected = [states.bytes_per_device(tree) / 1e6 for tree in (state.params, state.opt_state)]
    found = {line.split("  ")[0]: line.split()[-2:] for line in lines[-3:]}
    assert [found[name][0] for name in ("parameters", "optimizer state")] == [
        f"{one:,.2f}" for one in expected
    ]
    gradients = float(found["gradients"][0]) / float(found["gradients"][1])
    assert gradients == pytest.approx(1 / 4 if zero_stage >= 2 else 1 / 2, rel=0.02)


def test_a_device_is_drawn_where_jax_places_its_shard():
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    grid = mesh_drawing.grid_of_mesh(mesh, 1, None)
    sharding = jax.NamedSharding(mesh, jax.P("fsdp", "tensor"))
    for device, (rows, columns) in sharding.devices_indices_map((4, 6)).items():
        place = np.argwhere(grid.numbers == jax.devices().index(device))[0]
        at = dict(zip(AXES, place.tolist(), strict=True))
        assert (rows.start // 2, columns.start // 3) == (at["fsdp"], at["tensor"])


@pytest.mark.parametrize(
    ("device", "per_host", "links"),
    [
        # name, and bytes/s of the data sheet: NVLink inside a host, one adapter for each GPU
        # between hosts
        ("h200", 8, ("between hosts, 50 GB/s", "within a host, 450 GB/s")),
        ("v5e", 64, ("within a slice, 90 GB/s", "within a slice, 90 GB/s")),
        ("v5e", 16, ("between slices, 3.125 GB/s", "within a slice, 90 GB/s")),
    ],
)
def test_the_links_of_absent_devices(capsys, device, per_host, links):
    flags = [f"--device={device}", "--devices=64", f"--devices_per_host={per_host}"]
    batch = ["--config.train.global_batch=64", "--config.mesh.data=16", "--config.mesh.fsdp=4"]
    code, lines, _ = printed(capsys, *flags, *batch)
    assert code == 0 and f"64 {device} · {64 // per_host} host" in lines[0]
    rows = {line.split()[0]: line for line in lines if line.startswith(("data ", "fsdp "))}
    assert links[0] in rows["data"] and links[1] in rows["fsdp"]


def test_hosts_are_named_above_their_rows_or_in_each_cell():
    def drawn(per_host, **sizes):
        numbers = [sizes.get(axis, 1) for axis in AXES]
        grid = mesh_drawing.grid_of_sizes(numbers, per_host, 1, hardware.devices()["h200"])
        return [*mesh_drawing.device_lines(grid)]

    assert drawn(2, fsdp=2, tensor=2) == [
        "          tensor 0  tensor 1",
        "host 0",
        "  fsdp 0  d0        d1",
        "host 1",
        "  fsdp 1  d2        d3",
    ]
    assert drawn(2, fsdp=4) == [
        "  fsdp 0  fsdp 1  fsdp 2  fsdp 3",
        "  h0 d0   h0 d1   h1 d2   h1 d3",
    ]
    large = drawn(8, data=256, fsdp=16)
    assert large[-1] == "  ... 240 more rows, up to d4095"
    assert max(map(len, large)) <= mesh_drawing.WIDTH and "..." in large[0]


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        (["--mesh"], "--mesh: draws the mesh of a config; add --config=FILE"),
        (["--config=quickstart"], "--config=quickstart: only --mesh reads a config"),
        (["--config.train.steps=3"], "--config.train.steps=3: add --config=FILE"),
        (
            ["--simulate_device=2"],
            '--simulate_device: unknown argument (did you mean "--simulate_d',
        ),
        (["--device=h200"], "--device=h200: only with --mesh"),
        (["--devices=8"], "--devices=8: only with --device=NAME"),
        ([*QUICKSTART, "--device=h200"], "--device=h200: say how many there are"),
        (
            [*QUICKSTART, "--device=h2", "--devices=8"],
            '--device=h2: unknown (did you mean "h200"?)',
        ),
        ([*QUICKSTART, "--device=h200", "--devices=0"], "--devices=0: use 1 or more"),
        ([*QUICKSTART, "--device=h200", "--devices=12"], "not divisible by --devices_per_host=8"),
        ([*QUICKSTART, "--device=h200", "--devices=8", "--simulate_devices=8"], "use one of them"),
        ([*QUICKSTART, "--config.mesh.fsdp=3", "--device=h200", "--devices=8"], "or --devices=3"),
        ([*QUICKSTART, "--config.mesh.fsdp=3", "--simulate_devices=8"], "--simulate_devices=3"),
        ([*QUICKSTART, "--config.mesh.auto=True"], "mesh.auto=True: only train, audit and profile"),
    ],
)
def test_a_mistake_is_one_line(capsys, flags, fault):
    assert app.main("info", flags) == 2
    out, err = capsys.readouterr()
    assert fault in err.splitlines()[0] and not out
