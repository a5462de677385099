"""`meshtrain verify` on our models and on users' models.

tests/mutants lists which bugs it finds.
"""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

import meshtrain
from meshtrain.cli import app
from meshtrain.config import load
from meshtrain.data.source import Source
from meshtrain.models import transformer
from meshtrain.ops import blockwise, kernels, losses
from meshtrain.tools.verify import adapters, case, layouts, variants, verify
from meshtrain.tools.verify.certificate import compare
from meshtrain.tools.verify.laws import model as model_laws
from meshtrain.tools.verify.laws import optimizers as optimizer_laws
from meshtrain.tools.verify.laws import random_keys as key_laws
from meshtrain.tools.verify.pairwise import pairwise
from meshtrain.tools.verify.reference import adapter as reference_adapter
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train
from tests.lib.configs import LAYOUT, tiny_config


def test_pairwise_covers_every_possible_pair_of_values():
    settings = {"a": [1, 2, 4], "b": [1, 2, 4], "c": ["x", None]}
    rows = [dict(zip(settings, row, strict=True)) for row in itertools.product(*settings.values())]
    bases = [row for row in rows if row["a"] * row["b"] <= 4]
    factors = [
        [{"d": True}, {"d": False}],
        [{"e": 1, "f": 1}, {"e": 2, "f": 1}, {"e": 1, "f": 2}],  # not all pairs of e and f
        [{"g": n} for n in range(9)],
    ]

    def pairs(rows):
        return {pair for row in rows for pair in itertools.combinations(row.items(), 2)}

    possible = [
        {**base, **levels[0], **levels[1], **levels[2]}
        for base in bases
        for levels in itertools.product(*factors)
    ]
    chosen = pairwise(bases, factors)
    assert pairs(chosen) == pairs(possible) and all(row in possible for row in chosen)
    assert 27 <= len(chosen) < 60 < len(possible)
    assert pairwise([], factors) == []
    assert pairs(pairwise([{}], factors)) == pairs(
        [{**x, **y, **z} for x, y, z in itertools.product(*factors)]
    )


def test_packed_documents_are_unpacked_to_separate_rows():
    rows = np.array([[5, 0, 6, 7, 8], [1, 2, 3, 4, 0]])  # 0 ends a document
    weights = np.array([[1, 1, 0.5, 1], [1, 0, 1, 1]])
    batch = reference_step.unpack_documents(rows, weights, 0, num_rows=4)
    assert batch.tokens.tolist() == [[5, 0, 0, 0], [6, 7, 0, 0], [1, 2, 3, 4], [0] * 4]
    assert batch.targets.tolist() == [[0, 6, 0, 0], [7, 8, 0, 0], [2, 3, 4, 0], [0] * 4]
    assert batch.weights.tolist() == [[1, 0, 0, 0], [0.5, 1, 0, 0], [1, 0, 1, 1], [0] * 4]
    one_per_row = reference_step.unpack_documents(rows, weights, None, num_rows=3)
    assert one_per_row.tokens[:2].tolist() == rows[:, :-1].tolist()
    assert not one_per_row.weights[2].any()


def test_a_difference_is_reported_with_leaf_index_and_both_values():
    expected = {"gradients": {"w": np.array([[1.0, 2.0], [3.0, 4.0]]), "b": np.array([1e-17, 0])}}
    actual = {"gradients": {"w": np.array([[1.0, 2.0], [3.5, 4.0]]), "b": np.array([0, 1e-17])}}
    differences, fault = compare(actual, expected, tolerance=1e-10, zero_gradients=["b"])
    assert fault == "gradients w[1, 0]: 3.5 here, 3 on one device"
    assert differences == {"gradients": 0.125}
    not_finite = {"gradients": {"w": np.full((2, 2), np.nan), "b": np.zeros(2)}}
    assert "nan here" in compare(not_finite, expected, tolerance=1e-10, zero_gradients=["b"])[1]


class Digits(nnx.Module):
    """A model with dropout that is neither a stack of blocks nor a language model."""

    def __init__(self, rngs):
        def named(*names):
            return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)

        self.hidden = nnx.Linear(16, 32, rngs=rngs, kernel_init=named("embed", "mlp"))
        self.out = nnx.Linear(32, 4, rngs=rngs, kernel_init=named("mlp", None))
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(jax.nn.tanh(self.hidden(x))))


def squares(model, batch):
    return meshtrain.weighted(((model(batch["x"]) - batch["y"]) ** 2).sum(-1))


def samples(indices):
    random = np.random.default_rng(0)
    x, y = random.normal(size=(256, 16)), random.normal(size=(256, 4))
    return {"x": x[indices], "y": y[indices]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["source", "iterable"])
def test_a_users_own_model_is_verified(kind):
    data = Source(samples)
    if kind == "iterable":
        data = [samples(slice(start, start + 16)) for start in range(0, 256, 16)]
    model = meshtrain.from_nnx(Digits, squares)
    with jax.enable_x64(True):
        own = case.VerifyCase(tiny_config(), model, data, keep_sizes=False)
        assert not own.is_text
        assert [fault for law in verify.laws(own).values() for fault in law()] == []
        result = verify.check_layout(own, LAYOUT)
    assert result.fault is None and result.differences["gradients"] < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        (dict(num_heads=12, num_kv_heads=3, d_model=96), dict(data=1, fsdp=2, tensor=4)),
        (dict(num_heads=8, num_kv_heads=1, d_model=64), dict(data=1, fsdp=1, tensor=8)),
    ],
    ids=str,
)
def test_heads_and_a_vocabulary_that_are_not_divisible_by_the_tensor_axis(sizes, axes):
    c = tiny_config()
    c.model.update(sizes)
    c.model.vocab_size = 61
    row = {**LAYOUT, **axes, "packing": True, "masks": True, "sequence_parallel": True}
    with jax.enable_x64(True):
        own = case.VerifyCase(c, None, None, keep_sizes=True)
        assert verify.check_layout(own, row).fault is None


def test_a_loss_that_mixes_rows_is_detected():
    def centred(model, batch):
        values = ((model(batch["x"]) - batch["y"]) ** 2).sum(-1)
        return meshtrain.weighted(values - values.mean() ** 2)

    with jax.enable_x64(True):
        model = meshtrain.from_nnx(Digits, centred)
        own = case.VerifyCase(tiny_config(), model, Source(samples), keep_sizes=False)
        assert verify.check_layout(own, LAYOUT).fault.startswith("evaluation loss: ")
        one_microbatch = {**LAYOUT, "num_microbatches": 1}
        assert verify.check_layout(own, one_microbatch).fault is None


def test_shrinking_keeps_the_structure():
    raw = tiny_config().to_dict()
    raw["model"].update(num_layers=32, num_heads=32, num_kv_heads=8, d_model=4096, d_ff=14336)
    raw["model"].update(vocab_size=128256)
    case.shrink(raw)
    model = raw["model"]
    sizes = ("num_layers", "num_heads", "num_kv_heads", "d_model", "d_ff", "vocab_size")
    assert [model[size] for size in sizes] == [24, 8, 2, 64, 64, 125]
    model.update(attention="llg", window=512, num_layers=26)
    case.shrink(raw)
    assert (model["num_layers"], model["window"]) == (24, 5)
    model.update(attention="llllg")
    case.shrink(raw)
    assert model["num_layers"] == 120  # a multiple of the pattern and of the chunks


@pytest.fixture(scope="module")
def quickstart():
    with jax.enable_x64(True):
        yield case.VerifyCase(load.read("quickstart", [])[0], None, None, keep_sizes=False)


def test_layouts_vary_what_a_run_can_choose(quickstart):
    rows = layouts.select(quickstart)

    def values(key):
        return {row[key] for row in rows}

    assert values("attention_impl") == set(layouts.ATTENTION_IMPLS)
    assert values("loss_chunks") == {0, 3} and values("unroll") == {1, 3}
    assert values("remat") == {"none", "full", "dots", "names:attention,mlp", layouts.OFFLOAD}
    assert values("optim_offload") == {False, True}
    assert values("keep") == {None, "inputs", "residuals"} and values("zero_stage") == {0, 1, 2, 3}
    pipelines = {(row["pipeline"], row["num_chunks"], row["num_microbatches"]) for row in rows}
    assert {(P, V) for P, V, _ in pipelines} >= {(2, 3), (4, 2), (4, 3), (8, 1)}
    assert any(M % P for P, _, M in pipelines) and any(P > 1 and M > P for P, _, M in pipelines)
    with jax.enable_x64(True):
        depths = {quickstart.for_layout(row).num_layers for row in rows}
        for row in rows:
            chunks = row["pipeline"] * (row["num_chunks"] or 1)
            assert quickstart.for_layout(row).num_layers >= 2 * chunks
    assert depths == {case.FEW_LAYERS, case.NUM_LAYERS}
    assert rows[0].keys() == rows[-1].keys() and layouts.SHORT_GROUP not in rows[0]
    quick = rows[: verify.QUICK_LAYOUTS]
    assert any(
        row["schedule"] == "interleaved" and row["num_microbatches"] % row["pipeline"]
        for row in quick
    )
    for key in (
        "attention_impl",
        "loss_chunks",
        "unroll",
        "keep",
        "packing",
        "masks",
        "zero_stage",
    ):
        assert {row[key] for row in quick} == values(key), key


def test_adapters_are_a_factor_of_the_layouts(quickstart):
    """With every mesh size, ZeRO stage and schedule; the config's own adapter is one of them."""
    rows = layouts.select(quickstart)
    names = {row["adapter"] for row in rows}
    assert names == {*quickstart.adapters} and len(names) == 3
    for key in ("pipeline", "fsdp", "tensor", "context", "zero_stage", "schedule", "dropout"):
        values = {row[key] for row in rows}
        assert all({row[key] for row in rows if row["adapter"] == one} == values for one in names)
    quick = [row["adapter"] for row in rows[: verify.QUICK_LAYOUTS]]
    assert {*quick} == names and quick.count(None) > verify.QUICK_LAYOUTS / 2
    settings = load.read("quickstart", [])[0].to_dict()
    settings["adapter"].update(rank=4, targets=("layers/mlp/*", "first_layers/7/*"))
    settings["train"]["trainable"] = "output/*,*/nothing"
    configured = adapters.choices(settings, quickstart.model)["of the config"]
    assert (configured.rank, configured.targets) == (4, ("layers/mlp/*",))
    assert configured.trainable == "output/*"
    settings["train"]["trainable"] = "*/nothing"
    assert "of the config" not in adapters.choices(settings, quickstart.model)


def test_the_gradients_of_a_and_b_are_those_of_the_kernel_by_the_chain_rule():
    random = np.random.default_rng(0)
    shapes = {"kernel": (2, 3, 4, 5), "lora_a": (2, 3, 2), "lora_b": (2, 2, 4, 5), "bias": (2, 4)}
    params = {"layer": {name: random.normal(size=shape) for name, shape in shapes.items()}}
    factor = random.normal(size=shapes["kernel"])

    def loss_of(layer):
        product = jax.numpy.einsum("lir,lrhk->lihk", layer["lora_a"], layer["lora_b"])
        return (factor * (layer["kernel"] + 1.5 * product) ** 2).sum()

    with jax.enable_x64(True):
        expected = jax.grad(loss_of)(params["layer"])
    merged = reference_adapter.merged(params, 1.5)
    of_kernel = 2 * factor * merged["layer"]["kernel"]
    grads = {"layer": {"kernel": of_kernel, "bias": np.zeros((2, 4))}}
    found = reference_adapter.gradients(grads, params, 1.5)["layer"]
    assert merged["layer"].keys() == {"kernel", "bias"} and found.keys() == shapes.keys()
    for name in shapes:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-12, err_msg=name)


def test_a_model_without_choices_of_attention_has_no_layouts_of_them(quickstart):
    model = meshtrain.from_nnx(Digits, squares)
    own = case.VerifyCase(tiny_config(), model, Source(samples), keep_sizes=False)
    rows = layouts.select(own, without=["packing"])
    assert not {"attention_impl", "loss_chunks"} & rows[0].keys()
    assert {(row["pipeline"], row["packing"]) for row in rows} == {(1, False)}


@pytest.mark.slow
def test_the_forced_sizes_reach_attention_and_loss(quickstart, monkeypatch):
    """The proof has several blocks and chunks at its size, also with a sharded vocabulary."""
    seen = {}
    for module, name in ((blockwise, "_attention"), (losses, "_sum_over_chunks")):
        original = getattr(module, name)

        def spy(*args, original=original, name=name):
            seen.setdefault(name, args)
            return original(*args)

        monkeypatch.setattr(module, name, spy)
    row = LAYOUT | {"data": 1, "tensor": 4, "attention_impl": "blockwise:5", "loss_chunks": 3}
    with jax.enable_x64(True):
        program = case.program_of(quickstart, row)
        samples = jax.tree.map(lambda leaf: leaf[:48], quickstart.samples)
        with program.active():
            jax.eval_shape(program.train_step, program.abstract_state, samples)
    q, k = seen["_attention"][2:4]
    assert len(q) == len(k) == 4 and q.shape[-2] % 5 == 0
    assert len(jax.tree.leaves(seen["_sum_over_chunks"][2])[0]) == 3


def test_the_users_choice_of_attention_does_not_matter():
    c = tiny_config()
    c.model.attention_impl = "cudnn"
    with jax.enable_x64(True):
        own = case.VerifyCase(c, None, None, keep_sizes=False)
    assert (own.raw["model"]["attention_impl"], own.raw["model"]["loss_chunk_mib"]) == ("xla", 0)


def test_layouts_have_the_formulas_that_the_devices_can_compute(quickstart, monkeypatch):
    def formulas():
        return {row["kernels"] for row in layouts.select(quickstart)}

    assert formulas() == {"plain", "fused", "pallas"}
    tpu = SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")
    monkeypatch.setattr(layouts, "why_not", lambda name, _: kernels.why_not(name, tpu))
    assert formulas() == {"plain", "fused"}


def test_choices_of_the_model_are_varied_in_pairs(quickstart):
    section = {key: value for key, value in quickstart.raw["model"].items() if key != "build"}
    own, *others = variants.select(section)
    assert own == section | {"num_layers": 2}
    assert all(c["num_layers"] > len(c["attention"]) for c in others)
    assert any(c["positions"] == "rope" and c["qk_norm"] and c["attention"] == "lg" for c in others)
    for c in others:
        model = {key: value for key, value in c.items() if key not in variants.NOT_OF_MODEL}
        transformer.build(**model)
    assert {c[variants.FORMULAS] for c in others} == {"plain", "fused"}
    assert {c[variants.ADAPTER] for c in others} == {None, *variants.ADAPTERS}
    quick = others[: variants.NUM_QUICK - 1]
    assert [c["attention_impl"] for c in quick] == list(variants.BLOCKS)
    for c in quick:
        assert (c["attention"], c["window"], c["attention_softcap"]) == ("lg", 5, variants.SOFTCAP)
    gemma = variants.select({**section, "attention": "lllllg", "window": 5})
    assert gemma[0]["num_layers"] == 7


def test_a_law_has_the_same_name_with_and_without_quick(quickstart, monkeypatch):
    monkeypatch.setattr(model_laws, "decoder_of", lambda c, batch: c["attention_impl"])
    quick = verify.laws(quickstart, quick=True)
    names = [name for name in quick if name.startswith("transformer")]
    found = [verify.check_law(quickstart, name)[0] for name in names]
    assert found == [quick[name]()[0] for name in names]
    assert [fault.split(": ")[1] for fault in found] == ["xla", *variants.BLOCKS]


def test_the_optimizer_of_the_config_is_compared_with_its_formula(quickstart, monkeypatch):
    monkeypatch.setattr(optimizer_laws, "updates", lambda section: section["build"])
    for build in optimizer_laws.BUILDERS:
        monkeypatch.setitem(quickstart.raw["optim"], "build", build)
        assert verify.check_law(quickstart, "optimizer") == [f"optimizer: {build}"]


@pytest.mark.parametrize("quick", [True, False])
def test_every_check_is_started_once_and_a_quick_one_first(quickstart, quick):
    with jax.enable_x64(True):
        rows, low_rows, law_names = verify.plan(quickstart, quick, [])
    tasks = verify._tasks(rows, low_rows, law_names)
    expected = [(verify.run_law, name) for name in law_names]
    expected += [(verify.check_layout, row) for row in rows]
    expected += [(verify.check_precision, row) for row in low_rows]
    assert len(tasks) == len(expected) and all(task in expected for task in tasks)
    assert tasks[0].function is verify.run_law and tasks[0].argument in verify.QUICK_LAWS
    # Of a renamed law the old name would start nothing.
    assert quick or {*verify.QUICK_LAWS} <= {*law_names}


@pytest.mark.parametrize("bug", [None, "step", "micro-batch", "shard"])
def test_random_keys_that_repeat_are_found(quickstart, bug, monkeypatch):
    fold_in, split = jax.random.fold_in, jax.random.split
    if bug == "shard":
        monkeypatch.setattr(jax.random, "split", lambda key, num: split(key, 1)[np.zeros(num, int)])
    elif bug:
        calls = []

        def constant(key, number):
            calls.append(number)
            kind = "step" if len(calls) == 1 else "micro-batch"
            return fold_in(key, 0 if kind == bug else number)

        monkeypatch.setattr(jax.random, "fold_in", constant)
    with jax.enable_x64(True):
        fault = key_laws.repeated(quickstart.raw)
    assert (fault is None) == (bug is None) and (bug is None or "the same random key" in fault)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["--without=magic"], "without='magic': use one of packing, masks"),
        (["--config.model.num_layers=0"], "model.num_layers=0: use 1 or more"),
        (["--config.train.remat=all"], "train.remat='all': use one of"),
    ],
)
def test_a_user_mistake_is_one_line(options, line, capsys, tmp_path):
    arguments = ["--config=configs/quickstart.py", f"--output={tmp_path}", *options]
    assert app.main("verify", arguments) == 2
    error = capsys.readouterr().err
    assert line in error and error.count("\n") == 1


def test_a_model_without_dim_names_is_an_error_on_a_sharded_mesh():
    nameless = meshtrain.from_nnx(lambda rngs: nnx.Linear(16, 4, rngs=rngs), squares)
    c = tiny_config()
    c.mesh.update(data=1, fsdp=8)
    with pytest.raises(meshtrain.ConfigError, match="mesh.fsdp=8: no parameter .* names its dims"):
        train(c, model=nameless, data=Source(samples))
    with pytest.raises(meshtrain.ConfigError, match="names its dims"):
        verify.verify(c, model=nameless, data=Source(samples), log=lambda line: None)
