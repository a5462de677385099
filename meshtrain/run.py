"""Everything that a run has open.

`open_run` opens it from top to bottom; `train.py` is the loop that uses it.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax

from meshtrain import console, storage
from meshtrain.checkpoint import initial, lock, resume, run_tokenizer, vocabulary
from meshtrain.checkpoint.manifest import Manifest
from meshtrain.checkpoint.saver import Saver
from meshtrain.cluster import distributed, progress
from meshtrain.config import checks
from meshtrain.config.build import RunParts, build, with_steps
from meshtrain.config.schema import Config
from meshtrain.data.loader import Loader, open_loader
from meshtrain.data.source import Phase, Source, Timeline
from meshtrain.huggingface import convert, peft_reader, start
from meshtrain.inference import tasks
from meshtrain.models.base import Model, Params
from meshtrain.monitor import capacity, health, heldout, memory, sinks, summary, warnings
from meshtrain.monitor.divergence import LossMonitor
from meshtrain.monitor.writer import Units, Writer, finite, units_of
from meshtrain.program import Program, assemble, check_parameter_names
from meshtrain.state import TrainState


@dataclass(frozen=True)
class Run:
    """Everything that a run has open."""

    cfg: Config
    program: Program
    data: Any  # a Source, or the caller's iterable
    # None without held-out data, see `evaluate`.
    heldout_metrics: Callable[[TrainState], dict[str, float | None] | None] | None
    task_metrics: tasks.TaskMetrics | None  # None without eval.tasks
    folder: Path | None  # of the workdir on this host
    writer: Writer
    saver: Saver | None  # None without a workdir
    loss_monitor: LossMonitor
    replica_check: health.ReplicaCheck
    loader: Loader
    units: Units
    save_memory_profile: Callable[[int], None]  # of this step, which is a number of steps taken
    memory_advice: Any  # tools.hlo.oom_advice.MemoryAdvice
    stop_requested: Callable[[], bool]  # of any process; process 0 decides, on others it is False
    clock: progress.Clock
    first_step: int  # 0, or that of the checkpoint from which the run resumes

    def waits_for_rollback(self) -> bool:
        """Returns whether a spike is still to be rolled back, so that the state is not to be saved.

        Without a checkpoint to return to, the run would continue from this state.
        """
        if self.saver is None or self.loss_monitor.spike is None:
            return False
        return distributed.broadcast(self.saver.wait_for_newest() is not None)

    def evaluate(
        self, state: TrainState, *, heldout: bool = True, tasks: bool = True
    ) -> dict[str, float | None] | None:
        """Returns the metrics of the held-out data and of the tasks by name; {} without both.

        A metric is None if the held-out data has no weight. Returns None if the run is asked to
        stop meanwhile.
        """
        metrics: dict[str, float | None] = {}
        for is_asked, measure in ((heldout, self.heldout_metrics), (tasks, self.task_metrics)):
            if not is_asked or measure is None:
                continue
            with console.progress("evaluating", 0, stream="stdout"):
                found = measure(state)
            if found is None:
                return None
            metrics |= found
        return metrics

    def manifest_fields(self, evaluation: Mapping[str, float | None]) -> dict[str, Any]:
        """Returns what the manifest of a checkpoint records besides the state."""
        return {
            "position": self.loader.position,
            "phases": [list(phase) for phase in getattr(self.data, "phases", ())],
            "metrics": finite({**self.writer.newest, **evaluation, "tokens": self.writer.tokens}),
            "loss_statistics": self.loss_monitor.statistics,
        }


def open_run(
    cfg: Config,
    *,
    stack: contextlib.ExitStack,
    stop: threading.Event,
    clock: progress.Clock,
    workdir: str | Path | None = None,
    model: Model | None = None,
    data: Source | Iterable[Any] | None = None,
    num_rows: int | None = None,
    eval_data: Source | Iterable[Any] | None = None,
    from_scratch: bool = False,
    trust_code: bool = False,
    on_metrics: Callable[[dict[str, Any]], None] | None = None,
) -> tuple[Run, TrainState]:
    """Returns the open run and its first state, restored or initialised.

    `cfg` has its mesh on the devices of the job. `stack` closes what is opened, in reverse order;
    mesh and rules are active until then. `stop` is set by a signal; `clock` records the phases.
    `num_rows` are those of `loader.rows_of_epoch`. For the other arguments see `train`.
    """
    # ---- check and build, on all processes or on none; no computation, no file is touched ----
    with distributed.raise_on_all_processes():
        faults = [*sinks.sink_faults(cfg, workdir), *convert.export_faults(cfg, workdir)]
        checks.check_place(workdir, cfg, faults)
        with console.progress("opening model and data", 0, stream="stdout"):
            parts = build(cfg, model=model, data=data)
        given_cfg = cfg
        cfg = with_steps(given_cfg, parts.train_data, num_rows=num_rows)
        memory.check_profile(cfg, has_workdir=bool(workdir))
        program = assemble(cfg, parts)
        check_parameter_names(cfg, program.abstract_state.params)
        capacity.check_fits(cfg, parts.model, program.abstract_state)
        train_data = _in_run(parts.train_data, cfg)
    config_record = cfg.to_dict()  # as files and checkpoints have it
    distributed.check_same({**config_record, "workdir": str(workdir)})
    if eval_data is None:
        eval_data = parts.heldout_data
    eval_data = heldout.fixed_batches(eval_data, cfg, check=program.model.check_batch)
    stack.enter_context(program.active())

    # ---- the workdir, which this run alone may write, and the files of metrics in it ----
    opened_workdir: storage.Workdir | None = None
    folder: Path | None = None
    confirm_lock: Callable[[], None] | None = None
    if workdir:
        opened_workdir = storage.open_workdir(workdir, process=distributed.process_id())
        folder = opened_workdir.folder
        confirm_lock = stack.enter_context(lock.held(opened_workdir))
    is_leader = distributed.process_id() == 0
    writer = stack.enter_context(contextlib.closing(Writer(opened_workdir, leader=is_leader)))
    with distributed.raise_on_all_processes():
        writer.open(sinks.open_sinks(cfg, folder, on_metrics) if is_leader else [])
    stop_requested = functools.partial(_any_asked_to_stop, stop, clock)
    heldout_metrics = heldout.make_heldout_metrics(
        program.eval_step,
        eval_data,
        cfg,
        program.mesh,
        log=writer.log,
        stop_requested=stop_requested,
        check=program.model.check_batch,
    )
    with distributed.raise_on_all_processes():
        task_metrics = tasks.make_task_metrics(
            cfg,
            program,
            folder,
            stop_requested=stop_requested,
            trust_code=trust_code,
        )

    # ---- the newest valid checkpoint: each device reads its own shards ----
    clock.enter("restore")
    identity = getattr(train_data, "identity", {})  # an iterable of the caller has none
    saver: Saver | None = None
    saved: Manifest | None = None
    state: TrainState | None = None
    if opened_workdir and confirm_lock:
        saver = Saver(
            opened_workdir,
            cfg.checkpoint,
            config=config_record,
            mesh=asdict(cfg.mesh),
            identity=identity,
            event=writer.event,
            log=writer.log,
            sync=writer.sync,
            confirm_lock=confirm_lock,
        )
        stack.enter_context(contextlib.closing(saver))
        saver.prepare(program.abstract_state)
        saved, state = saver.restore(program.abstract_state, from_scratch=from_scratch)
    first_step = saved.step if saved else 0
    position = saved.position if saved else 0
    if saver and saved:
        num_steps = cfg.train.steps
        # With another batch size, train.epochs are other steps from here on.
        cfg = with_steps(
            given_cfg,
            parts.train_data,
            num_rows=num_rows,
            step=first_step,
            position=position,
        )
        with distributed.raise_on_all_processes():
            train_data = _in_run(parts.train_data, cfg, saved)
        program = _with_schedule(program, cfg, parts, num_steps)
        config_record = cfg.to_dict()
        saver.resume_with(config_record, saved)
    # Where the parameters of a new run come from is checked now, before anything is compiled.
    init_state = None if saved else _state_initializer(cfg, program, identity, writer)
    loss_monitor = LossMonitor(
        cfg.divergence,
        saved.loss_statistics if saved else {},
        event=writer.event,
        log=writer.log,
    )
    replica_check = health.ReplicaCheck(
        cfg.health,
        program.mesh,
        clock.progress,
        event=writer.event,
        log=writer.log,
    )

    # ---- the data, from the sample after the checkpoint's last one ----
    check = program.model.check_batch
    loader = stack.enter_context(open_loader(train_data, cfg, program.mesh, position, check=check))
    first_batch = loader.peek()
    units = units_of(first_batch, parts.model)
    if saved:
        writer.resume_from(saved.metrics, tokens=_tokens_before(saved, units, cfg))
    # Loaded here, since it reads compiled programs and plans: no other part of a run needs these.
    from meshtrain.tools.hlo.oom_advice import MemoryAdvice

    batch_shapes = jax.eval_shape(lambda batch: batch, first_batch)
    memory_advice = MemoryAdvice(cfg, parts, program, batch_shapes)
    stack.enter_context(memory_advice.when_out_of_memory())

    # ---- log what the run is about to do ----
    for line in cfg.layout_reasons:
        writer.progress(f"mesh.auto   {line}")
    abstract_state = program.abstract_state
    start_lines = summary.start_lines(
        cfg,
        parts.model,
        abstract_state,
        units=units,
        data=train_data,
        grad_sync=program.sync,
        position=position,
        step=first_step,
    )
    for line in start_lines:
        writer.progress(line)
    layout_warnings = warnings.layout_warnings(
        cfg, parts.model, program.mesh, abstract_state.params, first_batch
    )
    setting_warnings = warnings.setting_warnings(cfg, train_data)
    for warning in (*layout_warnings, *setting_warnings):
        writer.warn(warning.text, warning.fields)

    # ---- the first state ----
    if saved:
        writer.event("restore", step=first_step, position=position, mesh=saved.mesh)
        writer.progress(f"restored step {first_step} from {folder}")
        if line := memory.missed_profile(cfg, first_step, folder):
            writer.log(line)
    if init_state is not None:
        with console.progress("initialising the state", 0, stream="stdout"):
            state = init_state()
    assert state is not None  # restored, or initialised
    for warning in warnings.rounding_warnings(cfg, parts.model, state.params):
        writer.warn(warning.text, warning.fields)
    if folder and is_leader:
        run_tokenizer.copy_tokenizer(folder, config_record, identity.get("tokenizer", ""))
    # A workdir with a config.json is a run; from here on it is kept even if the run fails.
    writer.write_config(config_record)
    writer.event("start", step=first_step, jax=jax.__version__, mesh=asdict(cfg.mesh))

    run = Run(
        cfg=cfg,
        program=program,
        data=train_data,
        heldout_metrics=heldout_metrics,
        task_metrics=task_metrics,
        folder=folder,
        writer=writer,
        saver=saver,
        loss_monitor=loss_monitor,
        replica_check=replica_check,
        loader=loader,
        units=units,
        save_memory_profile=functools.partial(
            memory.save_profile,
            workdir=opened_workdir,
            event=writer.event,
            log=writer.log,
        ),
        memory_advice=memory_advice,
        stop_requested=stop_requested,
        clock=clock,
        first_step=first_step,
    )
    return run, state


def _state_initializer(
    cfg: Config, program: Program, identity: Mapping[str, str], writer: Writer
) -> Callable[[], TrainState]:
    """Returns the function that makes the first state of a new run.

    Its parameters are random, those of another run or of a Hugging Face folder, and those of an
    adapter. Raises ConfigError if these do not fit; nothing of the arrays is read yet.
    """
    params = program.abstract_state.params
    own_vocabulary = vocabulary.of_model(cfg.model.options, program.model.axes)
    # An adapter of that run is merged if this run begins with another one.
    own_adapter = replace(cfg.adapter, rank=0) if cfg.adapter.init_from else cfg.adapter
    loads: list[Callable[[Params], Params]] = []
    is_loaded = None
    folder = start.find(cfg, identity, params, vocabulary=own_vocabulary, log=writer.log)
    if folder:
        is_loaded = folder.has
        loads.append(
            functools.partial(
                start.load_params, start=folder, event=writer.event, log=writer.progress
            )
        )
    else:
        find_source = functools.partial(
            initial.find_source,
            cfg.checkpoint,
            identity,
            params,
            adapter=own_adapter,
            vocabulary=own_vocabulary,
            log=writer.log,
        )
        if source := find_source():
            loads.append(
                functools.partial(
                    initial.load_params,
                    source=source,
                    only=cfg.checkpoint.init_only,
                    look_again=find_source,
                    adapter=own_adapter,
                    vocabulary=own_vocabulary,
                    event=writer.event,
                    log=writer.progress,
                )
            )
    if cfg.adapter.init_from:
        loads.append(
            functools.partial(
                peft_reader.load_params, cfg=cfg, event=writer.event, log=writer.progress
            )
        )

    def load(params: Params) -> Params:
        for one in loads:
            params = one(params)
        return params

    return lambda: program.initial_state(
        cfg.train.seed,
        load if loads else None,
        is_loaded=is_loaded,
    )


def _any_asked_to_stop(stop: threading.Event, clock: progress.Clock) -> bool:
    """Returns on process 0 whether a signal or the supervisor asked any process to stop."""
    return distributed.any_asked_to_stop(stop.is_set() or clock.stop_requested)


def _in_run(data: Any, cfg: Config, saved: Manifest | None = None) -> Any:
    """Returns the data of the run, which may change at some of its steps.

    Raises ConfigError for data that the run may not read so, on from the checkpoint `saved`.
    """
    if not isinstance(data, Source) or data.in_run is None:
        return data
    run = Timeline(cfg.train.steps, cfg.train.global_batch)
    if saved:
        is_free = resume.is_allowed("data", cfg.checkpoint.allow_change)
        saved_batch = saved.config.get("train", {}).get("global_batch")
        run = run._replace(
            step=saved.step,
            position=saved.position,
            phases=() if is_free else [Phase(*phase) for phase in saved.phases],
            same_batch=saved_batch == cfg.train.global_batch,
        )
    return data.in_run(run)


def _tokens_before(saved: Manifest, units: Units, cfg: Config) -> int:
    """Returns the tokens, or examples, that a run had read at a checkpoint."""
    if "tokens" in saved.metrics:
        return int(saved.metrics["tokens"])
    # An older checkpoint has only the number of samples, and their length in its config.
    seq_len = saved.config.get("data", {}).get("seq_len")
    if units.name == "tokens" and seq_len and seq_len != cfg.data.options.get("seq_len"):
        return saved.position * seq_len
    return saved.position * units.per_sample


def _with_schedule(program: Program, cfg: Config, parts: RunParts, num_steps: int) -> Program:
    """Returns the program, which was made for `num_steps`, with the learning rates of `cfg`."""
    if cfg.train.steps == num_steps:
        return program
    return assemble(cfg, parts)
