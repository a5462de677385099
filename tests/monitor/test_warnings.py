"""What a run warns about before it compiles: each warning where it should be, and nowhere else."""

import json
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from meshtrain import metrics
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import AXES
from meshtrain.data import tokens
from meshtrain.models.base import Model
from meshtrain.monitor import warnings
from meshtrain.program import Program, assemble
from meshtrain.train import train
from tests.lib.configs import tiny_config


def unsharded(model=None, rules=(), zero_stage=3, sizes=None, **mesh):
    """Returns the warnings about replicated parameters of a config; nothing is compiled."""
    c = tiny_config()
    c.rules = (*rules, *c.rules)
    c.mesh.update({"data": 1, **mesh})
    c.train.update(dict(zero_stage=zero_stage, global_batch=5 * 3 * 8))
    c.model.update(sizes or {})
    num_devices = int(np.prod([*mesh.values()]))
    cfg = parse(c, num_devices=num_devices)
    program = assemble(cfg, build(cfg, model=model), devices=jax.devices()[:num_devices])
    params = program.abstract_state.params
    return [*warnings.unsharded(cfg, program.model, program.mesh, params)]


def model_of(**params):
    """Returns a Model with these parameters: name -> (names of the dims, shape)."""
    return Model(
        init=lambda key: {name: jnp.zeros(shape) for name, (_, shape) in params.items()},
        axes={name: names for name, (names, _) in params.items()},
        loss=lambda params, batch, key: metrics.weighted(batch.weights),
    )


KERNEL = (("embed", "mlp"), (30, 64))


@pytest.mark.parametrize(
    ("case", "num_bytes", "text"),
    [
        pytest.param(
            dict(fsdp=5),
            4 * (2 * (3 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 2 * 128 * 32 + 32),
            "mesh.fsdp=5 does not divide model.d_model=32: 0.11 MB of parameters on each device, "
            "such as layers/mlp/down/kernel, are replicated over fsdp; use mesh.fsdp=4 or 8, or "
            "model.d_model=30 or 35",
            id="fsdp: every parameter has the dim",
        ),
        pytest.param(
            dict(tensor=4),
            4 * 2 * 2 * 32 * 2 * 8,
            "mesh.tensor=4 does not divide model.num_kv_heads=2: 0.01 MB of parameters on each "
            "device, such as layers/attention/key/kernel, are by design replicated over tensor; "
            "use mesh.tensor=2, or model.num_kv_heads=4",
            id="tensor: key and value heads",
        ),
        pytest.param(
            dict(pipeline=3, sizes=dict(num_layers=3)),
            4 * 2 * 128 * 32,
            "mesh.pipeline=3 does not divide dim 'vocab' of 128: 0.03 MB of parameters on each "
            "device, such as output/kernel, are replicated over pipeline; use mesh.pipeline=2 or "
            "4, or model.vocab_size=384",
            id="pipeline: a vocabulary that is padded to multiples of 128",
        ),
        pytest.param(
            dict(pipeline=3, tensor=2, sizes=dict(num_layers=3)),
            4 * 2 * 128 * 32 // 2,  # both tables, sharded over tensor
            "mesh.pipeline=3 x mesh.tensor=2 does not divide dim 'vocab' of 128: 0.02 MB of",
            id="a rule of two axes, and one of them by the next rule",
        ),
        pytest.param(
            dict(fsdp=5, zero_stage=1),
            None,
            "layers/mlp/down/kernel, have their optimizer state replicated over fsdp; use",
            id="ZeRO stage 1",
        ),
        pytest.param(
            dict(model=model_of(w=KERNEL), fsdp=4),
            4 * 30 * 64,
            "mesh.fsdp=4 does not divide dim 'embed' of 30: 0.01 MB of parameters on each "
            "device, such as w, are replicated over fsdp; use mesh.fsdp=3 or 5, or 'embed' of 28 "
            "or 32",
            id="a model of the user's",
        ),
        pytest.param(
            dict(
                model=model_of(w=(("embed",), (20,))),
                rules=[("embed", ("fsdp", "tensor")), ("embed", "tensor")],
                fsdp=3,
                tensor=2,
            ),
            4 * 10,
            "mesh.fsdp=3 x mesh.tensor=2 does not divide dim 'embed' of 20: 0.00 MB of "
            "parameters on each device, such as w, are replicated over fsdp; use mesh.fsdp=2 or "
            "5, or 'embed' of 18 or 24",
            id="sizes of one axis, given the other",
        ),
        pytest.param(
            dict(model=model_of(w=(("mlp",), (63,)), v=(("mlp",), (63,))), tensor=2),
            2 * 4 * 63,
            "use mesh.tensor=1 or 3, or 'mlp' of 62 or 64",
            id="one line for two arrays",
        ),
    ],
)
def test_an_axis_that_does_not_divide_a_dim_is_one_warning(case, num_bytes, text):
    (warning,) = unsharded(**case)
    assert text in warning.text
    assert num_bytes is None or warning.fields["bytes"] == num_bytes


SMALL = model_of(w=(("embed", "mlp"), (64, 64)), scale=(("kv_heads",), (5,)))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(dict(fsdp=8), id="divisible"),
        pytest.param(dict(data=2, fsdp=2, tensor=2), id="three axes"),
        pytest.param(dict(pipeline=2, tensor=2), id="a pipeline"),
        pytest.param(dict(data=5), id="no rule maps a dim to data"),
        pytest.param(dict(fsdp=5, zero_stage=0), id="ZeRO stage 0 shards nothing over fsdp"),
        pytest.param(
            dict(model=model_of(w=KERNEL), fsdp=4, rules=[("mlp", "fsdp")]),
            id="another dim is sharded over the axis",
        ),
        pytest.param(
            dict(model=model_of(w=KERNEL), fsdp=4, rules=[("embed", None)]),
            id="an earlier rule says: unsharded",
        ),
        pytest.param(
            dict(model=model_of(w=KERNEL), fsdp=2, tensor=2, rules=[("embed", ("fsdp", "tensor"))]),
            id="the next rule of the dim shards it, and another dim has the other axis",
        ),
        pytest.param(dict(model=SMALL, tensor=2), id="below 1 % of the bytes"),
    ],
)
def test_no_false_alarm_about_replicated_parameters(case):
    assert unsharded(**case) == []


class Device(NamedTuple):
    process_index: int
    slice_index: int
    platform: str
    client: Any = SimpleNamespace(local_device_count=lambda: 1)


def mesh_of(num_devices, per_network, platform="cpu", **sizes):
    """Returns shape and devices of a mesh; `per_network` neighbours share a fast network."""
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    devices = np.empty(num_devices, object)
    for number in range(num_devices):
        network = number // per_network
        # CPU processes of one host; a GPU or TPU for each process
        numbers = (network, 0) if platform == "cpu" else (number, network)
        devices[number] = Device(numbers[0], numbers[1], platform)
    return SimpleNamespace(shape=sizes, devices=devices.reshape([*sizes.values()]))


@pytest.mark.parametrize(
    ("mesh", "texts"),
    [
        (
            mesh_of(8, 4, tensor=8),
            ["mesh.tensor=8 crosses processes", "mesh.tensor=4 stays within"],
        ),
        (mesh_of(8, 4, "gpu", tensor=8), ["mesh.tensor=8 crosses hosts"]),
        (mesh_of(8, 4, "tpu", tensor=8), ["mesh.tensor=8 crosses slices"]),
        (mesh_of(16, 4, data=2, context=4, tensor=2), ["mesh.context=4", "mesh.context=2 stays"]),
        (mesh_of(12, 6, data=3, tensor=4), ["mesh.tensor=4 crosses", "mesh.tensor=2 stays"]),
        (mesh_of(4, 1, data=2, tensor=2), ["mesh.tensor=2 crosses", "mesh.tensor=1 stays"]),
        (mesh_of(8, 2, data=2, expert=4), ["mesh.expert=4 crosses", "mesh.expert=2 stays"]),
        (mesh_of(8, 8, tensor=8), []),
        (mesh_of(8, 4, data=2, tensor=4), []),
        (mesh_of(8, 4, "gpu", data=2, tensor=4), []),  # one process for each GPU
        (mesh_of(8, 4, data=8), []),
        (mesh_of(8, 4, fsdp=2, pipeline=4), []),
        (mesh_of(16, 4, data=4, context=2, tensor=2), []),
    ],
)
def test_an_axis_that_communicates_in_every_layer_stays_within_a_fast_network(mesh, texts):
    found = [warning.text for warning in warnings.crossing(mesh)]
    assert len(found) == bool(texts)
    assert all(text in found[0] for text in texts)


@jax.custom_vjp
def squared(x):
    return x * x


squared.defvjp(
    lambda x: (x * x, checkpoint_name(x, "inside")), lambda x, gradient: (2 * x * gradient,)
)


def block(layer, x, batch):
    return squared(checkpoint_name(x * layer["w"][None, None], "product"))


def stack_of_blocks(**options):
    return Model(
        init=lambda key: {"layers": {"w": jnp.ones((2, 8))}},
        axes={"layers": {"w": ("layers", "embed")}},
        embed=lambda params, batch: batch.weights[..., None] * jnp.ones((1, 1, 8)),
        block=block,
        head=lambda params, x, batch: metrics.weighted(x[..., 0]),
        constants={"is_local": np.array([True, False])},
        **options,
    )


ONLY_LOSS = Model(
    init=lambda key: {"w": jnp.ones(8)},
    axes={"w": ("embed",)},
    loss=lambda params, batch, key: metrics.weighted(
        checkpoint_name(
            batch.weights[:, :8] * params["w"][None] * jax.random.uniform(key), "scaled"
        )
    ),
)


@pytest.mark.parametrize(
    ("model", "remat", "names"),
    [
        (stack_of_blocks(), "names:product", []),
        (stack_of_blocks(), "names:product,inside", []),
        (stack_of_blocks(), "names:produkt,inside,mlp", ["produkt", "mlp"]),
        (ONLY_LOSS, "names:scaled", []),
        (ONLY_LOSS, "names:product", ["product"]),
        (stack_of_blocks(saved_names=("mlp",)), "names:mlp", ["mlp"]),
        (stack_of_blocks(), "full", []),
        (None, "names:attention,mlp", []),
    ],
)
def test_a_name_in_remat_that_a_users_model_does_not_mark(model, remat, names, tiny):
    tiny.train.remat, tiny.train.dtype = remat, "bfloat16"
    cfg = parse(tiny, num_devices=8)
    parts = build(cfg, model=model)
    program = assemble(cfg, parts)
    with program.active():
        run = cfg, parts.model, program.mesh, program.abstract_state.params
        found = [*warnings.layout_warnings(*run, parts.train_data.read(np.arange(16)))]
    assert [warning.fields["name"] for warning in found] == names
    for warning in found:
        assert warning.text.startswith(f"train.remat={remat}: nothing is saved for ")
        assert warning.text.endswith("; it marks " + ", ".join(warning.fields["marked"]))


@pytest.mark.parametrize(
    ("name", "options", "num_warnings"),
    [
        ("tokens.bin", dict(dtype="uint16"), 1),
        ("tokens.bin", dict(dtype="uint16", separator=0), 0),
        ("tokens.npy", {}, 1),
        ("tokens.npy", dict(separator=0), 0),
        ("text.txt", {}, 0),  # one text
        ("", {}, 0),  # a folder: each file is a document
        ("", dict(dtype="uint8"), 0),
    ],
)
def test_tokens_without_document_boundaries(name, options, num_warnings, tmp_path):
    numbers = np.arange(200, dtype=np.uint16)
    numbers.tofile(tmp_path / "tokens.bin")
    np.save(tmp_path / "tokens.npy", numbers)
    (tmp_path / "text.txt").write_text("a text " * 40)
    defaults = dict(dtype="", pattern="*.txt", exclude=(), separator=-1, heldout=0.0, seed=0)
    sizes = dict(seq_len=8, vocab_size=256, split="train")
    source = tokens.build(path=str(tmp_path / name), **{**defaults, **sizes, **options})
    assert len(source.warnings) == num_warnings
    mixed = tokens.build(
        path="", mixture=((str(tmp_path / name), 1.0),), **{**defaults, **sizes, **options}
    )
    assert mixed.warnings == source.warnings
    for text in source.warnings:
        assert "attention crosses them; set data.separator" in text and name in text


@pytest.mark.parametrize(
    ("warmup_steps", "steps", "is_long"), [(2, 2, 1), (3, 2, 1), (2, 3, 0), (0, 0, 0)]
)
def test_a_warm_up_that_does_not_end(warmup_steps, steps, is_long, tiny):
    tiny.optim.warmup_steps, tiny.train.steps = warmup_steps, steps
    found = [*warnings.setting_warnings(parse(tiny, num_devices=8), None)]
    assert len(found) == is_long
    text = (
        f"optim.warmup_steps={warmup_steps} is not below train.steps={steps}: the run ends before"
    )
    assert all(text in one.text and "optim.learning_rate=0.0003" in one.text for one in found)


@pytest.mark.parametrize(
    ("rate", "percent"),
    [
        pytest.param(1e-3, "50 %", id="1 and -2 keep their values, 0 and 0.1 do not"),
        pytest.param(1e-6, "25 %", id="only 0 changes"),
        pytest.param(0.1, "", id="all change"),
    ],
)
def test_steps_that_bfloat16_parameters_round_away(rate, percent, tiny):
    tiny.train.param_dtype, tiny.optim.learning_rate = "bfloat16", rate
    cfg = parse(tiny, num_devices=8)
    params = {"a": jnp.array([1.0, -2.0, 0.0, 0.1], jnp.bfloat16), "frozen": jnp.ones(9)}
    model = SimpleNamespace(is_trained=lambda path: path == "a")
    found = [*warnings.rounding_warnings(cfg, model, params)]
    if not percent:
        assert not found
        return
    (one,) = found
    assert f"changes only {percent} of the parameters" in one.text
    assert "set train.param_dtype=float32" in one.text
    tiny.train.param_dtype = "float32"
    assert not [*warnings.rounding_warnings(parse(tiny, num_devices=8), model, params)]


def test_train_logs_and_records_each_warning_before_it_compiles(
    tiny, tmp_path, capsys, monkeypatch
):
    def compiles(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "compile", compiles)
    tiny.train.steps, tiny.optim.warmup_steps, tiny.mesh.data = 2, 2, 1
    tiny.mesh.fsdp, tiny.model.d_model, tiny.model.head_dim = 8, 36, 8
    with pytest.raises(KeyboardInterrupt):
        train(tiny, workdir=tmp_path)
    found = [x for x in capsys.readouterr().out.splitlines() if x.startswith("warning ")]
    rows = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    events = [row for row in rows if row["event"] == "warning"]
    assert found == [f"warning     {event['text']}" for event in events]
    assert [event["about"] for event in events] == ["unsharded", "warmup"]
    assert (events[0]["axis"], events[0]["dim"], events[0]["size"]) == ("fsdp", "embed", 36)
    assert events[1]["warmup_steps"] == events[1]["steps"] == 2
