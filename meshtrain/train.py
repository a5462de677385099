"""The trainer. Read `train` from top to bottom: check, build, restore or initialise, compile, loop."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import summary
from meshtrain.checkpoint import Checkpointer
from meshtrain.config import Config, parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model
from meshtrain.program import assemble
from meshtrain.sections import CheckpointConfig, EvalConfig
from meshtrain.state import TrainState
from meshtrain.writer import Writer


class Result(NamedTuple):
    state: TrainState
    step: int  # batches seen
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
    FloatingPointError when the loss or the gradient is no longer finite (in float16: step after step).
    """
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_interrupts())

        # ---- check and build: nothing is computed yet ----
        cfg = parse(config, num_devices=jax.device_count(), own=_brought(model=model, data=data))
        workdir = Path(workdir) if workdir else None
        model = model or cfg.model
        if data is None:
            data, eval_data = cfg.train_data, eval_data or cfg.heldout_data
        elif eval_data is not None and not isinstance(eval_data, Source):
            eval_data = list(itertools.islice(eval_data, cfg.eval.batches))  # the same each time
        program = assemble(cfg, model)
        stack.enter_context(program.active())
        eval_step = jax.jit(program.eval_step)

        # ---- open what the run reads and writes, and say what it is about to do ----
        writer = stack.enter_context(contextlib.closing(_open_writer(workdir)))
        checkpointer, start, position = None, 0, 0
        if workdir:
            checkpointer = Checkpointer(workdir / "checkpoints", keep=cfg.checkpoint.keep)
            stack.enter_context(contextlib.closing(checkpointer))
            start = checkpointer.latest() or 0
            position = checkpointer.position(start) if start else 0

        loader = stack.enter_context(_open_loader(data, cfg, program.mesh, position))
        units = summary.units_of(loader.peek(), model)
        for line in summary.before(cfg, program.abstract_state, units, data):
            writer.line(line)

        # ---- restore, or initialise: every parameter is born where it lives ----
        if start:
            state = checkpointer.restore(start, program.abstract_state)
            writer.event("restore", step=start, position=position)
            writer.line(f"restored step {start} from {workdir}")
        else:
            state = program.start(cfg.train.seed)
        writer.config({**cfg.raw, "mesh": asdict(cfg.mesh)})
        writer.event("start", step=start, jax=jax.__version__, mesh=asdict(cfg.mesh))

        def heldout_loss() -> float | None:
            """The loss on the first `eval.batches` held-out batches, the same ones every time."""
            if eval_data is None or not cfg.eval.batches:
                return None
            with _open_loader(eval_data, cfg, program.mesh, 0) as heldout:
                sums = [eval_step(state.params, next(heldout)) for _ in range(cfg.eval.batches)]
            means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
            return float(means.get("cross_entropy", means["loss"]))  # without the z-loss

        def save(step: int) -> None:
            began = time.perf_counter()
            position_then = position + (step - start) * cfg.train.global_batch
            if checkpointer and checkpointer.save(step, state, position=position_then):
                writer.event("save", step=step, blocked_seconds=time.perf_counter() - began)

        # ---- compile, then loop: evaluate, save, step, report the step before ----
        step = start
        if start < cfg.train.steps and not stop.is_set():
            began = time.perf_counter()
            train_step = program.compile(loader.peek())
            writer.line(f"compiled in {time.perf_counter() - began:.1f} s")
            writer.begin(
                start, cfg.train.steps, units, samples=position, batch=cfg.train.global_batch
            )
        while step < cfg.train.steps and not stop.is_set():
            extra = {}
            eval_due, save_due = _due(step, start, cfg.eval), _due(step, start, cfg.checkpoint)
            if eval_due or save_due:
                writer.flush()  # first, so that nothing broken is evaluated or saved
                with writer.paused():
                    extra = {"eval_loss": heldout_loss()} if eval_due else {}
                    if save_due:
                        save(step)
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
        writer.close()
        writer.line(summary.after(step, cfg, eval_loss, data, workdir))
        return Result(state, step, eval_loss, not finished)


def _brought(**parts: Any) -> list[str]:
    """Names what the caller brings along, and refuses what is no Model."""
    if not isinstance(parts["model"], Model | None):
        kind = type(parts["model"]).__name__
        raise ConfigError(
            f"model={kind}: make a Model of it with meshtrain.from_nnx or meshtrain.from_linen"
        )
    return [name for name, given in parts.items() if given is not None]


def _open_loader(
    source: Any, cfg: Config, mesh: jax.sharding.Mesh, position: int
) -> contextlib.closing:
    where = dict(global_batch=cfg.train.global_batch, position=position)
    if not isinstance(source, Source):
        source = from_iterable(source, **where)
    return contextlib.closing(Loader(source, mesh, cfg.rules, **where))


def _due(step: int, start: int, section: EvalConfig | CheckpointConfig) -> bool:
    return section.every > 0 and step % section.every == 0 and step > start


def _open_writer(workdir: Path | None) -> Writer:
    try:
        return Writer(workdir, leader=jax.process_index() == 0)
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
