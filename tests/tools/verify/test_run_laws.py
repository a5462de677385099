"""Laws of runs: they hold, and each finds the bugs of its kind, planted one at a time."""

import inspect
import sys
import textwrap

import jax
import jax.numpy as jnp
import pytest

from meshtrain import run, step, train
from meshtrain.checkpoint import saver
from meshtrain.data import tokens
from meshtrain.models.base import Model
from meshtrain.monitor import divergence, health, heldout, writer
from meshtrain.ops import losses
from meshtrain.tools.verify.case import VerifyCase
from meshtrain.tools.verify.laws import runs as run_laws
from tests.lib.configs import tiny_config


def small_model():
    """A stack of blocks over a vocabulary of 64 that compiles quickly."""

    def init(key):
        outer, layers = jax.random.split(key)
        return {
            "tokens": jax.random.normal(outer, (64, 8)),
            "layers": {"kernel": jax.random.normal(layers, (2, 8, 8)) / 8},
        }

    def head(params, x, batch):
        logits = jnp.einsum("bsd,vd->bsv", x, params["tokens"])
        return losses.cross_entropy(logits, batch.targets, batch.weights, z_loss=1e-2)

    return Model(
        init,
        {"tokens": ("vocab", "embed"), "layers": {"kernel": ("layers", "embed", "mlp")}},
        embed=lambda params, batch: params["tokens"][batch.tokens],
        block=lambda layer, x, batch: x + jnp.tanh(x @ layer["kernel"]),
        head=head,
    )


@pytest.fixture(scope="module")
def subject():
    with jax.enable_x64(True):
        yield VerifyCase(tiny_config(), small_model(), None, keep_sizes=False)


@pytest.mark.slow
def test_the_laws_hold(subject):
    assert {name: fault for name, law in run_laws.laws(subject).items() if (fault := law())} == {}


# ---- planted bugs: (module or class, function), the line, the line with the bug, the law that
# finds it ----

BUGS = {
    "held-out loss with z-loss": (
        (heldout, "make_heldout_metrics"),
        'means.get("cross_entropy", means["loss"])',
        'means["loss"]',
        "evaluation",
    ),
    "mean of the means of held-out batches": (
        (heldout, "make_heldout_metrics"),
        "lambda *parts: sum(parts), *sums).mean()",
        "lambda *parts: sum(parts) / len(parts), *[one.mean() for one in sums])",
        "evaluation",
    ),
    "a held-out batch left out": (
        (heldout, "make_heldout_metrics"),
        "range(num_batches)",
        "range(num_batches - 1)",
        "evaluation",
    ),
    "learning rate of the step, skipped steps included": (
        (step, "make_train_step"),
        "schedule(count)",
        "schedule(state.step)",
        "learning rates",
    ),
    "skipped steps counted by the optimizer": (
        (step, "_unless_skipped"),
        "jnp.where(finite, after, before)",
        "jnp.where(finite, after, before) if after.ndim else after",
        "learning rates",
    ),
    "optimizer state not restored": (
        (saver.Saver, "restore"),
        "return saved, state",
        "zeros = __import__('jax').tree.map(lambda leaf: 0 * leaf, state.opt_state)\n"
        "    state = state._replace(opt_state=zeros)\n"
        "    return saved, state",
        "learning rates",
    ),
    "moments not restored": (
        (saver.Saver, "restore"),
        "return saved, state",
        "reset = lambda leaf: 0 * leaf if leaf.ndim else leaf\n"
        "    moments = __import__('jax').tree.map(reset, state.opt_state)\n"
        "    return saved, state._replace(opt_state=moments)",
        "resume",
    ),
    "position computed from the step, although a rollback skipped data": (
        (run, "open_run"),
        "position = saved.position if saved else 0",
        "position = saved.step * cfg.train.global_batch if saved else 0",
        "data order",
    ),
    "position of the last batch that was read ahead": (
        (run.Run, "manifest_fields"),
        "self.loader.position",
        "self.loader._next",
        "data order",
    ),
    "steps counted on after a rollback": (
        (train, "_roll_back"),
        "return restored, saved.step",
        "return restored, step",
        "data order",
    ),
    "rows of lost steps kept after a resume": (
        (writer.Writer, "_remove_rows_from"),
        "_row_step(row) < start",
        "_row_step(row) <= start",
        "data order",
    ),
    "loss statistics forgotten in a resume": (
        (run, "open_run"),
        "saved.loss_statistics if saved else {}",
        "{}",
        "divergence",
    ),
    "loss of a spike in the running mean": (
        (divergence.LossMonitor, "observe"),
        "if not is_spike:",
        "if not is_spike or self._losses.add(loss):",
        "divergence",
    ),
    "skips in a row forgotten in a resume": (
        (divergence.LossMonitor, "__init__"),
        'statistics.get("skips", 0)',
        '0 * statistics.get("skips", 0)',
        "skips in a row",
    ),
    "replicas checked at multiples of health.every only": (
        (health.ReplicaCheck, "due"),
        "(saving or self._speeds_due(step))",
        "self._speeds_due(step)",
        "replicas",
    ),
    "replicas not checked before the save at the end": (
        (train, "_loop"),
        "saving=save_due or is_ending",
        "saving=save_due",
        "replicas",
    ),
    "replicas not checked before the save after an error of the data": (
        (train, "_save_before_data_error"),
        "run.replica_check.due(step, saving=True)",
        "run.replica_check.due(step, saving=False)",
        "replicas",
    ),
    "the same order in each epoch": (
        (tokens, "_epoch_order"),
        "order_key(int(epoch))",
        "order_key(0)",
        "epochs",
    ),
    "epochs that end at a block of samples": (
        (tokens, "_epoch_order"),
        "np.arange(block * BLOCK, (block + 1) * BLOCK)",
        "np.arange(BLOCK) + block * size",
        "epochs",
    ),
    "phases of a resumed run begin later": (
        (tokens, "place"),
        "run.position + (step - run.step) * run.global_batch",
        "run.position + step * run.global_batch",
        "phases",
    ),
    "a phase that begins next has begun": (
        (tokens, "place"),
        "phase.sample < run.position",
        "phase.sample <= run.position",
        "phases",
    ),
}


def plant(patch, place, line, bug):
    """Replaces a function, wherever imported, by one whose source has `bug` instead of `line`."""
    owner, name = place
    original, file = getattr(owner, name), inspect.getsourcefile(owner)
    text = textwrap.dedent(inspect.getsource(original))
    assert text.count(line) == 1, f"{name}: {text.count(line)} x {line!r}"
    namespace = {}
    exec(compile(text.replace(line, bug), file, "exec"), original.__globals__, namespace)
    importers = [m for m in list(sys.modules.values()) if getattr(m, name, None) is original]
    for module in {owner, *importers}:
        patch.setattr(module, name, namespace[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name, subject, monkeypatch, kill_table):
    *bug, law = BUGS[name]
    if law != "replicas":  # one device compiles three times as fast
        devices = jax.devices()[:1]
        monkeypatch.setattr(jax, "devices", lambda: devices)
        monkeypatch.setattr(jax, "device_count", lambda: 1)
    plant(monkeypatch, *bug)
    kill_table[name] = run_laws.laws(subject)[law]()
    assert kill_table[name], "survived"
