"""LoRA and frozen parameters: plain maths on every layout, without state for what is frozen."""

import functools
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshtrain import state as states
from meshtrain.config.build import build_model
from meshtrain.config.parse import parse
from meshtrain.errors import ConfigError
from meshtrain.inference.restore import restore_params
from meshtrain.metrics import weighted
from meshtrain.models import lora, trees
from meshtrain.models.base import from_nnx, trained_part
from meshtrain.models.transformer_config import TransformerConfig
from meshtrain.tools.verify.reference import dropout as reference_dropout
from meshtrain.tools.verify.reference import model as reference_model
from meshtrain.tools.verify.reference import step as reference_step
from meshtrain.train import train
from tests.lib.compare import assert_same
from tests.lib.configs import tiny_config
from tests.lib.runs import Run

RANK, ALPHA = 3, 12.0
LAYOUTS = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    pytest.param({"pipeline": 2, "fsdp": 2, "data": 2}, marks=pytest.mark.slow),
    pytest.param({"data": 4, "context": 2}, marks=pytest.mark.slow),
    pytest.param({"pipeline": 2, "tensor": 2, "data": 2}, marks=pytest.mark.slow),
]


def config(**train_keys):
    c = tiny_config()
    c.model.update(num_layers=4, attention="gl", window=5)
    c.adapter.rank, c.adapter.alpha = RANK, ALPHA
    c.train.num_microbatches = 2
    c.train.update(train_keys)
    c.optim.clip_norm = 0.05  # below the norm, so that clipping matters
    return c


def dense_model(targets=("layers/*",)):
    """Returns the plain model, and a function that adds A and B to kernels, in loops over names."""
    c = config()
    c.adapter.rank = 0
    model = build_model(parse(c))

    def add(params, pairs):
        for path, (a, b) in pairs.items():
            kernel = params
            for key in path.split("/"):
                kernel = kernel[key]
            rank, layers = a.shape[-1], len(a)
            product = jnp.einsum(
                "lir,lro->lio", a.reshape(layers, -1, rank), b.reshape(layers, rank, -1)
            )
            new = kernel["kernel"] + ALPHA / RANK * product.reshape(kernel["kernel"].shape)
            params = trees.merge(params, nested(path, {"kernel": new}))
        return params

    return model, add


def split(params):
    """Returns the parameters without A and B, and both by the path of their layer."""
    plain = trees.matching(params, lambda path: "lora_" not in path)
    found = {trees.name_of(path): leaf for path, leaf in jax.tree.leaves_with_path(params)}
    ends = [path.removesuffix("/lora_a") for path in found if path.endswith("/lora_a")]
    return plain, {path: (found[f"{path}/lora_a"], found[f"{path}/lora_b"]) for path in ends}


def start(run):
    """Returns a state whose B are not zero."""
    with run.program.active():
        state = run.program.initial_state(0)

    def fill(path, leaf):
        if path[-1].key != "lora_b":
            return leaf
        noise = np.random.default_rng(len(jax.tree_util.keystr(path))).normal(0, 0.05, leaf.shape)
        return jax.device_put(noise.astype(leaf.dtype), leaf.sharding)

    return state._replace(params=jax.tree.map_with_path(fill, state.params))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(layout))
def test_losses_gradients_and_updates_equal_dense_maths_on_one_device(layout):
    c = config(**{"remat": "full"} if "context" in layout else {})
    if "tensor" in layout and "pipeline" in layout:
        c.pipeline.update(schedule="interleaved", num_chunks=2, keep="residuals")
    with jax.enable_x64(True):
        c.optim.moment_dtype = "float64"
        run = Run(c, "float64", **layout)
        state = start(run)
        first = jax.device_get(state.params)
        batches = [
            jax.device_get(run.parts.train_data.read(np.arange(16) + 16 * n)) for n in range(2)
        ]
        losses, norms = [], []
        with run.program.active():
            for number in range(len(batches)):  # with `context`, sequences are in another order
                state, scalars = jax.jit(run.program.train_step)(state, run.batch(number))
                losses.append(float(scalars["loss"]))
                norms.append(float(scalars["grad_norm"]))
        found = jax.device_get(state.params)
        expected_losses, expected_norms, pairs = reference(c, first, batches)
    plain, own = split(found)
    assert np.allclose(losses, expected_losses, rtol=1e-12, atol=0)
    assert np.allclose(norms, expected_norms, rtol=1e-10, atol=0)
    for path in pairs:
        for a, b in zip(own[path], pairs[path], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=path)
    # What is frozen keeps every bit.
    chex.assert_trees_all_equal(plain, split(first)[0], strict=True)


def reference(c, params, batches):
    """Returns losses, norms before clipping, and the updated A and B, of plain AdamW."""
    model, add = dense_model()
    plain, pairs = split(params)
    rate = optax.cosine_decay_schedule(
        c.optim.learning_rate, c.train.steps, alpha=c.optim.final_fraction
    )
    optimizer = optax.adamw(rate, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.1)
    moments, losses, norms = optimizer.init(pairs), [], []

    def mean(pairs, batch):
        sums = reference_step.loss(model, add(plain, pairs), batch)
        return sums.loss / sums.weight

    for batch in batches:
        loss, grads = jax.jit(jax.value_and_grad(mean))(pairs, batch)
        norm = float(optax.tree.norm(grads))
        grads = jax.tree.map(lambda leaf, norm=norm: leaf * min(1, c.optim.clip_norm / norm), grads)
        updates, moments = optimizer.update(grads, moments, pairs)
        pairs = optax.apply_updates(pairs, updates)
        losses.append(float(loss))
        norms.append(norm)
    assert norms[0] > c.optim.clip_norm
    return losses, norms, jax.device_get(pairs)


RATE = 0.3
# A layer before the stack, whose layers have a shared expert; with model.dropout too.
MIXTURE = dict(num_layers=3, first_dense_layers=1, num_experts=4, num_shared_experts=1)
MIXTURE |= dict(d_expert=16, dropout=0.2)
DROPOUT_LAYOUTS = {
    "1f1b": (dict(pipeline=2, data=2), {"num_microbatches": 4}),
    "tensor": (dict(fsdp=2, tensor=2), {"num_microbatches": 3, "remat": "full"}),
    "interleaved, context": (
        dict(pipeline=2, context=2),
        {"schedule": "interleaved", "num_chunks": 2, "keep": "residuals"},
    ),
}


def dropout_config(**model):
    c = config()
    c.train.global_batch = 24
    c.model.update(model)
    c.adapter.dropout = RATE
    c.optim.epsilon = 1e-6  # Adam divides by it where the gradient is zero
    return c


def step_of(run):
    """Returns the gradients of one step, the state after it, and its scalars.

    B is not zero at the start.
    """
    state, batch = start(run), run.batch()
    with run.program.active():
        after, scalars = jax.jit(run.program.train_step)(state, batch)
    return jax.device_get((after.opt_state[0], after, scalars))


@functools.cache
def step_on_one_device(**model):
    return step_of(Run(dropout_config(**model), "float64"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPOUT_LAYOUTS)
def test_dropout_of_the_input_of_a_drops_the_same_elements_on_every_layout(name):
    layout, settings = DROPOUT_LAYOUTS[name]
    c = dropout_config()
    for key, value in settings.items():
        (section,) = (part for part in (c.train, c.pipeline) if key in part)
        section[key] = value
    with jax.enable_x64(True):
        c.optim.moment_dtype = "float64"
        assert_same(step_of(Run(c, "float64", **layout)), step_on_one_device(), rtol=1e-10)


@pytest.mark.parametrize("model", [{}, pytest.param(MIXTURE, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_dropout_of_the_input_of_a_is_plain_maths_and_off_in_evaluation(model, monkeypatch):
    """y = x W + alpha / rank (drop(x) A) B in the reference model, with masks hashed by numpy."""
    c, plain = dropout_config(**model), reference_model._linear
    typed = TransformerConfig(**{k: v for k, v in c.model.to_dict().items() if k != "build"})
    first = c.model.first_dense_layers

    def linear(x, p, num_in):
        if "lora_a" not in p:
            return plain(x, p, num_in)
        of_a = x if "keys" not in p else reference_dropout.dropped(x, p["keys"], RATE, p["site"])
        inner = jnp.tensordot(of_a, p["lora_a"], axes=num_in)
        return plain(x, p, num_in) + ALPHA / RANK * jnp.tensordot(inner, p["lora_b"], axes=1)

    def with_masks(params, paths, keys_BW):
        """Adds the keys and the number of the masks to each adapted layer."""
        for number, path in enumerate(sorted(paths)):
            kind, layer = path.split("/")[:2]
            if kind == "first_layers":
                keys, site = reference_dropout.of_layer(keys_BW, int(layer)), 2**16 + number
            else:
                numbers = range(first, c.model.num_layers)
                keys = np.stack([reference_dropout.of_layer(keys_BW, n) for n in numbers])
                site = np.full(len(numbers), 2**16 + number)
            params = trees.merge(params, nested(path, {"keys": keys, "site": site}))
        return params

    monkeypatch.setattr(reference_model, "_linear", linear)
    with jax.enable_x64(True):
        grads, _, scalars = step_on_one_device(**model)
        run = Run(c, "float64")
        params = jax.device_get(start(run).params)
        batch = run.parts.train_data.read(np.arange(c.train.global_batch))
        keyed = reference_step.with_row_keys(0, 0, batch)
        frozen, pairs = split(params)

        def mean(trained, batch):
            tree = trees.merge(frozen, trained)
            if batch.row_keys is not None:
                tree = with_masks(tree, pairs, batch.row_keys)
            return reference_model.loss(tree, batch, typed) / batch.weights.sum()

        trained = trees.matching(params, lambda path: "lora_" in path)
        value_and_grad = jax.value_and_grad(lambda trained: mean(trained, keyed))
        loss, expected = jax.device_get(jax.jit(value_and_grad)(trained))
        norm = float(optax.tree.norm(expected))
        with run.program.active():
            sums = jax.jit(run.program.eval_step)(params, batch)
        without, found = float(mean(trained, batch)), float(sums.loss / sums.weight)
    np.testing.assert_allclose(scalars["loss"], loss, rtol=1e-12)
    np.testing.assert_allclose(found, without, rtol=1e-12)
    clipped = jax.tree.map(lambda leaf: leaf * min(1, c.optim.clip_norm / norm), expected)
    found = trees.matching(grads, lambda path: "lora_" in path)  # not what a mixture measures
    assert_same((found,), (clipped,), rtol=1e-10)


def nested(path, tree):
    for key in reversed(path.split("/")):
        tree = {key: tree}
    return tree


def test_only_what_is_trained_has_gradients_and_moments():
    c = config(only="final_norm/*,layers/mlp/up/kernel")
    run = Run(c, data=2, fsdp=2)
    abstract = run.program.abstract_state
    gradients, moments = abstract.opt_state[0], abstract.opt_state[1][0].mu
    expected = {path for path in paths(abstract.params) if "lora_" in path}
    assert len(expected) == 14
    expected |= {"final_norm/scale", "layers/mlp/up/kernel"}
    assert (
        {*paths(gradients)} == {*paths(moments)} == expected == {*paths(run.program.grad_shardings)}
    )
    trained = sum(leaf.size for leaf in jax.tree.leaves(moments))
    counters = states.bytes_of(abstract.opt_state) - 3 * 4 * trained  # gradients kept, two moments
    assert counters < 32


def paths(tree):
    return [trees.name_of(path) for path, _ in jax.tree.leaves_with_path(tree)]


SLOW = [
    pytest.param(only, marks=pytest.mark.slow) for only in ("layers/attention/*", "final_norm/*")
]


@pytest.mark.parametrize("only", ["tokens/*", *SLOW])
@pytest.mark.slow
def test_parameters_that_match_no_pattern_keep_every_bit_in_a_pipeline(only):
    c = config(only=only)
    c.adapter.rank = 0
    run = Run(c, pipeline=2)
    with run.program.active():
        state = run.program.initial_state(0)
        batch = run.parts.train_data.read(np.arange(16))
        after, _ = jax.jit(run.program.train_step)(state, batch)
    is_changed = jax.tree.map(lambda a, b: bool((a != b).any()), state.params, after.params)
    changed = [trees.name_of(path) for path, one in jax.tree.leaves_with_path(is_changed) if one]
    assert changed == [path for path in paths(state.params) if path.startswith(only[:-1])]


@pytest.mark.parametrize(
    ("rank", "only", "is_trained"),
    [
        (0, "*", True),
        (RANK, "*", False),
        (0, "layers/attention/*", False),
        (RANK, "layers/mlp/measured/*", True),
        (0, "layers/mlp/*", True),
    ],
)
@pytest.mark.slow
def test_the_bias_of_a_router_is_frozen_like_other_parameters(rank, only, is_trained):
    c = config(trainable=only)
    c.adapter.rank = rank
    c.model.update(num_experts=4, d_expert=16, balance="bias", balance_weight=0.125)
    model = build_model(parse(c, num_devices=1))
    params = model.init(jax.random.key(0))
    means = jax.tree.map(jnp.ones_like, trained_part(params, model.is_trained))
    load = means["layers"]["mlp"]["measured"]["load"].at[:, 0].set(0.0)
    means = trees.merge(means, nested("layers/mlp/measured", {"load": load}))
    new, _ = model.measure(params, means)
    before, after = (tree["layers"]["mlp"]["measured"] for tree in (params, new))
    assert bool((after["bias"] != before["bias"]).any()) == is_trained
    np.testing.assert_array_equal(after["load"], load)  # a statistic, not a parameter


@pytest.mark.slow
def test_an_adapter_starts_as_the_model_it_starts_from_and_resumes(tmp_path):
    c = config()
    c.adapter.rank, c.train.steps = 0, 1
    base = train(c, workdir=tmp_path / "base")
    c = config(steps=0)
    c.checkpoint.init_from = str(tmp_path / "base")
    assert train(c, workdir=tmp_path / "tuned").eval_loss == pytest.approx(base.eval_loss, abs=1e-6)
    losses = []
    for stops in ((4,), (2, 4)):
        folder = tmp_path / f"run{len(stops)}"
        for steps in stops:
            c.train.steps, c.optim.schedule, c.train.trainable = steps, "constant", "final_norm/*"
            result = train(c, workdir=folder)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses.append([row["loss"] for row in rows if "loss" in row])
    assert losses[0] == losses[1] and len(losses[0]) == 4
    kept = trees.matching(
        result.state.params, lambda path: "lora_" not in path and "final" not in path
    )
    before = trees.intersect(base.state.params, kept)
    chex.assert_trees_all_equal(kept, before, strict=True)


@pytest.fixture(scope="module")
def adapted_run(tmp_path_factory):
    """Returns the workdir and the held-out loss of a run that trained an adapter."""
    workdir = tmp_path_factory.mktemp("adapter") / "run"
    c = config(steps=2)
    c.adapter.targets = ("layers/attention/*",)
    c.optim.learning_rate, c.optim.schedule, c.optim.clip_norm = 0.1, "constant", 1.0
    return workdir, train(c, workdir=workdir).eval_loss


STARTS = {
    "the same": {},
    "other targets": {"adapter.targets": ("layers/mlp/*", "layers/attention/query")},
    "another rank": {"adapter.rank": 5},
    "another alpha": {"adapter.alpha": 2.0},
    "none": {"adapter.rank": 0},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "the same")) for name in STARTS]
)
@pytest.mark.slow
def test_a_run_starts_as_the_adapted_model_that_it_starts_from(name, adapted_run, tmp_path, capsys):
    """Whatever its own adapter is; the log says what became of the other one."""
    workdir, expected = adapted_run
    c = config(steps=0)
    c.adapter.targets = ("layers/attention/*",)
    c.update_from_flattened_dict(STARTS[name])
    c.mesh.update(data=2, fsdp=2, tensor=2)
    c.checkpoint.init_from = str(workdir)
    result = train(c, workdir=tmp_path)
    assert result.eval_loss == pytest.approx(expected, abs=2e-6)
    is_same = name == "the same"
    line = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("parameters of"))
    assert ("with its adapter (rank 3, alpha 12)" in line) and "not used" not in line
    assert ("merged into the kernels" in line) != is_same
    events = [json.loads(x) for x in (tmp_path / "events.jsonl").read_text().splitlines()]
    (event,) = (event for event in events if event["event"] == "init_from")
    assert event["adapter"] == ("loaded" if is_same else "merged")
    assert any("lora_a" in path for path in event["new"]) == (not is_same and name != "none")


@pytest.mark.slow
def test_inference_rejects_another_adapter_than_the_checkpoint_has(adapted_run):
    c = config()
    c.adapter.targets, c.adapter.alpha = ("layers/attention/*",), 2.0
    with pytest.raises(ConfigError, match=r"^adapter.alpha=2.0: .* was trained with 12.0"):
        restore_params(parse(c, num_devices=8), adapted_run[0])


@pytest.mark.slow
def test_a_run_starts_with_the_adapter_of_the_layers_that_init_only_names(adapted_run, tmp_path):
    c = config(steps=0)
    c.adapter.rank = 0
    c.checkpoint.update(init_from=str(adapted_run[0]), init_only="layers/attention/query/*")
    params = train(c, workdir=tmp_path).state.params
    c.checkpoint.init_from = ""
    first = train(c).state.params
    changed = jax.tree.map(lambda a, b: bool((a != b).any()), params, first)
    names = [trees.name_of(path) for path, one in jax.tree.leaves_with_path(changed) if one]
    assert names == ["layers/attention/query/kernel"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"adapter.rank": -1}, "adapter.rank=-1"),
        ({"adapter.alpha": 0.0}, "adapter.alpha=0.0: use a positive number"),
        ({"adapter.targets": ()}, r"adapter.targets=\(\)"),
        ({"adapter.dropout": 1.0}, "adapter.dropout=1.0: is a probability"),
        (
            {"adapter.targets": ("layers/atention/*",)},
            "no linear layer has such a path.*there are layers/attention/key",
        ),
        ({"train.trainable": "layer/*"}, "train.trainable=layer.*no parameter has such a path"),
    ],
)
def test_settings_that_do_not_fit_are_errors(changes, fault):
    c = config()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=fault):
        build_model(parse(c))


class Regressor(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.outer = nnx.LinearGeneral((2, 4), (5,), axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.outer(jax.nn.tanh(self.inner(x)))


@pytest.mark.slow
def test_a_model_of_nnx_modules_has_an_adapter_too():
    """Its loss, and the gradients of A and B, are those of kernels with the product added."""
    x = np.random.default_rng(0).normal(size=(6, 2, 3)).astype(np.float32)
    plain = from_nnx(Regressor, lambda module, x: weighted((module(x) ** 2).sum(-1)))
    assert plain.linears == {"inner": 1, "outer": 2}
    model = lora.lora(plain, rank=2, alpha=6.0, targets=("inner", "out*"))
    params = jax.tree.map(lambda leaf: leaf + 0.1, model.init(jax.random.key(0)))
    base, pairs = split(params)

    def merged(pairs):
        (a, b), (c, d) = pairs["inner"], pairs["outer"]
        kernels = {"inner": a @ b, "outer": (c.reshape(8, 2) @ d).reshape(2, 4, 5)}
        added = {
            name: {**base[name], "kernel": base[name]["kernel"] + 3 * kernels[name]}
            for name in base
        }
        return plain.loss(added, x, None).loss

    def adapted(pairs):
        nested = {name: {"lora_a": a, "lora_b": b} for name, (a, b) in pairs.items()}
        return model.loss(trees.merge(base, nested), x, None).loss

    found, expected = (jax.value_and_grad(one)(pairs) for one in (adapted, merged))
    chex.assert_trees_all_close(found, expected, rtol=2e-5)


def test_a_model_without_linear_layers_gets_no_adapter():
    model = from_nnx(lambda rngs: nnx.Embed(8, 4, rngs=rngs), lambda module, x: weighted(x))
    with pytest.raises(ConfigError, match=r"^adapter.targets=x,y: the model has no layer .*Dense"):
        lora.lora(model, rank=2, alpha=6.0, targets=("x", "y"))


def test_a_model_that_is_one_loss_has_no_dropout_of_its_adapter():
    plain = from_nnx(Regressor, lambda module, x: weighted((module(x) ** 2).sum(-1)))
    with pytest.raises(ConfigError, match=r"^adapter.dropout=0.1: the model is one loss"):
        lora.lora(plain, rank=2, alpha=6.0, targets=("inner",), dropout=0.1)


def test_layers_that_nnx_stacked_get_no_adapter():
    @nnx.vmap(axis_size=4)
    def stacked(rngs):
        return nnx.Linear(3, 3, rngs=rngs)

    model = from_nnx(lambda rngs: stacked(rngs.split(4)), lambda module, x: weighted(x))
    assert model.linears == {}


@pytest.mark.slow
def test_an_adapter_of_experts_trains_equally_on_every_mesh():
    """Where tokens are sent to the devices of their experts, too; dropout has no place there."""
    losses = []
    meshes = (dict(data=8), dict(expert=4, tensor=2), dict(pipeline=2, fsdp=2, expert=2))
    for sizes in meshes:
        c = tiny_config()
        c.model.update(num_layers=2, num_experts=4, d_expert=8)
        c.adapter.update(rank=2, alpha=6.0, targets=("layers/mlp/*",), experts=True, rslora=True)
        c.mesh.update({"data": 1, **sizes})
        c.train.update(steps=3, log_every=1, global_batch=16, num_microbatches=2)
        c.optim.update(learning_rate=0.05, schedule="constant", warmup_steps=0)
        c.eval.batches = 0
        rows = []
        state = train(c, on_metrics=rows.append).state
        losses.append([row["loss"] for row in rows if "loss" in row])
        a = state.params["layers"]["mlp"]["up"]["lora_a"]
        assert a.shape == (2, 4, c.model.d_model, 2)
        assert np.abs(state.params["layers"]["mlp"]["down"]["lora_b"]).max() > 0.01
    assert losses[0][0] != losses[0][-1]
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=2e-5)
    c.adapter.dropout = 0.1
    with pytest.raises(ConfigError, match="adapter.dropout=0.1: the update of an expert"):
        train(c)
    c.adapter.update(dropout=0.0, experts=False, targets=("layers/mlp/up",))
    with pytest.raises(ConfigError, match="which adapter.experts=True adapts"):
        train(c)
