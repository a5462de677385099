"""The trainer. Read `train`, then `_loop`: check, build, restore or initialise, compile; then step by step."""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import checkpoint
from meshtrain.checkpoint import initial, lock
from meshtrain.checkpoint.saver import Saver
from meshtrain.cluster import distributed, progress, runtime, signals
from meshtrain.config.build import build
from meshtrain.config.parse import parse
from meshtrain.config.schema import Config
from meshtrain.data.loader import Loader, from_iterable
from meshtrain.data.source import Source
from meshtrain.errors import ConfigError
from meshtrain.models.base import Model, Params
from meshtrain.monitor import health, summary
from meshtrain.monitor.divergence import Watch
from meshtrain.monitor.writer import Writer
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState


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
        stop = stack.enter_context(signals.stop_event())
        clock = stack.enter_context(contextlib.closing(progress.Clock()))
        distributed.reset_stop_requests()
        runtime.setup()

        # ---- check and build, on all processes or none: nothing is computed yet ----
        with distributed.raise_on_all_processes():
            _check_model(model)
            cfg = parse(config, num_devices=jax.device_count())
            parts = build(cfg, model=model, data=data)
            program = assemble(cfg, parts)
        workdir = Path(workdir) if workdir else None
        distributed.check_same({**cfg.to_dict(), "workdir": str(workdir)})
        model, data, eval_data = parts.model, parts.train_data, eval_data or parts.heldout_data
        if eval_data is not None and not isinstance(eval_data, Source):
            eval_data = list(itertools.islice(eval_data, cfg.eval.batches))  # the same each time
        stack.enter_context(program.active())
        heldout_loss = _heldout_loss(program, eval_data, cfg)

        # ---- open what the run reads and writes, and say what it is about to do ----
        writer = stack.enter_context(contextlib.closing(_open_writer(workdir)))
        saver = saved = None
        clock.enter("restore")
        if workdir:
            stack.enter_context(lock.held(workdir))
            saver = stack.enter_context(_open_saver(workdir, cfg, program, writer))
            saver.prepare(program.abstract_state)
            saved = saver.recover(from_scratch=from_scratch)
        start, position = (saved.step, saved.position) if saved else (0, 0)
        source = None if saved else initial.source(cfg.checkpoint, tell=writer.line)
        tell = dict(event=writer.event, line=writer.line)
        watch = Watch(cfg.divergence, saved.watch if saved else {}, **tell)
        check = health.Check(cfg.health, program.mesh, clock.page, **tell)
        loader = stack.enter_context(_open_loader(data, cfg, program.mesh, position))
        units = summary.units_of(loader.peek(), model)
        for line in summary.before(cfg, program, units, data):
            writer.line(line)
        run = Run(cfg, program, clock, writer, saver, watch, check, loader, units, stop)

        # ---- restore, or initialise: every parameter is born where it lives ----
        if saved:
            state = saver.restore(saved, program.abstract_state)
            writer.event("restore", step=start, position=position, mesh=saved.mesh)
            writer.line(f"restored step {start} from {workdir}")
        else:
            state = program.start(cfg.train.seed)
            if source:
                only, tell = cfg.checkpoint.init_only, dict(event=writer.event, line=writer.line)
                state = state._replace(params=initial.take(state.params, *source, only, **tell))
        writer.config(cfg.to_dict())
        writer.event("start", step=start, jax=jax.__version__, mesh=asdict(cfg.mesh))

        # ---- compile, loop, and save where it ended ----
        step = start
        if start < cfg.train.steps and not distributed.broadcast(run.asked()):
            clock.enter("compile")
            began = time.perf_counter()
            train_step = program.compile(loader.peek())
            writer.line(f"compiled in {time.perf_counter() - began:.1f} s")
            distributed.barrier("compiled")  # else the first collective waits for a slow compiler
            state, step = _loop(run, state, start, train_step, heldout_loss)
        finished = step >= cfg.train.steps
        clock.enter("eval")
        eval_loss = heldout_loss(state.params) if finished else None
        clock.enter("save")
        if saver and watch.spike is None:  # with one, the newest checkpoint is where to go on from
            saver.finish(step, state, **run.facts(eval_loss))
        if finished:
            watch.conclude(step, writer.newest)
        clock.enter("end")
        seconds = {phase: spent for phase, spent in clock.page.seconds().items() if spent}
        name = "end" if finished else "preempted"
        writer.event(name, step=step, eval_loss=eval_loss, seconds=seconds)
        writer.close()
        writer.line(summary.after(step, cfg, eval_loss, data, workdir))
        return Result(state, step, eval_loss, not finished)


@dataclass(frozen=True)
class Run:
    """What is open while a run goes on."""

    cfg: Config
    program: Program
    clock: progress.Clock
    writer: Writer
    saver: Saver | None
    watch: Watch
    check: health.Check
    loader: Loader
    units: summary.Units
    stop: threading.Event  # set by a signal

    def asked(self) -> bool:
        """Whether any process was told to stop; known to the first one, which decides for all."""
        return distributed.any_asked_to_stop(self.stop.is_set() or self.clock.stop_requested)

    def facts(self, eval_loss: float | None) -> dict[str, Any]:
        """What a checkpoint says beside the state."""
        measured = {} if eval_loss is None else {"eval_loss": eval_loss}
        metrics = {**self.writer.newest, **measured}
        return {"position": self.loader.position, "metrics": metrics, "watch": self.watch.memory}

    def begin(self, step: int, position: int) -> None:
        so_far = dict(samples=position, waited=self.clock.page["data"])
        self.writer.begin(step, self.cfg, self.units, **so_far, see=self.watch.see)


def _loop(
    run: Run,
    state: TrainState,
    start: int,
    train_step: Callable[[TrainState, Any], tuple[TrainState, Any]],
    heldout_loss: Callable[[Params], float | None],
) -> tuple[TrainState, int]:
    """Checks, evaluates, saves, steps, reports the step before; returns where it ended."""
    cfg, clock, writer, saver, loader = run.cfg, run.clock, run.writer, run.saver, run.loader
    step = start
    run.begin(start, loader.position)
    while True:
        save_due = saver is not None and saver.due(step, start)
        stopping, save_due = distributed.broadcast((run.asked(), save_due))
        last = step >= cfg.train.steps
        eval_due = not last and cfg.eval.every > 0 and step > 0 and step % cfg.eval.every == 0
        check_due = run.check.due(step, saving=save_due or last or stopping)
        if stopping or last or eval_due or save_due or check_due:
            writer.flush()  # first, so that nothing broken is evaluated or saved
        if run.watch.spike is not None and not stopping:
            state, step = _go_back(run, state, step)
            continue
        with writer.paused():
            if check_due:
                clock.enter("check")
                run.check.run(step, state)
            if stopping or last:
                return state, step
            if eval_due:
                clock.enter("eval")
            eval_loss = heldout_loss(state.params) if eval_due else None
            if save_due:
                clock.enter("save")
                saver.save(step, state, **run.facts(eval_loss))
        clock.enter("data", step)
        try:
            batch = next(loader)
        except Exception:
            writer.flush()
            if saver and distributed.num_processes() == 1:  # others may still have data
                saver.finish(step, state, **run.facts(None))
            raise
        clock.enter("step", step)
        state, report = train_step(state, batch)
        log = step % cfg.train.log_every == 0 or eval_due or step + 1 == cfg.train.steps
        # Writes the step before, while the device works on this one.
        writer.step(step, report, eval_loss, waited=clock.page["data"], log=log)
        step += 1


def _go_back(run: Run, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Undoes a spike: returns the newest checkpoint's state and step, or those given if there is none."""
    run.clock.enter("restore")
    run.writer.flush()
    back = run.saver.recover(from_scratch=True) if run.saver else None
    run.watch.undo(back.step if back else None, run.loader.position)
    if back is None:
        return state, step
    jax.tree.map(lambda leaf: leaf.delete(), state)  # makes room for the one before
    state = run.saver.restore(back, run.program.abstract_state)
    run.begin(back.step, run.loader.position)
    return state, back.step


def _check_model(model: Any) -> None:
    """Raises ConfigError where the caller passes something that is not a Model."""
    if not isinstance(model, Model | None):
        kind = type(model).__name__
        raise ConfigError(
            f"model={kind}: make a Model of it with meshtrain.from_nnx or meshtrain.from_linen"
        )


def _open_loader(
    source: Any, cfg: Config, mesh: jax.sharding.Mesh, position: int
) -> contextlib.closing:
    where = dict(global_batch=cfg.train.global_batch, position=position)
    if not isinstance(source, Source):
        source = from_iterable(source, **where)
    return contextlib.closing(Loader(source, mesh, cfg.rules, **where))


def _heldout_loss(program: Program, data: Any, cfg: Config) -> Callable[[Params], float | None]:
    """Returns the loss of parameters on the first `eval.batches` held-out batches, the same every time."""
    compiled: list[jax.stages.Compiled] = []

    def loss(params: Params) -> float | None:
        if data is None or not cfg.eval.batches:
            return None
        with _open_loader(data, cfg, program.mesh, 0) as heldout:
            if not compiled:
                example = params, heldout.peek()
                compiled.append(jax.jit(program.eval_step).lower(*example).compile())
                distributed.barrier("evaluation compiled")
            (eval_step,) = compiled
            # One at a time: on CPU, programs that are in flight together mix their messages to other
            # processes, and hang.
            sums = [
                jax.device_get(eval_step(params, next(heldout))) for _ in range(cfg.eval.batches)
            ]
        means = jax.tree.map(lambda *parts: sum(parts), *sums).mean()
        return float(means.get("cross_entropy", means["loss"]))  # without the z-loss

    return loss


def _open_saver(workdir: Path, cfg: Config, program: Program, writer: Writer) -> contextlib.closing:
    saver = Saver(
        workdir / checkpoint.FOLDER,
        cfg.checkpoint,
        config=cfg.to_dict(),
        mesh=asdict(cfg.mesh),
        event=writer.event,
        line=writer.line,
    )
    return contextlib.closing(saver)


def _open_writer(workdir: Path | None) -> Writer:
    try:
        return Writer(workdir, leader=distributed.process_id() == 0)
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir}: {error.strerror}; use a folder that can be written"
        ) from error
