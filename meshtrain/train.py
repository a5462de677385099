"""The trainer.

`train` opens a run, compiles its step and saves its last state; `_loop` takes the steps.
"""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from meshtrain import console, hardware
from meshtrain.cluster import distributed, progress, runtime, signals
from meshtrain.config.parse import on_devices, parse
from meshtrain.config.schema import Config
from meshtrain.data import map_dataset
from meshtrain.data.loader import peek, rows_of_epoch
from meshtrain.data.source import Batch, Source
from meshtrain.errors import EXIT_PREEMPTED
from meshtrain.huggingface import peft_reader
from meshtrain.models.base import Model, check_model
from meshtrain.monitor import cell, summary
from meshtrain.monitor.writer import finite
from meshtrain.run import Run, open_run
from meshtrain.state import TrainState, count


class Result(NamedTuple):
    state: TrainState
    step: int  # batches seen
    # Held-out loss at the end; None without held-out data, or if none of it has a weight.
    eval_loss: float | None
    # By Ctrl-C, SIGTERM or SIGHUP. The state was saved, unless a spike was still to be rolled back.
    interrupted: bool

    @property
    def exit_code(self) -> int:
        """Returns the exit code for a script: 0, or EXIT_PREEMPTED after an interrupt."""
        return EXIT_PREEMPTED if self.interrupted else 0

    def __repr__(self) -> str:
        """Returns a line: the arrays of the state would fill pages."""
        return (
            f"Result(step={self.step}, eval_loss={self.eval_loss}, interrupted={self.interrupted}, "
            f"state=TrainState with {count(self.state.params):,} parameters)"
        )


def train(
    config: Config | Mapping[str, Any],
    *,
    workdir: str | Path | None = None,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    eval_data: Source | Iterable[Any] | None = None,
    from_scratch: bool = False,
    trust_code: bool = False,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
) -> Result:
    """Trains a model, or resumes from the newest valid checkpoint in `workdir`.

    If there are checkpoints and all are corrupt, it raises ConfigError, or starts at step 0 with
    `from_scratch`. `model` and `data` replace those that the config names; an iterable yields
    global batches (see `data.loader.from_iterable`), and a grain.MapDataset is read by index (see
    `data.map_dataset`). Without `workdir` nothing is saved. On process
    0 `on_metrics` gets the rows of metrics.jsonl. With `trust_code` the tasks of `eval.tasks` may
    run code that their files name. Raises ConfigError for mistakes of the user;
    FloatingPointError after `divergence.max_skips` steps in a row whose loss or gradient is not
    finite; `health.CorruptState` if replicas of the state differ.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(cell.memory_freed())
        stack.enter_context(console.guarded())
        stack.enter_context(console.quiet(os.environ.get(console.QUIET_VARIABLE) == "1"))
        # From here on a signal asks the run to stop and save; before, it would end the process.
        stop = stack.enter_context(signals.stop_event())
        clock = stack.enter_context(contextlib.closing(progress.Clock()))
        distributed.reset_stop_requests()
        runtime.initialize()
        with distributed.raise_on_all_processes():
            check_model(model)
            cfg, data, eval_data, num_rows = _resolve(config, model, data, eval_data)
        # Handed on without names here: this frame, which an error holds, would hold the state.
        return _train(
            *open_run(
                cfg,
                stack=stack,
                stop=stop,
                clock=clock,
                workdir=workdir,
                model=model,
                data=data,
                num_rows=num_rows,
                eval_data=eval_data,
                from_scratch=from_scratch,
                trust_code=trust_code,
                on_metrics=on_metrics,
            )
        )


def _resolve(
    config: Config | Mapping[str, Any],
    model: Model | None,
    data: Source | Iterable[Any] | None,
    eval_data: Source | Iterable[Any] | None,
) -> tuple[Config, Source | Iterable[Any] | None, Source | Iterable[Any] | None, int | None]:
    """Returns the typed config, on the devices of this job, the caller's data, and its rows.

    These are `rows_of_epoch` of `data`. A grain.MapDataset becomes a Source.
    """
    cfg = parse(config)
    if model is not None:
        cfg = cfg.of_own_model()
    batch, num_rows = None, None
    is_per_process = cfg.data.options.get("per_process")
    if not is_per_process:
        data, eval_data = map_dataset.as_source(data), map_dataset.as_source(eval_data)
    if data is not None:
        batch, data = peek(data)
        # Of the other processes' own rows nothing is known here.
        if not is_per_process:
            num_rows = rows_of_epoch(data, batch)
        cfg = cfg.of_own_data(seq_len=batch.tokens.shape[1] if isinstance(batch, Batch) else None)
    cfg = peft_reader.with_settings(cfg)
    if cfg.mesh.auto:
        # Loaded when it is used: training starts without the planner.
        from meshtrain.tools.plan import auto

        return auto.resolve(cfg, model=model, batch=batch), data, eval_data, num_rows
    return on_devices(cfg, jax.device_count()), data, eval_data, num_rows


def _train(run: Run, state: TrainState) -> Result:
    """Compiles the step, takes all steps, evaluates and saves."""
    cfg = run.cfg
    clock = run.clock
    writer = run.writer
    num_steps = cfg.train.steps
    step = run.first_step
    # Not for train.steps=0, which only initialises.
    if step and step >= num_steps:
        writer.log(f"train.steps={num_steps}: the run is at step {step} already")
    if step < num_steps and not distributed.broadcast(run.stop_requested()):
        clock.enter("compile")
        began = time.perf_counter()
        with console.progress("compiling the step", 0, stream="stdout"):
            train_step = run.program.compile(run.loader.peek())
        writer.progress(f"compiled in {time.perf_counter() - began:.1f} s")
        for line in run.memory_advice.memory_lines(train_step):
            writer.progress(f"memory      {line}")
        distributed.barrier("compiled")  # no collective waits for a slow compiler
        state, step = _loop(run, state, train_step)

    is_finished = step >= num_steps
    clock.enter("eval")
    evaluation = run.evaluate(state) if is_finished else {}
    if evaluation is None:
        # Asked to stop before its end: the run is to be started again, and then evaluates.
        is_finished, evaluation = False, {}
    eval_loss = evaluation.get("eval_loss")
    clock.enter("save")
    # After a spike nothing is saved: the run resumes from the checkpoint before it.
    if run.saver and not run.waits_for_rollback():
        run.saver.finish(step, state, **run.manifest_fields(evaluation))
        if is_finished:
            # An export has no time limit, so the phase begins again and again.
            run.saver.export_last(while_waiting=functools.partial(clock.enter, "save"))
    # After the save, which an error of the user's on_metrics must not prevent.
    if evaluation:
        writer.final_evaluation(step, evaluation)
    # After the save: steps that are not finite were skipped, so the saved state is valid.
    run.loss_monitor.check_end(step, writer.newest, is_finished=is_finished)
    clock.enter("end")
    seconds = {phase: spent for phase, spent in clock.progress.seconds().items() if spent}
    event_name = "end" if is_finished else "preempted"
    saved_step = run.saver.wait_for_newest() if run.saver else None
    writer.event(event_name, step=step, eval_loss=eval_loss, saved=saved_step, seconds=seconds)
    writer.close()
    final_line = summary.final_line(
        step,
        cfg,
        eval_loss,
        run.data,
        run.folder,
        saved_step=saved_step,
        is_last_skipped=bool(writer.newest.get("skipped")),
    )
    writer.log(final_line)
    if is_finished and run.folder:
        next_line = summary.next_line(cfg, run.program.model, run.data, run.folder, step)
        writer.progress(next_line)
    return Result(state, step, eval_loss, interrupted=not is_finished)


def _loop(
    run: Run,
    state: TrainState,
    train_step: Callable[[TrainState, Any], tuple[TrainState, Any]],
) -> tuple[TrainState, int]:
    """Takes steps until the last one, a request to stop or too many skips in a row.

    Returns the last state and step. `step` counts the batches that `state` has seen: at the top of
    the loop, batch `step` is next.
    """
    cfg = run.cfg
    clock = run.clock
    writer = run.writer
    saver = run.saver
    step = run.first_step
    _start_writer(run, step)
    while True:
        # ---- decide what is due; process 0 decides for all, whose clocks and signals differ ----
        save_due = saver is not None and saver.due(step, run.first_step)
        is_stopping, save_due = distributed.broadcast((run.stop_requested(), save_due))
        is_last = step >= cfg.train.steps
        eval_due = not is_last and cfg.eval.every > 0 and step > 0 and step % cfg.eval.every == 0
        tasks_every = cfg.eval.tasks_every
        tasks_due = not is_last and tasks_every > 0 and step > 0 and step % tasks_every == 0
        # Skipped steps have not changed the parameters: they are worth saving.
        is_ending = is_stopping or is_last or run.loss_monitor.failure is not None
        check_due = run.replica_check.due(step, saving=save_due or is_ending)
        profile_due = step == cfg.monitor.memory_profile_step and step > run.first_step
        if is_ending or eval_due or tasks_due or save_due or check_due or profile_due:
            writer.flush()
            if run.loss_monitor.failure is not None and not is_ending:
                continue  # decide again, now that the last step is known to be one skip too many
        # A stop leaves no time for a rollback: the run resumes from the checkpoint before the
        # spike. At the last step a spike is rolled back too, so that it is not in the final state.
        if run.loss_monitor.spike is not None and not is_stopping:
            state, step = _roll_back(run, state, step)
            continue

        # ---- check, evaluate and save the state before this step; not part of its step time ----
        with writer.paused():
            # Before a save, so that no checkpoint holds a state whose replicas differ.
            if check_due:
                clock.enter("check")
                run.replica_check.run(step, state)
            if profile_due:
                run.save_memory_profile(step)
            if is_ending:
                return state, step
            evaluation: dict[str, float | None] | None = {}
            if eval_due or tasks_due:
                clock.enter("eval")
                evaluation = run.evaluate(state, heldout=eval_due, tasks=tasks_due)
                if evaluation is None:
                    continue  # decide again: the run is asked to stop
                if saver is not None:
                    saver.add_metrics(step, finite(evaluation))
            # Before next(loader): a resumed run must see the batch that this step will consume.
            if save_due and saver is not None:
                clock.enter("save")
                saver.save(step, state, **run.manifest_fields(evaluation))

        # ---- take the step on the next batch; it reuses the buffers of the old state ----
        clock.enter("data", step)
        try:
            batch = next(run.loader)
        except Exception:
            _save_before_data_error(run, state, step, evaluation)
            raise
        clock.enter("step", step)
        state, scalars = train_step(state, batch)
        is_final_step = step + 1 == cfg.train.steps
        row_due = step % cfg.train.log_every == 0 or eval_due or tasks_due or is_final_step
        # Writes the scalars of the previous step, while the device computes this one.
        writer.step(
            step,
            scalars,
            evaluation,
            waited=clock.seconds_waiting_for_data,
            num_samples=run.loader.num_samples,
            log=row_due,
        )
        step += 1


def _start_writer(run: Run, step: int) -> None:
    """Starts the writer's clock at `step`, at the start of the loop or after a rollback."""
    # Loaded here: of the planner, a run uses only the prediction next to the measured step time.
    from meshtrain.tools.plan.predict import step_seconds

    predicted = step_seconds(
        run.cfg,
        run.program.model,
        run.program.abstract_state.params,
        run.loader.peek(),
        hardware.device_of(jax.devices()[0].device_kind),
    )
    run.writer.begin(
        step,
        run.cfg,
        run.units,
        waited=run.clock.seconds_waiting_for_data,
        observe=run.loss_monitor.observe,
        predicted=predicted,
    )


def _save_before_data_error(
    run: Run, state: TrainState, step: int, evaluation: Mapping[str, float | None]
) -> None:
    """Saves the state when the data has ended or failed, so that no step is lost.

    `evaluation` is that of the state, if it was evaluated.
    """
    run.writer.flush()
    # Other processes may still have data. After a spike nothing is saved.
    if run.saver and distributed.num_processes() == 1 and not run.waits_for_rollback():
        if run.replica_check.due(step, saving=True):
            run.replica_check.run(step, state)
        run.saver.finish(step, state, **run.manifest_fields(evaluation))


def _roll_back(run: Run, state: TrainState, step: int) -> tuple[TrainState, int]:
    """Returns state and step of the newest checkpoint, to undo a spike.

    Without a valid checkpoint it returns the given state and step.
    """
    run.clock.enter("restore")
    run.writer.flush()
    # Look before the memory is freed: without a valid checkpoint the run keeps its state.
    if run.saver is None or run.saver.recover(from_scratch=True) is None:
        run.loss_monitor.roll_back(None, run.loader.position)
        return state, step
    # Frees the memory for the restored state.
    jax.tree.map(lambda leaf: leaf.delete(), state)
    saved, restored = run.saver.restore(run.program.abstract_state)
    assert saved is not None and restored is not None  # recover() has found one
    # Recorded even if this is one rollback too many: the next start must not repeat it.
    try:
        run.loss_monitor.roll_back(saved.step, run.loader.position)
    finally:
        run.saver.record_rollback(
            saved,
            run.loader.position,
            run.loss_monitor.statistics,
            tokens=run.writer.tokens,
        )
    _start_writer(run, saved.step)
    return restored, saved.step
