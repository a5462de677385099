"""Saves checkpoints in the background, and restores the checkpoint to resume from."""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from meshtrain import console
from meshtrain.checkpoint import arrays, find, manifest, resume
from meshtrain.checkpoint.arrays import AsyncWriter
from meshtrain.checkpoint.export import Exporter
from meshtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from meshtrain.cluster import distributed
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError, TransientError, first_line
from meshtrain.object_store import LockLost
from meshtrain.state import TrainState, bytes_of
from meshtrain.storage import Workdir

FIRST_WAIT, LONGEST_WAIT = 5.0, 600.0  # seconds from a failed save to the next try
LAST_TRIES = 4  # for the save at the end of a run
EXPORT_POLL = 0.2  # seconds between looks at the exports at the end of a run

# In the messages of TensorStore: errors of the disk, and of a store; in those of other processes.
STORAGE_ERROR = re.compile(
    r"os_error_code=|RESOURCE_EXHAUSTED|http_response_code=|curl_code=|\[Errno \d+\]"
)

SPACE_FACTOR = 1.2  # free disk space that a save needs, as a multiple of the state's bytes


@dataclass
class _PendingSave:
    """A save in progress."""

    step: int
    began: float
    blocked: float = 0.0  # seconds that the training loop waited
    seconds: float = 0.0  # from the start to the commit
    manifest: Manifest | None = None
    error: Exception | None = None


class Saver:
    """Saves the states of a run in the background, one at a time; close it when done.

    The outcome of each save goes to `event(name, **fields)`; failures also to `log(text)`. Before a
    commit `sync()` flushes the rows up to its step to disk, and `confirm_lock()` raises an error if
    another run has the workdir. All processes call `restore`, `save` and `finish` together.
    """

    def __init__(
        self,
        workdir: Workdir,
        settings: CheckpointConfig,
        *,
        config: Mapping[str, Any],
        mesh: Mapping[str, int],
        identity: Mapping[str, str],
        event: Callable[..., None],
        log: Callable[[str], None],
        sync: Callable[[], None],
        confirm_lock: Callable[[], None],
    ):
        self._workdir = workdir
        self._confirm_lock = confirm_lock
        self._folder = workdir.folder / find.FOLDER
        self._settings = settings
        self._event = event
        self._log = log
        self._sync = sync
        # The fields of the run in each manifest.
        self._run_fields = {
            "config": json.loads(json.dumps(dict(config), default=str)),
            "mesh": dict(mesh),
            "identity": dict(identity),
            "versions": distributed.versions(),
            "processes": distributed.num_processes(),
        }

        # Recovery.
        # Step -> why the chunks of its checkpoint failed their checksums.
        self._damaged: dict[int, str] = {}
        # On process 0: the same for all corrupt checkpoints newer than the valid one.
        self._corrupt: dict[int, str] = {}

        # Saving: the save in progress, and when the next one is due.
        self._arrays = AsyncWriter(distributed.Barriers)
        self._pending: _PendingSave | None = None
        self._thread: threading.Thread | None = None
        self._newest_step = -1
        self._saved_at = time.monotonic()
        self._failures = 0  # in a row
        self._last_error: Exception | None = None  # of the newest failed save
        self._retry_at = 0.0
        self._last_waits: Iterator[float] | None = None  # in `finish`: seconds between its tries

        # Model folders of the checkpoints, by process 0.
        self._exporter: Exporter | None = None
        if settings.export and distributed.process_id() == 0:
            self._exporter = Exporter(workdir.folder, settings, event=event, log=log)

    def wait_for_newest(self) -> int | None:
        """Returns the step of the newest checkpoint, restored or saved, after a save in progress.

        None if there is none.
        """
        self._wait()
        return None if self._newest_step < 0 else self._newest_step

    def prepare(self, abstract: TrainState) -> None:
        """Creates the folder for states like `abstract` and removes unfinished saves.

        Raises ConfigError if such states cannot be saved there.
        """
        arrays.check_kinds(abstract)
        size = bytes_of(abstract)
        distributed.on_first_process(lambda: self._check_writable(size))

    def _check_writable(self, size: int) -> None:
        """Raises ConfigError if the folder is not writable, or has no space for `size` bytes."""
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # A test that the folder is writable; the next line removes the new folder.
            manifest.partial_folder(folder, 0).mkdir(exist_ok=True)
            find.remove_partial(folder)
            self._workdir.remove_unfinished(folder, finished=find.steps(folder))
            fault = self._space_fault(size)
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(
                f"--workdir: {folder}: {why}; use a folder that can be written"
            ) from error
        if fault:
            raise ConfigError(f"--workdir: {folder}: {fault}; make room, or use another folder")

    def _space_fault(self, size: int) -> str:
        """Returns an error message if there is no space for `size` bytes, else an empty string."""
        needed = SPACE_FACTOR * size
        free = self._workdir.free_bytes(self._folder)
        if free >= needed:
            return ""
        return f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"

    # ---- recovery ----

    def restore(
        self, abstract: TrainState, *, from_scratch: bool = False
    ) -> tuple[Manifest, TrainState] | tuple[None, None]:
        """Returns the newest valid checkpoint and its state, with the shardings of `abstract`.

        See `recover`, and `arrays.restore`. Arrays are verified while they are read: if one is
        damaged, the next older checkpoint is read. Quarantines the corrupt ones.
        """
        # Processes read different chunks. All raise the first error of any; an unreadable chunk
        # comes before a damaged one, since the checkpoint may then be valid.
        agree = partial(distributed.raise_first, kinds=(TransientError, CorruptCheckpoint))
        state = None
        saved = self.recover(from_scratch=from_scratch)
        while saved is not None and state is None:
            try:
                with console.progress(f"restoring step {saved.step}", 0, stream="stdout"):
                    state = arrays.restore(
                        self._folder / str(saved.step),
                        saved.arrays,
                        abstract,
                        allow_cast=self._settings.allow_cast,
                        agree=agree,
                    )
            except CorruptCheckpoint as error:  # on all processes
                self._damaged[saved.step] = str(error)
                saved = self.recover(from_scratch=from_scratch)
        # After the loop, which may find more corrupt checkpoints. If none is valid, `recover` has
        # raised, and they stay where they are.
        distributed.on_first_process(self._quarantine_corrupt)
        if self._exporter:
            self._exporter.catch_up(find.steps(self._folder))
        if saved is None or state is None:
            return None, None
        return saved, state

    def resume_with(self, config: Mapping[str, Any], saved: Manifest) -> None:
        """Reports how `config` differs from that of the checkpoint; later saves record it."""
        self._run_fields["config"] = json.loads(json.dumps(dict(config), default=str))
        changed = self._check_changes(saved)
        if not changed:
            return
        self._event("changed", step=saved.step, settings=changed)
        for line in resume.lines(changed):
            self._log(line)

    def _check_changes(self, saved: Manifest) -> dict[str, list]:
        return resume.check(
            saved,
            self._run_fields["config"],
            self._run_fields["identity"],
            source=self._folder / str(saved.step),
        )

    def recover(self, *, from_scratch: bool = False) -> Manifest | None:
        """Returns the newest valid checkpoint, or None if there is none.

        Raises ConfigError if there are checkpoints but none is valid, unless `from_scratch`; if the
        newest may be valid but cannot be read; and if its settings may not change to the present
        ones (`resume.check`). Nothing of the arrays is read yet.
        """
        self._wait()
        # Process 0 alone looks for it, so that all resume from the same one.
        step = distributed.on_first_process(lambda: self._find_newest(from_scratch))
        self._newest_step = -1 if step is None else step
        if step is None:
            return None
        self._failures = 0  # of saves of a state that a rollback leaves
        directory = self._folder / str(step)
        if distributed.process_id() > 0:
            self._workdir.refresh(directory)  # process 0 may have rewritten the manifest
        saved = manifest.read(directory)
        self._check_changes(saved)
        return saved

    def _find_newest(self, from_scratch: bool) -> int | None:
        """Returns the step of the newest valid checkpoint."""
        newest, self._corrupt = find.to_resume(
            self._folder, self._damaged, from_scratch=from_scratch
        )
        if newest is None:
            return None
        directory = self._folder / str(newest.step)
        if text := manifest.describe_unlisted_files(directory, newest):
            self._event(
                "stray_files",
                step=newest.step,
                files=manifest.unlisted_files(directory, newest)[:20],
            )
            self._log(f"checkpoint of step {newest.step}: {text}")
        return newest.step

    def _quarantine_corrupt(self) -> None:
        try:
            if self._corrupt:
                self._confirm_lock()
            for step, why in self._corrupt.items():
                self._quarantine(step, why)
        except OSError as error:
            raise ConfigError(
                f"{error.filename or self._folder}: {error.strerror}; "
                f"corrupt checkpoints cannot be moved"
            ) from error

    def _quarantine(self, step: int, why: str) -> None:
        target = find.quarantine(self._folder, step)
        self._damaged.pop(step, None)
        self._event("quarantine", step=step, why=why, place=str(target))
        self._log(f"checkpoint of step {step}: {why}; moved to {target}")

    def record_rollback(
        self,
        saved: Manifest,
        position: int,
        loss_statistics: Mapping[str, float],
        *,
        tokens: int,
    ) -> None:
        """Makes the checkpoint of a rollback one that continues at sample `position`.

        `loss_statistics` are those to resume with, `tokens` what the run has read so far. Without
        this a crash before the next save would undo the rollback.
        """
        if distributed.process_id() > 0:
            return
        changed = replace(
            saved,
            position=position,
            metrics={**saved.metrics, "tokens": tokens},
            loss_statistics=dict(loss_statistics),
        )
        try:
            self._replace_manifest(changed)
        except OSError as error:
            why = f"{error.filename or self._folder}: {error.strerror}"
            self._log(f"rollback not recorded, a restart before the next save repeats it: {why}")

    def add_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics that the checkpoint of this step lacks, if there is one.

        A run that is asked to stop saves before it evaluates, and evaluates when it resumes:
        without this `keep_best` would never see the checkpoint.
        """
        if distributed.process_id() > 0 or step != self._newest_step:
            return
        try:
            saved = manifest.read(self._folder / str(step))
            if metrics.keys() - saved.metrics.keys():
                self._replace_manifest(replace(saved, metrics={**metrics, **saved.metrics}))
        except (OSError, CorruptCheckpoint, ConfigError) as error:  # must not stop the training
            self._log(f"checkpoint of step {step}: its metrics were not added: {first_line(error)}")

    def _replace_manifest(self, changed: Manifest) -> None:
        directory = self._folder / str(changed.step)
        self._confirm_lock()
        manifest.write(directory, changed)
        self._workdir.upload(directory / manifest.NAME)

    # ---- saving ----

    def due(self, step: int, start: int) -> bool:
        """Returns whether a save is due. Processes may disagree; use the answer of process 0."""
        self._handle_finished_save()
        now = time.monotonic()
        if self._failures:
            return now >= self._retry_at
        every, minutes = self._settings.every, self._settings.every_minutes
        if every > 0 and step % every == 0 and step > start:
            return True
        if self._exporter and self._exporter.due(step) and step > start:
            return True
        return minutes > 0 and now - self._saved_at >= 60 * minutes

    def save(self, step: int, state: TrainState, **fields: Any) -> None:
        """Starts a save; waits only for the previous save and for the copy to the host.

        `fields` are `position`, `metrics` and `loss_statistics` of the manifest. A failed save is
        logged, and `due` asks for another.
        """
        began = time.perf_counter()
        self._wait()
        # If the last save failed, a process may still have been writing to its folder.
        distributed.barrier("save")
        # A run that ends right after a save has nothing new, but perhaps an evaluation.
        if distributed.broadcast(step == self._newest_step):
            self.add_metrics(step, fields["metrics"])
            return
        self._saved_at = time.monotonic()
        pending = _PendingSave(step, began)
        self._pending = pending
        partial_folder = manifest.partial_folder(self._folder, step)
        try:
            fault, is_lost = distributed.broadcast(self._create_partial(step, bytes_of(state)))
            if fault:
                raise LockLost(fault) if is_lost else OSError(fault)
            self._arrays.save(partial_folder / arrays.FOLDER, arrays.fields(state))
        except Exception as error:  # noqa: BLE001  a failed save must not stop the training
            pending.error = error
            self._handle_finished_save()
            return
        fields |= {**self._run_fields, "time": time.time(), "arrays": arrays.shapes_of(state)}
        # From here the state is on the host: training continues while the thread commits it.
        self._thread = threading.Thread(target=self._commit, args=(pending, fields), name="commit")
        self._thread.start()
        pending.blocked = time.perf_counter() - began

    def _create_partial(self, step: int, size: int) -> tuple[str, bool]:
        """Creates the partial folder of a state of `size` bytes.

        Returns an error message, or "", and whether another run has the workdir now.
        """
        if distributed.process_id() > 0:
            return "", False
        partial_folder = manifest.partial_folder(self._folder, step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._confirm_lock()  # otherwise what is there may be another run's
            if os.path.lexists(self._folder / str(step)):
                # A valid checkpoint of this step would not be written again.
                self._quarantine(step, "appeared during the run")
            find.remove(partial_folder)
            partial_folder.mkdir(parents=True, exist_ok=True)
            return self._space_fault(size), False
        except OSError as error:
            fault = ": ".join(filter(None, (error.strerror, error.filename)))
            return fault, isinstance(error, LockLost)

    def _commit(self, pending: _PendingSave, fields: dict[str, Any]) -> None:
        """Commits a save once all processes have written their arrays; runs in a thread."""
        try:
            self._arrays.wait()
            if distributed.process_id() == 0:
                self._confirm_lock()
                # First the rows, then the checkpoint: a resumed run keeps all rows up to its step.
                self._sync()
                pending.manifest = manifest.commit(self._folder, pending.step, **fields)
            pending.seconds = time.perf_counter() - pending.began
            if pending.manifest:
                kept = self._exporter.waiting() if self._exporter else []
                find.remove_old_checkpoints(self._folder, self._settings, kept=kept)
        except Exception as error:  # noqa: BLE001  logged by `_handle_finished_save`, in the main thread
            pending.error = error

    def _wait(self) -> None:
        if self._thread:
            self._thread.join()
        self._handle_finished_save()

    def _handle_finished_save(self) -> None:
        """Records the outcome of a save that has ended, and sets the time of the next try."""
        if self._exporter:
            self._exporter.report()
        pending = self._pending
        if pending is None or (self._thread and self._thread.is_alive()):
            return
        self._pending = None
        self._thread = None
        if pending.error is None:
            self._failures = 0
            self._newest_step = pending.step
            self._event(
                "save",
                step=pending.step,
                bytes=pending.manifest.bytes if pending.manifest else 0,
                blocked_seconds=pending.blocked,
                seconds=pending.seconds,
            )
            if self._exporter and self._exporter.due(pending.step):
                self._exporter.add(pending.step)
            return
        if distributed.process_id() == 0:
            with contextlib.suppress(OSError):  # the next start removes it
                self._confirm_lock()
                find.remove(manifest.partial_folder(self._folder, pending.step))
        if self._last_waits is not None:  # the run has ended
            wait = next(self._last_waits, None)
            when = "no more tries" if wait is None else f"next try in {wait:.0f} s"
        else:
            wait = min(FIRST_WAIT * 2 ** min(self._failures, 20), LONGEST_WAIT)
            when = f"next try at the first step after {wait:.0f} s, or when the run ends"
        self._failures += 1
        self._last_error = pending.error
        self._retry_at = time.monotonic() + (wait or 0)
        why = first_line(pending.error)
        self._event("save_failed", step=pending.step, error=why, retry_seconds=wait)
        self._log(f"step {pending.step} could not be saved: {why}; {when}")

    def finish(self, step: int, state: TrainState, **fields: Any) -> None:
        """Saves, and waits for the commit.

        Raises ConfigError after LAST_TRIES failures, or if another run has the workdir now.
        """
        self._wait()  # for a save of the training loop, whose outcome is not one of the last tries
        waits = [2.0**attempt for attempt in range(LAST_TRIES - 1)]
        self._last_waits = iter(waits)
        for wait in (*waits, 0.0):
            with console.progress(f"saving step {step}", 0, stream="stdout"):
                self.save(step, state, **fields)
                self._wait()
            is_lost = any(isinstance(cause, LockLost) for cause in _causes(self._last_error))
            failures, is_lost = distributed.broadcast((self._failures, is_lost))
            if not failures:
                self._last_waits = None
                return
            if is_lost:
                raise ConfigError(
                    f"--workdir={self._workdir.name}: step {step} could not be saved: another run "
                    f"has taken over this workdir; stop one of them, or use another --workdir"
                )
            time.sleep(wait)
        if _is_of_storage(self._last_error):
            remedy = "make room, or repair the disk or the access to the store, and run again"
        else:
            remedy = (
                "neither the disk nor the store is at fault, but an array of the state, or a "
                "library that writes it: change the model or the optimizer, and run again"
            )
        raise ConfigError(
            f"{self._folder}: step {step} could not be saved in {LAST_TRIES} tries, "
            f"see events.jsonl; {remedy}: the run resumes from the newest checkpoint"
        )

    def export_last(self, *, while_waiting: Callable[[], None]) -> None:
        """Exports the newest checkpoint, and waits until all exports have ended.

        All processes call it, and `while_waiting` a few times a second.
        """
        if not self._settings.export:
            return
        self._wait()
        if self._exporter and self._newest_step >= 0:
            self._exporter.add_missing(self._newest_step)
        with console.progress("exporting", 0, stream="stdout"):
            # In short waits, so that no other process waits longer for an answer of process 0.
            while distributed.broadcast(bool(self._exporter and self._exporter.waiting())):
                while_waiting()
                time.sleep(EXPORT_POLL)
        self._handle_finished_save()
        if self._exporter:  # those that waited for their export
            find.remove_old_checkpoints(self._folder, self._settings)

    def close(self) -> None:
        self._wait()
        if self._exporter:
            self._exporter.close()
        self._arrays.close()


def _is_of_storage(error: BaseException | None) -> bool:
    """Returns whether an error is one of the disk or the store; None, of another process, is."""
    if error is None:
        return True
    return any(
        isinstance(cause, OSError) or STORAGE_ERROR.search(str(cause)) for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error and its causes: Orbax raises errors of its own."""
    while error is not None:
        yield error
        error = error.__cause__
