"""The trainer. Read `train` from top to bottom: check, build, restore or initialise, compile, loop."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import checkpoint, summary
from meshtrain.checkpoint import arrays, lock
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.config import Config, parse
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.divergence import Watch
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model, Params
from meshtrain.program import Program, assemble
from meshtrain.sections import CheckpointConfig
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
    from_scratch: bool = False,
) -> Result:
    """Trains as `config` says, going on from the newest good checkpoint in `workdir`.

    Where there are checkpoints and none is good it stops, unless told to start `from_scratch`.
    `model` and `data` take the place of what `config.model` and `config.data` build; an iterable
    yields global batches (see `data.loader.from_iterable`). Without `workdir` nothing is saved.
    Raises ConfigError for what the user has to change, before anything is compiled, and
    FloatingPointError when loss or gradient stay not finite, after `divergence.max_skips` such steps.
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
        heldout_loss = _heldout_loss(program, eval_data, cfg)

        # ---- open what the run reads and writes, and say what it is about to do ----
        writer = stack.enter_context(contextlib.closing(_open_writer(workdir)))
        saver = saved = None
        if workdir:
            stack.enter_context(lock.held(workdir))
            saver = stack.enter_context(_open_saver(workdir, cfg, program, writer))
            saver.prepare(program.abstract_state)
            saved = saver.recover(from_scratch=from_scratch)
        start, position = (saved.step, saved.position) if saved else (0, 0)
        source = _source(cfg.checkpoint, writer) if not saved else None
        memory = saved.watch if saved else {}
        watch = Watch(cfg.divergence, memory, event=writer.event, line=writer.line)
        loader = stack.enter_context(_open_loader(data, cfg, program.mesh, position))
        units = summary.units_of(loader.peek(), model)
        for line in summary.before(cfg, program.abstract_state, units, data):
            writer.line(line)

        # ---- restore, or initialise: every parameter is born where it lives ----
        if saved:
            state = saver.restore(saved, program.abstract_state)
            writer.event("restore", step=start, position=position, mesh=saved.mesh)
            writer.line(f"restored step {start} from {workdir}")
        else:
            state = program.start(cfg.train.seed)
            if source:
                state = state._replace(params=_initial(state.params, *source, cfg, writer))
        writer.config({**cfg.raw, "mesh": asdict(cfg.mesh)})
        writer.event("start", step=start, jax=jax.__version__, mesh=asdict(cfg.mesh))

        def facts(eval_loss: float | None) -> dict[str, Any]:
            """What a checkpoint says beside the state."""
            measured = {} if eval_loss is None else {"eval_loss": eval_loss}
            metrics = {**writer.newest, **measured}
            return {"position": loader.position, "metrics": metrics, "watch": watch.memory}

        # ---- compile, then loop: evaluate, save, step, report the step before ----
        step = start
        if start < cfg.train.steps and not stop.is_set():
            began = time.perf_counter()
            train_step = program.compile(loader.peek())
            writer.line(f"compiled in {time.perf_counter() - began:.1f} s")
            writer.begin(start, cfg, units, samples=position, see=watch.see)
        while not stop.is_set():
            last = step >= cfg.train.steps
            eval_due = cfg.eval.every > 0 and step > 0 and step % cfg.eval.every == 0
            save_due = not last and saver is not None and saver.due(step, start)
            if eval_due or save_due or last:
                writer.flush()  # first, so that nothing broken is evaluated or saved
            if watch.spike is not None:
                writer.flush()
                back = saver.recover(from_scratch=True) if saver else None
                watch.undo(back.step if back else None, loader.position)
                if back:
                    state = None  # makes room for the one before
                    state, step = saver.restore(back, program.abstract_state), back.step
                    writer.begin(step, cfg, units, samples=loader.position, see=watch.see)
                continue
            if last:
                break
            with writer.paused():
                eval_loss = heldout_loss(state.params) if eval_due else None
                if save_due:
                    saver.save(step, state, **facts(eval_loss))
            try:
                batch = next(loader)
            except Exception:
                writer.flush()
                if saver and jax.process_count() == 1:  # others may still have data
                    saver.finish(step, state, **facts(None))
                raise
            state, report = train_step(state, batch)
            log = step % cfg.train.log_every == 0 or eval_due or step + 1 == cfg.train.steps
            # Writes the step before, while the device works on this one.
            writer.step(step, report, eval_loss, log=log)
            step += 1
        writer.flush()
        finished = step >= cfg.train.steps
        eval_loss = heldout_loss(state.params) if finished else None
        if saver and watch.spike is None:  # with one, the newest checkpoint is where to go on from
            saver.finish(step, state, **facts(eval_loss))
        if finished:
            watch.conclude(step, writer.newest)
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


def _heldout_loss(program: Program, data: Any, cfg: Config) -> Callable[[Params], float | None]:
    """Returns the loss of parameters on the first `eval.batches` held-out batches, the same every time."""
    eval_step = jax.jit(program.eval_step)

    def loss(params: Params) -> float | None:
        if data is None or not cfg.eval.batches:
            return None
        with _open_loader(data, cfg, program.mesh, 0) as heldout:
            sums = [eval_step(params, next(heldout)) for _ in range(cfg.eval.batches)]
        means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
        return float(means.get("cross_entropy", means["loss"]))  # without the z-loss

    return loss


def _open_saver(workdir: Path, cfg: Config, program: Program, writer: Writer) -> contextlib.closing:
    saver = Saver(
        workdir / checkpoint.FOLDER,
        cfg.checkpoint,
        config={**cfg.raw, "mesh": asdict(cfg.mesh)},
        mesh=asdict(cfg.mesh),
        event=writer.event,
        line=writer.line,
    )
    return contextlib.closing(saver)


def _source(settings: CheckpointConfig, writer: Writer) -> tuple[Path, Manifest] | None:
    """Returns the checkpoint that a new run's parameters come from, if it is to be one."""
    try:
        path = Path(settings.init_from)
        return checkpoint.find(path, tell=writer.line) if settings.init_from else None
    except ConfigError as error:
        raise ConfigError(f"checkpoint.init_from={error}") from error


def _initial(
    params: Params, directory: Path, saved: Manifest, cfg: Config, writer: Writer
) -> Params:
    """Returns the parameters with those of a checkpoint that `init_only` names; tells what is left."""
    patterns = [pattern.strip() for pattern in cfg.checkpoint.init_only.split(",")]
    params, fresh, unused = arrays.restore_params(directory, saved.arrays, params, patterns)
    line = f"parameters of {directory}"
    line += f" · new here: {', '.join(fresh)}" if fresh else ""
    line += f" · not used: {', '.join(unused)}" if unused else ""
    writer.line(line)
    writer.event("init_from", path=str(directory), new=fresh, unused=unused)
    return params


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
