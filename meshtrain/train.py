"""The trainer. Read `train` from top to bottom: check, build, restore or initialise, compile, loop."""

import contextlib
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import grads, optim, sharding
from meshtrain import state as states
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import CheckpointConfig, Config, EvalConfig, parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
from meshtrain.mesh import AXES, make_mesh
from meshtrain.models.base import Model
from meshtrain.state import TrainState
from meshtrain.step import make_train_step
from meshtrain.writer import Writer


class Result(NamedTuple):
    state: TrainState
    step: int  # updates done
    eval_loss: float | None  # held-out loss at the end, None where nothing is held out
    interrupted: bool  # by Ctrl-C or SIGTERM, after saving the state


def train(
    config: Mapping[str, Any],
    *,
    workdir: str | Path | None = None,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    eval_data: Source | Iterable[Any] | None = None,
) -> Result:
    """Trains as `config` says, going on from the newest checkpoint in `workdir`.

    `model` and `data` take the place of what `config.model` and `config.data` build; an iterable
    yields global batches (see `data.loader.from_iterable`). Without `workdir` nothing is saved.
    Raises ConfigError for what the user has to change, before anything is compiled, and
    FloatingPointError when the loss or the gradient is no longer finite.
    """
    # ---- check and build: nothing is computed yet ----
    cfg = parse(config, num_devices=jax.device_count(), own=_brought(model=model, data=data))
    mesh = make_mesh(cfg.mesh)
    model = model or cfg.model
    if data is None:
        data, eval_data = cfg.train_data, eval_data or cfg.heldout_data
    schedule = optim.make_schedule(cfg.optim, steps=cfg.train.steps)
    optimizer = cfg.build_optimizer(schedule)
    loss_fn = grads.make_loss(
        model, dtype=cfg.train.dtype, remat=cfg.train.remat, unroll=cfg.train.unroll
    )

    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(sharding.use_rules(cfg.rules))
        init = states.initializer(model, optimizer, param_dtype=cfg.train.param_dtype)
        abstract_state, grad_places = states.plan(
            init, model.axes, optimizer, cfg.rules, mesh, zero_stage=cfg.train.zero_stage
        )
        places = states.places_of(abstract_state)
        grad_fn = grads.accumulate(
            loss_fn, num_microbatches=cfg.train.num_microbatches, grad_shardings=grad_places
        )
        train_step = make_train_step(
            grad_fn, optimizer, schedule, clip_norm=cfg.optim.clip_norm, seed=cfg.train.seed
        )
        eval_step = jax.jit(grads.evaluate(loss_fn, num_microbatches=cfg.train.num_microbatches))

        writer = stack.enter_context(contextlib.closing(_open_writer(workdir)))
        writer.config({**cfg.raw, "mesh": asdict(cfg.mesh)})
        for line in _summary(cfg, abstract_state, data):
            writer.line(line)
        stop = stack.enter_context(_interrupts())

        # ---- restore, or initialise: every parameter is born where it lives ----
        checkpointer, start, position = None, 0, 0
        if workdir:
            checkpointer = Checkpointer(Path(workdir) / "checkpoints", keep=cfg.checkpoint.keep)
            stack.enter_context(contextlib.closing(checkpointer))
        if checkpointer and (start := checkpointer.latest() or 0):
            state, position = checkpointer.restore(start, abstract_state)
            writer.event("restore", step=start, position=position)
            writer.line(f"restored step {start} from {workdir}")
        else:
            state = jax.jit(init, out_shardings=places)(jax.random.key(cfg.train.seed))
        writer.event("start", step=start, jax=jax.__version__, mesh=asdict(cfg.mesh))

        def open_loader(source, position):
            where = dict(global_batch=cfg.train.global_batch, position=position)
            if not isinstance(source, Source):
                source = from_iterable(source, **where)
            return contextlib.closing(Loader(source, mesh, cfg.rules, **where))

        def heldout_loss() -> float | None:
            """The loss on the first `eval.batches` held-out batches, the same ones every time."""
            if eval_data is None or not cfg.eval.batches:
                return None
            with open_loader(eval_data, 0) as loader:
                sums = [eval_step(state.params, next(loader)) for _ in range(cfg.eval.batches)]
            return float(jax.tree.map(lambda *parts: sum(parts), *sums).mean()["loss"])

        def save(step: int) -> None:
            began = time.perf_counter()
            position_then = position + (step - start) * cfg.train.global_batch
            if checkpointer and checkpointer.save(step, state, position=position_then):
                writer.event("save", step=step, blocked_seconds=time.perf_counter() - began)

        # ---- compile, then loop: evaluate, save, step, report the step before ----
        step = start
        loader = stack.enter_context(open_loader(data, position))
        if start < cfg.train.steps:
            began = time.perf_counter()
            jitted = jax.jit(train_step, donate_argnums=0, out_shardings=(places, None))
            train_step = jitted.lower(abstract_state, loader.peek()).compile()
            writer.line(f"compiled in {time.perf_counter() - began:.1f} s")
            sizes = dict(
                start=start, steps=cfg.train.steps, samples=position, batch=cfg.train.global_batch
            )
            writer.begin(**sizes, **_units(loader.peek(), model))
        while step < cfg.train.steps and not stop.is_set():
            extra = {}
            eval_due, save_due = _due(step, start, cfg.eval), _due(step, start, cfg.checkpoint)
            if eval_due or save_due:
                writer.flush()  # first, so that nothing broken is evaluated or saved
                if eval_due:
                    extra = {"eval_loss": heldout_loss()}
                if save_due:
                    save(step)
                writer.restart_clock()
            state, report = train_step(state, next(loader))
            log = step % cfg.train.log_every == 0 or eval_due or step + 1 == cfg.train.steps
            # Writes the step before, while the device works on this one.
            writer.step(step, report, log=log, **extra)
            step += 1
        writer.flush()
        save(step)

        finished = step >= cfg.train.steps
        eval_loss = heldout_loss() if finished else None
        writer.event("end" if finished else "preempted", step=step, eval_loss=eval_loss)
        writer.line(_farewell(step, cfg, eval_loss, data, workdir))
        return Result(state, step, eval_loss, not finished)


def _brought(**parts: Any) -> list[str]:
    """Names what the caller brings along, and refuses what is no Model."""
    if not isinstance(parts["model"], Model | None):
        kind = type(parts["model"]).__name__
        raise ConfigError(
            f"model={kind}: make a Model of it with meshtrain.from_nnx or meshtrain.from_linen"
        )
    return [name for name, given in parts.items() if given is not None]


def _due(step: int, start: int, section: EvalConfig | CheckpointConfig) -> bool:
    return section.every > 0 and step % section.every == 0 and step > start


def _open_writer(workdir: str | Path | None) -> Writer:
    try:
        return Writer(Path(workdir) if workdir else None, leader=jax.process_index() == 0)
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: {error.strerror}; use a folder that can be written"
        ) from error


@contextlib.contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Makes the first Ctrl-C or SIGTERM set an event; a second one acts as ever."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked  # signals belong to the main thread
        return

    def ask(signum, frame):
        asked.set()
        signal.signal(signum, before[signum])

    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _units(batch: Any, model: Model) -> dict[str, Any]:
    """What a sample consists of, to count and to time: tokens of a language model, else itself."""
    if not isinstance(batch, Batch):
        return {"per_sample": 1, "unit": "examples", "flops": None}
    seq_len = batch.tokens.shape[1]
    return {
        "per_sample": seq_len,
        "unit": "tokens",
        "flops": model.flops_per_token and model.flops_per_token(seq_len),
    }


def _summary(cfg: Config, abstract_state: TrainState, data: Any) -> Iterator[str]:
    device = jax.devices()[0].device_kind
    shape = (
        " x ".join(f"{axis} {size}" for axis in AXES if (size := getattr(cfg.mesh, axis)) > 1)
        or "one device"
    )
    yield f"mesh        {shape} · {jax.device_count()} {device} · jax {jax.__version__}"
    count = states.count(abstract_state.params)
    yield f"parameters  {count:,} · {cfg.train.param_dtype}, computed in {cfg.train.dtype}"
    params, opt_state = (
        states.bytes_per_device(tree) / 1e6
        for tree in (abstract_state.params, abstract_state.opt_state)
    )
    yield f"per device  {params:,.2f} MB of parameters, {opt_state:,.2f} MB of optimizer state"
    if isinstance(data, Source):
        yield f"data        {data.description}"


def _farewell(step: int, cfg: Config, eval_loss: float | None, data: Any, workdir: Any) -> str:
    if step < cfg.train.steps:
        saved = (
            f"saved in {workdir}, the same command goes on from here"
            if workdir
            else "nothing saved (no --workdir)"
        )
        return f"stopped after {step} of {cfg.train.steps} steps · {saved}"
    parts = [f"done: {step} steps"]
    if eval_loss is not None:
        parts.append(f"held-out loss {eval_loss:.4f}")
    if isinstance(data, Source) and data.baseline is not None:
        parts.append(f"unigram entropy {data.baseline:.4f} nats per token")
    return " · ".join(parts)
