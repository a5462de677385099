"""Sequences over several devices: every method equals plain attention, also in a step."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.configs import default
from meshtrain.data.loader import Loader
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.ops.attention import attention, choose_for_context
from meshtrain.ops.dropout import OfAttention
from meshtrain.parallel import context, sharding
from meshtrain.parallel.mesh import make_mesh
from meshtrain.parallel.remat import CUDNN_ATTENTION, rematerialised
from meshtrain.program import assemble
from meshtrain.tools.hlo import activations, hlo
from tests.lib.compare import assert_same
from tests.lib.configs import GPT2, packed, tiny_config
from tests.lib.jaxprs import count_primitives
from tests.lib.runs import Run, one_device

RULES = default.get_config().rules
METHODS = ("ring", "gather", "ulysses")
slow = pytest.mark.slow


@contextlib.contextmanager
def active(method="gather", rules=RULES, **sizes):
    num_devices = int(np.prod(list(sizes.values())))
    mesh = make_mesh(devices=jax.devices()[:num_devices], **sizes)
    with jax.set_mesh(mesh), sharding.use_rules(rules), context.active_method(method):
        yield mesh


@pytest.mark.parametrize("num_devices", [2, 3, 8])
def test_every_device_has_the_same_number_of_attended_pairs(num_devices):
    order = context.order(48, num_devices)
    assert sorted(order) == [*range(48)]
    pairs = (order + 1).reshape(num_devices, -1).sum(1)
    assert set(pairs) == {48 * 49 // 2 // num_devices}


def test_a_sequence_that_does_not_divide_is_rejected():
    with pytest.raises(ConfigError, match="20 tokens is not divisible by 2 x mesh.context=8; use"):
        context.order(20, 8)
    c = tiny_config()
    c.mesh.update(data=1, context=8)
    c.data.seq_len = 24
    fault = "data.seq_len=24 is not divisible by 2 x mesh.context=8; use 16 or 32"
    with pytest.raises(ConfigError, match=fault):
        parse(c, num_devices=8)


def make_inputs(length, num_heads, num_kv_heads, documents):
    """Returns q, k, v, segments and the weights of the result's sum, in the order of positions."""
    random = np.random.default_rng(0)
    q, k, v, weights = (
        random.normal(size=(4, length, n, 8))
        for n in (num_heads, num_kv_heads, num_kv_heads, num_heads)
    )
    segments = None
    if documents == "one token each":
        segments = np.tile(np.arange(length, dtype=np.int32), (4, 1))
    elif documents:
        starts = random.random((4, length)) < documents / length
        segments = starts.cumsum(1).astype(np.int32)
    return q, k, v, segments, weights


CASES = {
    "data": (dict(data=2, context=4), {}),
    "tensor": (dict(context=2, tensor=4), dict(num_heads=8)),
    "fsdp, soft cap": (dict(fsdp=2, context=4), dict(softcap=3.0)),
    "eight devices, several blocks": (dict(context=8), dict(length=96, num_heads=8, block=4)),
    "window of two chunks": (dict(data=2, context=4), dict(window=9)),
    "window of one token": (dict(context=4), dict(window=1)),
    "layers differ": (dict(context=4), dict(window=5, is_local=True)),
    "no documents": (dict(context=2), dict(documents=0)),
    "long documents": (dict(context=4), dict(documents=2)),
    "dropout": (dict(data=2, context=4), dict(num_heads=8, dropout=True)),
    "one token": (dict(context=2), dict(documents="one token each")),
}


DEFAULT = ("data", "window of two chunks", "dropout")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in DEFAULT else slow) for case in CASES]
)
def test_attention_and_gradients_equal_one_device(method, case, x64):
    sizes, options = CASES[case]
    check_equals_one_device(method, sizes, options)


def check_equals_one_device(method, sizes, options, implementation=None):
    """Blockwise if there is no `implementation`."""
    options = dict(length=32, num_heads=4, num_kv_heads=2, documents=6, block=3) | options
    length, block = options.pop("length"), options.pop("block")
    shapes = [options.pop(name) for name in ("num_heads", "num_kv_heads", "documents")]
    inputs = make_inputs(length, *shapes)
    is_local = jnp.array(options.pop("is_local", True))
    keys = np.arange(8, dtype=np.uint32).reshape(4, 2)
    options["dropout"] = OfAttention(keys, 0.3, 0) if options.get("dropout") else None

    def total(q, k, v, segments, weights, implementation):
        how = dict(implementation=implementation, is_local=is_local, **options)
        return (attention(q, k, v, segments, **how) * weights).sum()

    def gradients(implementation):
        return jax.jit(
            jax.value_and_grad(lambda *args: total(*args, implementation), argnums=(0, 1, 2))
        )

    expected = gradients("xla")(*inputs)
    order = context.order(length, sizes["context"])
    with active(method, **sizes) as mesh:
        place = jax.NamedSharding(mesh, jax.P(("data", "fsdp"), "context"))
        inputs = jax.tree.map(lambda leaf: jax.device_put(leaf[:, order], place), inputs)
        loss, grads = gradients(implementation or f"blockwise:{block}")(*inputs)
    largest = max(np.abs(grad).max() for grad in expected[1])  # some gradients are zero
    np.testing.assert_allclose(loss, expected[0], rtol=1e-12)
    for a, b in zip(grads, expected[1], strict=True):
        np.testing.assert_allclose(
            np.asarray(a)[:, np.argsort(order)], b, rtol=0, atol=1e-12 * largest
        )


FUSED = {
    "data": (dict(data=2, context=4), {}),
    "two devices": (dict(fsdp=4, context=2), {}),
    "three devices": (dict(context=3), dict(length=36, documents=0)),
    "heads over tensor": (dict(context=2, tensor=4), dict(num_heads=8, documents=0)),
    "heads that divide nothing": (dict(context=8), dict(num_heads=7, num_kv_heads=1)),
    "no documents": (dict(data=2, context=4), dict(documents=0)),
    "one token each": (dict(context=4), dict(documents="one token each")),
    "window of all": (dict(context=2), dict(window=32)),
}


@pytest.mark.parametrize("method", ["ring", "gather"])
@pytest.mark.parametrize("case", FUSED)
def test_calls_of_a_fused_kernel_equal_one_device(method, case, x64):
    sizes, options = FUSED[case]
    check_equals_one_device(method, sizes, options, implementation="emulated")


MIXED = {"attention": "lg", "window": 5}
EMULATED = {"attention_impl": "emulated"}
SINKS = MIXED | dict(attention_sinks=True, rope_layers="rn")
# Keys and values of different head dims.
LATENT = dict(kv_lora_rank=10, q_lora_rank=9, rope_head_dim=6, v_head_dim=6, num_kv_heads=4)
STEPS = [
    ("ring", {}, {"data": 2, "context": 2, "tensor": 2}, {}),
    pytest.param(
        "gather",
        {},
        {"fsdp": 2, "context": 4},
        {"zero_stage": 1, "num_microbatches": 4},
        marks=slow,
    ),
    pytest.param(
        "ulysses",
        {},
        {"pipeline": 2, "context": 2, "data": 2},
        {"num_microbatches": 2},
        marks=slow,
    ),
    pytest.param(
        "ring",
        MIXED,
        {"pipeline": 2, "context": 4},
        {"num_microbatches": 2, "remat": "full"},
        marks=slow,
    ),
    pytest.param("gather", GPT2, {"context": 4, "tensor": 2}, {"remat": "dots"}, marks=slow),
    ("gather", SINKS, {"pipeline": 2, "context": 2, "tensor": 2}, {"num_microbatches": 2}),
    pytest.param("ring", SINKS, {"data": 2, "context": 4}, {"remat": "full"}, marks=slow),
    pytest.param("ulysses", SINKS, {"context": 2, "tensor": 2, "fsdp": 2}, {}, marks=slow),
    ("gather", EMULATED, {"pipeline": 2, "data": 2, "context": 2}, {"num_microbatches": 2}),
    pytest.param(
        "ring",
        EMULATED,
        {"pipeline": 2, "context": 4},
        {"num_microbatches": 2, "remat": "names:attention"},
        marks=slow,
    ),
    pytest.param(
        "ring",
        EMULATED | LATENT,
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"num_microbatches": 4, "remat": "full"},
        marks=slow,
    ),
]


@pytest.mark.parametrize(("method", "model", "layout", "train"), STEPS, ids=str)
def test_a_step_equals_one_device(method, model, layout, train, x64):
    c = packed(**{"attention_impl": "blockwise:2", "loss_chunk_mib": 0.004, **model})
    c.train.update(train)
    c.context.method = method
    found = Run(c, dtype="float64", **layout).one_step()
    assert_same(found, one_device(**model), rtol=1e-10)


@pytest.mark.parametrize(
    "model",
    [{}, pytest.param({"positions": "learned"}, marks=slow)],
    ids=["rope", "learned"],
)
@pytest.mark.slow
def test_positions_of_rows_without_documents_follow_the_order(model, x64):
    """The batch has no positions then."""

    def step(**layout):
        c = packed(**model)
        c.data.separator = -1
        return Run(c, dtype="float64", **layout).one_step()

    assert_same(step(data=2, context=4), step(), rtol=1e-10)


@pytest.mark.slow
def test_sequences_over_tensor_as_well(x64):
    """Between blocks context and tensor shard the sequence: Megatron's sequence parallelism."""
    c = packed()
    c.rules = (("residual_seq", ("context", "tensor")), *c.rules)
    found = Run(c, dtype="float64", data=2, context=2, tensor=2).one_step()
    assert_same(found, one_device(), rtol=1e-10)


def test_the_loader_gives_each_device_its_chunks():
    rows = np.arange(4 * 16, dtype=np.int32).reshape(4, 16)
    batch = Batch(rows, rows, np.ones(rows.shape, np.float32))
    mesh = make_mesh(data=2, context=4)
    loader = Loader(
        Source(lambda indices: jax.tree.map(lambda x: x[indices], batch)),
        mesh,
        RULES,
        global_batch=4,
    )
    tokens = loader.read(0).tokens
    loader.close()
    for shard in tokens.addressable_shards:
        (row, number) = np.argwhere(mesh.device_ids[0, :, 0, 0, :, 0] == shard.device.id)[0]
        early, late = 2 * number, 2 * (7 - number)
        of_rows = rows[2 * row : 2 * row + 2]
        expected = np.concatenate([of_rows[:, early : early + 2], of_rows[:, late : late + 2]], 1)
        np.testing.assert_array_equal(shard.data, expected)


def test_data_of_another_kind_is_rejected():
    """Its sequences would keep their natural order, and positions would be wrong."""
    rows = Source(lambda indices: {"tokens": np.zeros((len(indices), 16), np.int32)})
    loader = Loader(rows, make_mesh(data=2, context=4), RULES, global_batch=4)
    with pytest.raises(ConfigError, match="mesh.context=4: .* and the data yields a dict; yield a"):
        loader.read(0)
    loader.close()


def choice(name="auto", num_heads=8, num_kv_heads=2, method="auto:gather", sizes=None, **changed):
    shapes = dict(
        seq_len=4096, head_dim=64, dtype="bfloat16", softcap=0.0, packed=False, dropout=False
    )
    shapes |= changed
    with active(method, **sizes or {"context": 4}):
        return choose_for_context(name, num_heads=num_heads, num_kv_heads=num_kv_heads, **shapes)


def test_auto_chooses_by_heads_bytes_and_links(simulated_gpu, monkeypatch):
    assert choice() == ("ulysses", "ulysses over 4 devices, cudnn")
    assert choice(num_heads=6) == ("ring", "ring over 4 devices, cudnn")
    assert choice("cudnn", num_heads=6, num_kv_heads=1)[1] == "ring over 4 devices, cudnn"
    assert choice(num_heads=6, method="gather")[1] == "gather over 4 devices, cudnn"
    # Without a kernel by the network.
    assert choice("blockwise", num_heads=6)[1] == "gather over 4 devices, blockwise"
    assert choice("blockwise", num_heads=6, method="auto:ring")[0] == "ring"
    # Ulysses sends 8 + 8 heads where gathering sends 4 x 8.
    assert choice("blockwise", num_kv_heads=8)[0] == "ulysses"
    assert choice("blockwise", num_kv_heads=2)[0] == "gather"
    assert choice("blockwise", num_kv_heads=2, method="ring")[0] == "ring"
    with pytest.raises(ConfigError, match="8 devices do not divide model.num_heads=12"):
        choice(num_heads=12, method="ulysses", sizes={"context": 4, "tensor": 2})


DECLINED = {
    "windows have no offset, and model.window is shorter than the row": {"window": 512},
    "supports even lengths, and a chunk has 511 tokens": {"seq_len": 511 * 8},
    "does not support a soft cap": {"softcap": 30.0},
    "masks differ between layouts": {"dropout": True},
    "head dims up to 256": {"head_dim": 256, "packed": True},
    "bfloat16 or float16": {"dtype": "float32"},
}


@pytest.mark.parametrize("reason", DECLINED)
def test_what_the_fused_kernel_does_not_compute_of_chunks_is_declined(reason, simulated_gpu):
    """In one line; then attention is computed in blocks."""
    method, text = choice(num_heads=6, **DECLINED[reason])
    assert text.startswith("gather over 4 devices, blockwise; not cudnn: it")
    assert method == "gather" and reason in text and "\n" not in text
    with pytest.raises(ConfigError, match=reason) as error:
        choice("cudnn", num_heads=6, **DECLINED[reason])
    (line,) = error.value.faults
    assert line.startswith("model.attention_impl='cudnn': ") and "; use 'auto'" in line


def test_a_window_of_the_row_declines_nothing(simulated_gpu):
    assert choice(num_heads=6, window=4096)[1] == "ring over 4 devices, cudnn"


def test_a_model_has_to_say_that_its_sequences_may_be_sharded():
    c = tiny_config()
    c.mesh.update(data=1, context=8)
    cfg = parse(c, num_devices=8)
    parts = build(cfg)
    own = Model(parts.model.init, parts.model.axes, loss=lambda *_: None)
    with pytest.raises(ConfigError, match="mesh.context=8: the model does not say"):
        assemble(cfg, parts._replace(model=own))


def kernels_and_kept(remat):
    """Returns the number of cuDNN's calls in a jaxpr of attention, and the shapes that it keeps.

    4 devices: a call at home, one in the first round, one in a loop, one in the last round.
    """
    shapes = [(2, 4096, heads, 64) for heads in (6, 2, 2)]
    inputs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    attend = rematerialised(lambda *args: attention(*args, None, implementation="cudnn"), remat)
    with active("ring", context=4):
        jaxpr = jax.make_jaxpr(lambda *args: jax.vjp(attend, *args)[1])(*inputs).jaxpr
        backward = jax.make_jaxpr(lambda *args: jax.vjp(attend, *args)[1](args[0]))(*inputs).jaxpr
    given = {id(var) for var in jaxpr.invars}
    kept = {id(var): var.aval.shape for var in jaxpr.outvars if id(var) not in given}
    return count_primitives(backward, CUDNN_ATTENTION), sorted(kept.values())


def test_what_is_named_attention_is_the_merged_output_and_its_statistic(simulated_gpu):
    """Not those of each call; without both, the backward pass would call the kernel again."""
    out, statistic = (2, 4096, 6, 64), (4, 2, 2, 6, 512)
    assert kernels_and_kept("full") == (8, [])
    assert kernels_and_kept("names:attention") == (4, [out, statistic])


def collectives(compiled):
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return {*re.findall(rf" ({names})(?:-start)?\(", compiled.as_text())}


@pytest.mark.parametrize("implementation", ["blockwise", "emulated"])
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("ring", {"collective-permute"}),
        pytest.param("gather", {"all-gather", "collective-permute"}, marks=slow),
        ("ulysses", {"all-to-all"}),
    ],
)
def test_attention_sends_nothing_but_what_its_method_sends(method, expected, implementation):
    q, k, v, _, weights = make_inputs(32, 4, 4, 0)

    def attend(q, k, v):
        return attention(q, k, v, None, implementation=implementation)

    def gradients(*args):
        args = [sharding.constrain(x, "batch", "seq", "heads", "head_dim") for x in args]
        return jax.vjp(attend, *args[:3])[1](args[3])

    with active(method, data=2, context=4) as mesh:
        place = jax.NamedSharding(mesh, jax.P("data", "context"))
        args = [jax.device_put(np.float32(x), place) for x in (q, k, v, weights)]
        compiled = jax.jit(gradients, out_shardings=place).lower(*args).compile()
    assert collectives(compiled) == expected


@pytest.mark.slow
def test_activations_of_a_step_are_gathered_nowhere():
    """Only parameters are: no device has an array of all positions and of the model's width."""
    c = packed()
    c.model.update(num_layers=2, attention_impl="blockwise:4", vocab_size=128)
    c.data.vocab_size, c.data.seq_len, c.model.max_seq_len = 128, 96, 96
    c.context.method = "ring"
    run = Run(c, data=2, context=4)
    with run.program.active():
        text = run.program.compile(run.batch()).as_text()
    gathered = {
        shape
        for shape in re.findall(r"f32\[([\d,]+)\]", text)
        if {"96", "32"} <= {*shape.split(",")}
    }
    assert not gathered, "of 96 positions"


@slow
@pytest.mark.parametrize("method", METHODS)
def test_a_device_keeps_what_one_device_keeps_of_a_sequence_as_long_as_its_part(method):
    """Neither keys of other devices nor second copies, also of layers that XLA sees together."""

    def kept(length, **layout):
        c = tiny_config()
        c.model.update(d_model=48, num_heads=8, num_kv_heads=4, attention_impl="blockwise:100")
        c.data.seq_len = c.model.max_seq_len = length
        c.train.update(global_batch=1, unroll=2)
        c.context.method = method
        run = Run(c, **layout)
        with run.program.active():
            compiled = run.program.compile(run.batch())
        module = hlo.parse(compiled.as_text())
        return activations.kept_bytes(module, run.program.abstract_state.params)

    assert 0 < kept(4 * 200, context=4) < 1.01 * kept(200)
