"""The trainer. Read `train` (check, build, restore or initialise, compile), then `_loop` (step by step)."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import console, hardware, storage
from meshtrain.checkpoint import initial, lock, run_tokenizer
from meshtrain.checkpoint.saver import Saver
from meshtrain.cluster import distributed, progress, runtime, signals
from meshtrain.config import checks
from meshtrain.config.build import build, with_steps
from meshtrain.config.parse import parse
from meshtrain.config.schema import Config
from meshtrain.data.loader import Loader, open_loader
from meshtrain.data.source import Source
from meshtrain.models.base import Model, check_model
from meshtrain.monitor import health, heldout, sinks, summary
from meshtrain.monitor.divergence import LossMonitor
from meshtrain.monitor.writer import Units, Writer, units_of
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState
from meshtrain.tools.hlo.oom_advice import MemoryAdvice
from meshtrain.tools.plan import auto
from meshtrain.tools.plan.predict import step_seconds


class Result(NamedTuple):
    state: TrainState
    step: int  # batches seen
    eval_loss: float | None  # held-out loss at the end; None without held-out data
    interrupted: bool  # by Ctrl-C, SIGTERM or SIGHUP; the state was saved


def train(
    config: Mapping[str, Any],
    *,
    workdir: str | Path | None = None,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    eval_data: Source | Iterable[Any] | None = None,
    from_scratch: bool = False,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Trains a model, or resumes from the newest valid checkpoint in `workdir`.

    If there are checkpoints and all are corrupt, it raises ConfigError, or starts at step 0 with `from_scratch`.
    `model` and `data` replace those that the config names; an iterable yields global batches (see
    `data.loader.from_iterable`). Without `workdir` nothing is saved. On process 0 `on_metrics` gets the rows of
    metrics.jsonl. Raises ConfigError for mistakes of the user; FloatingPointError after `divergence.max_skips`
    steps in a row whose loss or gradient is not finite; `health.CorruptState` if replicas of the state differ.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(console.guarded())
        stop = stack.enter_context(signals.stop_event())
        clock = stack.enter_context(contextlib.closing(progress.Clock()))
        distributed.reset_stop_requests()
        runtime.setup()
        runtime.check_joined()

        # ---- check and build, on all processes or on none: nothing is computed yet ----
        with distributed.raise_on_all_processes():
            check_model(model)
            config, chosen = auto.resolve(config, model=model)
            cfg = parse(config, num_devices=jax.device_count())
            checks.check_place(workdir, cfg, sinks.sink_faults(cfg, workdir))
            parts = build(cfg, model=model, data=data)
            program = assemble(cfg := with_steps(cfg, parts.train_data), parts)
        distributed.check_same({**cfg.to_dict(), "workdir": str(workdir)})
        place = None
        if workdir:
            place = storage.open_workdir(workdir, process=distributed.process_id())
        workdir = place and place.folder
        model, data = parts.model, parts.train_data
        eval_data = (
            parts.heldout_data if eval_data is None else heldout.fixed_batches(eval_data, cfg)
        )
        stack.enter_context(program.active())
        heldout_loss = heldout.heldout_loss(program.eval_step, eval_data, cfg, program.mesh)

        # ---- open files, restore: each device its own shards; open data, log what the run is about to do ----
        if workdir:
            stack.enter_context(lock.held(place))
        leader = distributed.process_id() == 0
        writer = stack.enter_context(contextlib.closing(Writer(place, leader=leader)))
        with distributed.raise_on_all_processes():
            writer.open(sinks.open_sinks(cfg, workdir, on_metrics) if leader else [])
        saver = saved = state = None
        identity = getattr(data, "identity", {})
        clock.enter("restore")
        if workdir:
            saver = stack.enter_context(_open_saver(place, cfg, identity, writer))
            saver.prepare(program.abstract_state)
            saved, state = saver.restore(program.abstract_state, from_scratch=from_scratch)
        start, position = (saved.step, saved.position) if saved else (0, 0)
        source = None if saved else initial.find_source(cfg.checkpoint, identity, log=writer.log)
        callbacks = dict(event=writer.event, log=writer.log)
        loss_monitor = LossMonitor(
            cfg.divergence, saved.loss_statistics if saved else {}, **callbacks
        )
        check = health.ReplicaCheck(cfg.health, program.mesh, clock.page, **callbacks)
        loader = stack.enter_context(open_loader(data, cfg, program.mesh, position))
        units = units_of(loader.peek(), model)
        advice = MemoryAdvice(
            cfg, parts, program, jax.eval_shape(lambda batch: batch, loader.peek())
        )
        stack.enter_context(advice.when_out_of_memory())
        for line in chosen:
            writer.log(f"mesh.auto   {line}")
        abstract = program.abstract_state
        for line in summary.start_lines(cfg, model, abstract, units, data, program.how):
            writer.log(line)
        layout = summary.layout_warnings(cfg, model, program.mesh, abstract.params, loader.peek())
        for warning in (*layout, *summary.setting_warnings(cfg, data)):
            writer.log(f"warning     {warning.text}")
            writer.event("warning", **warning.fields, text=warning.text)
        run = Run(cfg, program, clock, writer, saver, loss_monitor, check, loader, units, stop)

        # ---- initialise, if there is nothing to resume from ----
        if saved:
            writer.event("restore", step=start, position=position, mesh=saved.mesh)
            writer.log(f"restored step {start} from {workdir}")
        else:
            state = program.start(cfg.train.seed)
            if source:
                only = cfg.checkpoint.init_only
                params = initial.load_params(state.params, *source, only, **callbacks)
                state = state._replace(params=params)
        if workdir and leader:
            run_tokenizer.copy_tokenizer(workdir, cfg.to_dict(), identity.get("tokenizer", ""))
        writer.config(cfg.to_dict())
        writer.event("start", step=start, jax=jax.__version__, mesh=asdict(cfg.mesh))

        # ---- compile, loop, save the last state ----
        step = start
        if saved and start >= cfg.train.steps:
            writer.log(f"train.steps={cfg.train.steps}: the run is at step {start} already")
        if start < cfg.train.steps and not distributed.broadcast(run.stop_requested()):
            clock.enter("compile")
            began = time.perf_counter()
            train_step = program.compile(loader.peek())
            writer.log(f"compiled in {time.perf_counter() - began:.1f} s")
            for line in advice.start_lines(train_step):
                writer.log(f"memory      {line}")
            distributed.barrier("compiled")  # no collective waits for a slow compiler
            state, step = _loop(run, state, start, train_step, heldout_loss)
        finished = step >= cfg.train.steps
        clock.enter("eval")
        eval_loss = heldout_loss(state) if finished else None
        clock.enter("save")
        # After a spike nothing is saved: the run resumes from the checkpoint before it.
        if saver and loss_monitor.spike is None:
            saver.finish(step, state, **run.facts(eval_loss))
        if finished:
            loss_monitor.check_final(step, writer.newest)
        clock.enter("end")
        seconds = {phase: spent for phase, spent in clock.page.seconds().items() if spent}
        name = "end" if finished else "preempted"
        writer.event(name, step=step, eval_loss=eval_loss, seconds=seconds)
        writer.close()
        writer.log(summary.final_line(step, cfg, eval_loss, data, workdir))
        return Result(state, step, eval_loss, not finished)


@dataclass(frozen=True)
class Run:
    """What `_loop` works with."""

    cfg: Config
    program: Program
    clock: progress.Clock
    writer: Writer
    saver: Saver | None
    loss_monitor: LossMonitor
    check: health.ReplicaCheck
    loader: Loader
    units: Units
    stop: threading.Event  # set by a signal

    def stop_requested(self) -> bool:
        """Whether any process was asked to stop, on process 0, which decides for all; on others False."""
        return distributed.any_asked_to_stop(self.stop.is_set() or self.clock.stop_requested)

    def facts(self, eval_loss: float | None) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint records besides the state."""
        measured = {} if eval_loss is None else {"eval_loss": eval_loss}
        metrics = {**self.writer.newest, **measured}
        return {
            "position": self.loader.position,
            "metrics": metrics,
            "loss_statistics": self.loss_monitor.statistics,
        }

    def begin(self, step: int, position: int) -> None:
        """Starts the writer at `step`, at the start of the run or after a rollback."""
        device = hardware.device_of(jax.devices()[0].device_kind)
        params = self.program.abstract_state.params
        run = self.cfg, self.program.model, params, self.loader.peek()
        self.writer.begin(
            step,
            self.cfg,
            self.units,
            samples=position,
            waited=self.clock.page["data"],
            observe=self.loss_monitor.observe,
            predicted=step_seconds(*run, device),
        )


def _loop(
    run: Run,
    state: TrainState,
    start: int,
    train_step: Callable[[TrainState, Any], tuple[TrainState, Any]],
    heldout_loss: Callable[[TrainState], float | None],
) -> tuple[TrainState, int]:
    """Checks, evaluates, saves, takes a step, logs the previous step; returns the last state and step."""
    cfg, clock, writer, saver, loader = run.cfg, run.clock, run.writer, run.saver, run.loader
    step = start
    run.begin(start, loader.position)
    while True:
        save_due = saver is not None and saver.due(step, start)
        stopping, save_due = distributed.broadcast((run.stop_requested(), save_due))
        last = step >= cfg.train.steps
        eval_due = not last and cfg.eval.every > 0 and step > 0 and step % cfg.eval.every == 0
        check_due = run.check.due(step, saving=save_due or last or stopping)
        if stopping or last or eval_due or save_due or check_due:
            writer.flush()  # it raises if the last steps were not finite: do not evaluate or save them
        if run.loss_monitor.spike is not None and not stopping:
            state, step = _roll_back(run, state, step)
            continue
        with writer.paused():
            if check_due:
                clock.enter("check")
                run.check.run(step, state)
            if stopping or last:
                return state, step
            if eval_due:
                clock.enter("eval")
            eval_loss = heldout_loss(state) if eval_due else None
            if save_due:
                clock.enter("save")
                saver.save(step, state, **run.facts(eval_loss))
        clock.enter("data", step)
        try:
            batch = next(loader)
        except Exception:
            writer.flush()
            # Other processes may still have data. After a spike nothing is saved.
            if saver and distributed.num_processes() == 1 and run.loss_monitor.spike is None:
                if run.check.due(step, saving=True):
                    run.check.run(step, state)
                saver.finish(step, state, **run.facts(None))
            raise
        clock.enter("step", step)
        state, scalars = train_step(state, batch)
        log = step % cfg.train.log_every == 0 or eval_due or step + 1 == cfg.train.steps
        # Writes the previous step while the device computes this one.
        writer.step(step, scalars, eval_loss, waited=clock.page["data"], log=log)
        step += 1


def _roll_back(run: Run, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Returns state and step of the newest checkpoint, to undo a spike; without one, the given state and step."""
    run.clock.enter("restore")
    run.writer.flush()
    if run.saver is None or run.saver.recover(from_scratch=True) is None:
        run.loss_monitor.roll_back(None, run.loader.position)
        return state, step
    jax.tree.map(lambda leaf: leaf.delete(), state)  # frees the memory for the restored state
    saved, state = run.saver.restore(run.program.abstract_state)
    try:
        run.loss_monitor.roll_back(saved.step, run.loader.position)
    finally:
        run.saver.record_rollback(saved, run.loader.position, run.loss_monitor.statistics)
    run.begin(saved.step, run.loader.position)
    return state, saved.step


def _open_saver(
    workdir: storage.Workdir, cfg: Config, identity: Mapping[str, str], writer: Writer
) -> contextlib.closing:
    saver = Saver(
        workdir,
        cfg.checkpoint,
        config=cfg.to_dict(),
        mesh=asdict(cfg.mesh),
        identity=identity,
        event=writer.event,
        log=writer.log,
        sync=writer.sync,
    )
    return contextlib.closing(saver)
