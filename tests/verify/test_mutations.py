"""Typical bugs of parallel training, planted one at a time: `verify` must find each of them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import LAYOUT, tiny_config

from meshtrain import grads, metrics, optim, program, step
from meshtrain.data.loader import Loader
from meshtrain.models import transformer
from meshtrain.ops import losses
from meshtrain.parallel import sync
from meshtrain.parallel.pipeline import executor, ring, stages
from meshtrain.verify import laws, verify
from meshtrain.verify.subject import Subject

pytestmark = pytest.mark.slow
GPT2 = dict(norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True)
FULL = LAYOUT | dict(zero_stage=3, remat="dots", packing=True, masks=True)
ONE_BATCH = FULL | dict(data=1, fsdp=4, num_microbatches=1)
PIPELINE = FULL | dict(pipeline=2, fsdp=1, schedule="interleaved", num_chunks=2, keep="inputs")


@pytest.fixture(scope="module")
def subject():
    c = tiny_config()
    c.model.update(GPT2)
    with jax.enable_x64(True):
        subject = Subject(c, None, None, keep_sizes=False)
        for packing in (True, False):
            subject.steps(packing=packing, masks=True)  # cached, before any bug is planted
        yield subject


def fault_found(subject, row):
    """Returns the first fault that `verify` finds on one layout or on one device, else None."""
    return verify.check_layout(subject, row).fault or next(
        iter(laws.violations(subject, quick=True)), None
    )


@pytest.mark.parametrize("row", [FULL, ONE_BATCH], ids=["two micro-batches", "one"])
def test_without_a_bug_no_fault_is_found(subject, row):
    assert fault_found(subject, row) is None


MUTANTS = {}


def mutant(function):
    MUTANTS[function.__name__.replace("_", " ")] = function
    return function


def of_gradients(change):
    """Returns a `synchronise` that applies `change` to the gradients; its metrics are correct."""
    original = sync.synchronise
    return lambda sums, places: (change(sums[0]), original(sums, places)[1])


@mutant
def a_dropped_sum_over_data(patch, subject):
    first = functools.partial(jax.tree.map, lambda leaf: leaf[0])
    patch.setattr(sync, "synchronise", of_gradients(first))


@mutant
def a_doubled_sum_over_data(patch, subject):
    twice = functools.partial(jax.tree.map, lambda leaf: 2 * leaf.sum(0))
    patch.setattr(sync, "synchronise", of_gradients(twice))


@mutant
def a_mean_over_data_instead_of_a_sum(patch, subject):
    mean = functools.partial(jax.tree.map, lambda leaf: leaf.mean(0))
    patch.setattr(sync, "synchronise", of_gradients(mean))


@mutant
def a_forgotten_reduction_of_biases(patch, subject):
    def reduce(path, leaf):
        return leaf[0] if path[-1].key == "bias" else leaf.sum(0)

    patch.setattr(
        sync, "synchronise", of_gradients(lambda tree: jax.tree.map_with_path(reduce, tree))
    )


@mutant
def a_mean_of_means(patch, subject):
    def make_loss(model, **options):
        loss = original(model, **options)

        def mean(*args):
            sums = loss(*args)
            return metrics.Metrics(sums.loss / sums.weight, jnp.ones_like(sums.weight))

        return mean

    original = grads.make_loss
    patch.setattr(grads, "make_loss", make_loss)


@mutant
def a_mean_of_means_in_evaluation(patch, subject):
    def evaluate(loss, *, dtype, num_microbatches):
        def metrics_of(params, batch):
            params, parts = grads.cast(params, dtype), grads.split(batch, num_microbatches)
            sums = jax.lax.map(lambda part: loss(params, part, None), parts)
            return metrics.Metrics((sums.loss / sums.weight).mean(), jnp.ones(()))

        return metrics_of

    patch.setattr(grads, "evaluate", evaluate)


@mutant
def a_missing_token_weight(patch, subject):
    patch.setattr(losses, "weighted", lambda loss, weight: metrics.weighted(loss))


@mutant
def a_weight_of_one_shard_for_all(patch, subject):
    original = sync.synchronise

    def synchronise(sums, places):
        gradients, total = original(sums, places)
        return gradients, metrics.Metrics(total.loss, sums[1].weight[0] * len(sums[1].weight))

    patch.setattr(sync, "synchronise", synchronise)


@mutant
def a_micro_batch_used_twice(patch, subject):
    original = grads.split
    again = functools.partial(jax.tree.map, lambda leaf: leaf.at[0].set(leaf[1]))
    patch.setattr(grads, "split", lambda batch, num: again(original(batch, num)))


@mutant
def a_wrong_axis_in_a_rule(patch, subject):
    patch.setitem(subject.raw, "rules", (("batch", "data"), *subject.raw["rules"]))


@mutant
def a_norm_of_each_shard_instead_of_all(patch, subject):
    def clip(max_norm):
        def update(tree, state, params=None):
            scale = lambda leaf: jnp.minimum(1, max_norm / optax.tree.norm(leaf))  # noqa: E731
            return jax.tree.map(lambda leaf: leaf * scale(leaf), tree), state

        return optax.GradientTransformation(lambda _: (), update)

    patch.setattr(step.optax, "clip_by_global_norm", clip)


@mutant
def no_clipping(patch, subject):
    patch.setattr(step.optax, "clip_by_global_norm", lambda max_norm: optax.identity())


@mutant
def positions_off_by_one_in_the_second_half(patch, subject):
    original = transformer.positions_of

    def positions_of(batch):
        length = batch.tokens.shape[1]
        return original(batch) - (jnp.arange(length) == length // 2)[None, :]

    patch.setattr(transformer, "positions_of", positions_of)


@mutant
def a_lost_mask_between_documents(patch, subject):
    original = transformer.attention

    def unmasked(*qkv, segments_BS, **options):
        return original(*qkv, None, **options)

    patch.setattr(transformer, "attention", unmasked)


@mutant
def a_lost_causal_mask(patch, subject):
    original = transformer.attention

    def all_seen(q, *kv, **options):
        return original(
            q, *kv, **options, start=q.shape[1]
        )  # as if all keys came before all queries

    patch.setattr(transformer, "attention", all_seen)


@mutant
def padded_logits_that_count(patch, subject):
    patch.setattr(transformer.EmbeddingAndHead, "project", lambda self, kernel, x: x @ kernel)


@mutant
def a_gradient_of_only_the_last_chunk(patch, subject):
    def forward(loss, kernel, parts):
        metrics, (_, grad_x) = original(loss, kernel, parts)
        last = jax.tree.map(lambda leaf: leaf[-1:], parts)
        return metrics, (original(loss, kernel, last)[1][0], grad_x)

    original = losses._forward
    patch.setattr(losses, "MIB", 1)
    patch.setattr(losses._sum_over_chunks, "fwd", forward)


@mutant
def a_gradient_taken_with_check_vma_off(patch, subject):
    spec = jax.P(("data", "fsdp"), "tensor")

    def inside(values):
        return jax.value_and_grad(lambda v: jax.lax.psum(v.sum(), ("data", "fsdp", "tensor")))(
            values
        )

    @jax.custom_vjp
    def total(values):
        return values.sum()

    def forward(values):
        region = jax.shard_map(inside, in_specs=spec, out_specs=(jax.P(), spec), check_vma=False)
        return (values.sum(), jnp.ones_like(values)) if on_one_device() else region(values)

    def on_one_device():
        return jax.sharding.get_abstract_mesh().empty

    total.defvjp(forward, lambda gradient, cotangent: (cotangent * gradient,))

    def weighted(loss, weight):
        return metrics.Metrics(total(loss * weight), weight.sum())

    patch.setattr(losses, "weighted", weighted)


@mutant
def optimizer_state_of_another_shard(patch, subject):
    original = program.make_train_step

    def make_train_step(grad_fn, optimizer, *args, **options):
        def update(tree, state, params):
            moved = jax.tree.map(
                lambda leaf: jnp.roll(leaf, 1, axis=0) if leaf.ndim else leaf, state
            )
            return optimizer.update(tree, moved, params)

        moving = optax.GradientTransformation(optimizer.init, update)
        return original(grad_fn, moving, *args, **options)

    patch.setattr(program, "make_train_step", make_train_step)


@mutant
def tokens_of_another_device(patch, subject):
    original = Loader.read

    def read(self, position):
        batch = original(self, position)
        return batch._replace(tokens=jnp.roll(batch.tokens, 4, axis=0))

    patch.setattr(Loader, "read", read)


@mutant
def a_layer_left_out(patch, subject):
    original = grads.run_blocks

    def run_blocks(block, stack, *args):
        return original(block, jax.tree.map(lambda leaf: leaf[:-1], stack), *args)

    patch.setattr(grads, "run_blocks", run_blocks)


@mutant
def parameters_left_replicated_at_stage_3(patch, subject):
    original = program.states.plan

    def plan(*args, zero_stage):
        return original(*args, zero_stage=min(zero_stage, 2))

    patch.setattr(program.states, "plan", plan)


@mutant
def a_learning_rate_of_the_step_before(patch, subject):
    def make_schedule(*args, **options):
        schedule = original(*args, **options)
        return lambda number: schedule(jnp.maximum(number - 1, 0))

    original = optim.make_schedule
    patch.setattr(optim, "make_schedule", make_schedule)


@mutant
def a_result_rounded_to_float32(patch, subject):
    original = grads.accumulate
    patch.setattr(
        grads,
        "accumulate",
        lambda loss, **options: original(loss, **options | {"dtype": "float32"}),
    )


# ---- bugs that also occur on one device: layouts agree with it, so only laws.py finds them ----


@mutant
def scores_not_scaled(patch, subject):
    original = transformer.attention
    patch.setattr(
        transformer, "attention", lambda q, *kv, **options: original(2 * q, *kv, **options)
    )


@mutant
def a_stopped_gradient_of_the_keys(patch, subject):
    original = transformer.attention
    stop = jax.lax.stop_gradient
    patch.setattr(
        transformer, "attention", lambda q, k, v, **options: original(q, stop(k), v, **options)
    )


@mutant
def weight_decay_of_every_parameter(patch, subject):
    original = optim.adamw

    @functools.wraps(original)  # its parameters are the keys of the `optim` section
    def adamw(learning_rate, **keys):
        return original(learning_rate, **keys | {"no_decay": ()})

    patch.setattr(optim, "adamw", adamw)


@mutant
def a_warm_up_from_zero(patch, subject):
    original = optim.optax.linear_schedule

    def schedule(start, *others, **options):
        return original(0.0 if start < others[0] else start, *others, **options)

    patch.setattr(optim.optax, "linear_schedule", schedule)


@mutant
def a_skipped_batch(patch, subject):
    original = Loader.__next__

    def skip_one(self):
        original(self)
        return original(self)

    patch.setattr(Loader, "__next__", skip_one)


@mutant
def gradients_left_scaled(patch, subject):
    original = program.make_train_step

    def make_train_step(grad_fn, *args, **options):
        def scaled(params, batch, key, scale=1.0):
            gradients, sums = grad_fn(params, batch, key, scale)
            return jax.tree.map(lambda leaf: leaf * scale, gradients), sums

        return original(scaled, *args, **options)

    patch.setattr(program, "make_train_step", make_train_step)


# ---- bugs of pipelines ----


@mutant
def pipeline_messages_not_sent(patch, subject):
    patch.setattr(ring, "send", lambda x, by: x)


@mutant
def pipeline_idle_stages_not_masked(patch, subject):
    original = ring.add
    patch.setattr(executor, "_masked", lambda active, x: x)
    patch.setattr(
        ring,
        "add",
        lambda tree, index, new, active: original(tree, index, new, jnp.ones_like(active)),
    )


@mutant
def pipeline_chunks_on_another_stage(patch, subject):
    def stay(P, V, *, inward):
        for chunk in range(V):
            yield [(stage, stage) for stage in range(P)], *2 * [np.full(P, chunk)]

    patch.setattr(ring, "rounds", stay)


def of_ticks(change):
    """Returns an `executor.ticks_of` whose result is changed by `change(ticks, table)`."""
    original = executor.ticks_of

    def ticks_of(table):
        return change(original(table), table)

    return ticks_of


@mutant
def pipeline_backward_of_another_input(patch, subject):
    def change(ticks, table):
        slot = np.where(ticks.backward.active, (ticks.backward.slot + 1) % table.num_slots, -1)
        return ticks._replace(backward=ticks.backward._replace(slot=slot))

    patch.setattr(executor, "ticks_of", of_ticks(change))


@mutant
def pipeline_head_of_another_microbatch(patch, subject):
    def change(ticks, table):
        return ticks._replace(
            last_backward=np.where(
                ticks.last_backward < 0, -1, (ticks.last_backward + 1) % table.num_microbatches
            )
        )

    patch.setattr(executor, "ticks_of", of_ticks(change))


@mutant
def pipeline_embedding_without_gradient(patch, subject):
    original = stages.Stages.embed
    patch.setattr(stages.Stages, "embed", lambda *args: jax.lax.stop_gradient(original(*args)))


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_found(name, subject, monkeypatch, kill_table):
    row = ONE_BATCH if "check vma" in name else PIPELINE if "pipeline" in name else FULL
    with monkeypatch.context() as patch:
        MUTANTS[name](patch, subject)
        jax.clear_caches()  # they hold traces of the model without the bug
        kill_table[name] = fault_found(subject, {**row, "loss_scale": "scaled" in name})
    jax.clear_caches()
    assert kill_table[name], f"{name}: survived"
    crash = re.search(r"\b\w+Error\b", kill_table[name])
    assert not crash, f"{name}: found only because it crashed: {kill_table[name]}"


def test_all_planted_bugs_were_tried(kill_table, request):
    if len(kill_table) < len(MUTANTS):
        pytest.skip("run the whole file to count")
    assert len(MUTANTS) >= 10 and all(kill_table.values())
