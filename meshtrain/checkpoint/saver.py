"""Saves the states of a run while it goes on, and finds the one that it goes on from."""

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshtrain.checkpoint import arrays, manifest, newest_good
from meshtrain.checkpoint.manifest import BadCheckpoint, Manifest
from meshtrain.cluster import distributed
from meshtrain.config.schema import CheckpointConfig
from meshtrain.errors import ConfigError
from meshtrain.state import TrainState, bytes_of

MARGIN = 1.2  # free bytes that a save asks for, for each byte of the state
FIRST_WAIT, LONGEST_WAIT = 5.0, 600.0  # seconds until a save that failed is tried again
LAST_TRIES = 4  # of the save that a run ends with


@dataclass
class _Save:
    """One that is being written."""

    step: int
    began: float
    blocked: float = 0.0  # seconds that the training waited
    seconds: float = 0.0  # until it was a checkpoint
    manifest: Manifest | None = None
    error: Exception | None = None


class Saver:
    """Saves the states of a run, one at a time, while it goes on; close it when done.

    `event(name, **fields)` puts on record what became of a save, `line(text)` tells the user.
    """

    def __init__(
        self,
        folder: Path,
        settings: CheckpointConfig,
        *,
        config: Mapping[str, Any],
        mesh: Mapping[str, int],
        event: Callable[..., None],
        line: Callable[[str], None],
    ):
        self._folder, self._settings = folder, settings
        self._event, self._line = event, line
        plain = json.loads(json.dumps(dict(config), default=str))
        self._facts = {"config": plain, "mesh": dict(mesh), "versions": distributed.versions()}
        self._facts["processes"] = distributed.num_processes()
        self._arrays = arrays.Arrays()
        self._save: _Save | None = None
        self._thread: threading.Thread | None = None
        self._failures, self._retry_at = 0, 0.0
        self._saved_at, self._newest = time.monotonic(), -1

    def prepare(self, abstract: TrainState) -> None:
        """Makes the folder ready for such states, without what an earlier run left unfinished.

        Raises ConfigError where it cannot be written to, or has no room for one state, or where that
        cannot be kept.
        """
        fault = ""
        for path, kind in arrays.shapes_of(abstract).items():
            if " key<" in kind:
                raise ConfigError(
                    f"optim.build: {path} is a typed PRNG key, which checkpoints cannot keep; "
                    f"use an optimizer with jax.random.PRNGKey, or no --workdir"
                )
        if distributed.process_id() == 0:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                manifest.partial(self._folder, 0).mkdir(exist_ok=True)  # can be written to
                manifest.clean(self._folder)
                if lack := self._lack(bytes_of(abstract)):
                    fault = f"{lack}; make room, or use another folder"
            except OSError as error:
                fault = f"{error.strerror or error}; use a folder that can be written"
        if fault := distributed.broadcast(fault):
            raise ConfigError(f"--workdir: {self._folder}: {fault}")

    def recover(self, *, from_scratch: bool = False) -> Manifest | None:
        """Returns what the run goes on from, None to start: the newest good one; bad ones are set aside.

        Raises ConfigError where there were checkpoints and none is good, unless told to start
        `from_scratch`.
        """
        self._wait()
        step, faults = None, []
        if distributed.process_id() == 0:
            found, bad = newest_good(self._folder)
            step = found.step if found else None
            aside = self._folder / manifest.QUARANTINE
            if found or from_scratch:
                for one, why in bad.items():
                    place = manifest.quarantine(self._folder, one)
                    self._event("quarantine", step=one, why=why, place=str(place))
                    self._line(f"checkpoint of step {one}: {why}; moved to {place}")
            elif bad or aside.is_dir():
                faults = [f"{self._folder}: no checkpoint is good; --from_scratch starts anew"]
                faults += [f"  step {one}: {why}" for one, why in bad.items()]
                faults += [f"  {path}: set aside before" for path in sorted(aside.glob("*"))]
        step, faults = distributed.broadcast((step, faults))
        if faults:
            raise ConfigError(*faults)
        if step is None:
            return None
        self._newest, self._failures = step, 0
        return manifest.read(self._folder / str(step))

    def restore(self, saved: Manifest, abstract: TrainState) -> TrainState:
        """Returns the state of a checkpoint, placed as `abstract` says; see `arrays.restore`."""
        directory = self._folder / str(saved.step)
        cast = self._settings.allow_cast
        return arrays.restore(directory, saved.arrays, abstract, allow_cast=cast)

    def due(self, step: int, start: int) -> bool:
        """Says whether this process would save now; clocks and disks differ, so the first one's counts."""
        self._poll()
        s, now = self._settings, time.monotonic()
        due = s.every > 0 and step % s.every == 0 and step > start
        due |= s.every_minutes > 0 and now - self._saved_at >= 60 * s.every_minutes
        return now >= self._retry_at if self._failures else due

    def save(self, step: int, state: TrainState, **facts: Any) -> None:
        """Starts saving; waits only for a save before that still goes on, and for the copy.

        `facts` are `position`, `metrics` and `watch` of the manifest. What fails is told and tried again.
        """
        began = time.perf_counter()
        self._wait()
        if distributed.broadcast(step == self._newest):
            return
        self._saved_at = time.monotonic()
        self._save = job = _Save(step, began)
        made = manifest.partial(self._folder, step)
        try:
            if fault := distributed.broadcast(self._make_room(made, bytes_of(state))):
                raise OSError(fault)
            self._arrays.save(made, state)
        except Exception as error:  # noqa: BLE001  whatever it is, the training goes on
            job.error = error
            self._poll()
            return
        facts |= {**self._facts, "time": time.time(), "arrays": arrays.shapes_of(state)}
        self._thread = threading.Thread(target=self._commit, args=(job, facts), name="commit")
        self._thread.start()
        job.blocked = time.perf_counter() - began

    def _make_room(self, made: Path, size: int) -> str:
        """Makes the folder to write to; returns what is in the way, or nothing."""
        if distributed.process_id() > 0:
            return ""
        try:
            manifest.remove(made)
            made.mkdir(parents=True)
            return self._lack(size)
        except OSError as error:
            return f"{error.strerror}: {error.filename}"

    def _lack(self, size: int) -> str:
        """Returns nothing if there is room for a state of so many bytes."""
        needed, free = MARGIN * size, shutil.disk_usage(self._folder).free
        return f"{needed / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free" if free < needed else ""

    def _commit(self, job: _Save, facts: dict[str, Any]) -> None:
        try:
            self._arrays.wait()
            if distributed.process_id() == 0:
                job.manifest = manifest.commit(self._folder, job.step, **facts)
            job.seconds = time.perf_counter() - job.began
            if job.manifest:
                self._retire()
        except Exception as error:  # noqa: BLE001  told by `_poll`, in the thread of the run
            job.error = error

    def _retire(self) -> None:
        s, found = self._settings, []
        for step in manifest.steps(self._folder):
            try:
                found.append(manifest.read(self._folder / str(step)))
            except BadCheckpoint:
                continue  # evidence, and for a later start to tell
        kept = manifest.retained(
            found, keep=s.keep, keep_every=s.keep_every, keep_best=s.keep_best, best_by=s.best_by
        )
        for one in found:
            if one.step not in kept:
                with contextlib.suppress(OSError):  # tried again after the next save
                    manifest.remove(self._folder / str(one.step))

    def _poll(self) -> None:
        """Tells what became of a save that has ended."""
        job = self._save
        if job is None or (self._thread and self._thread.is_alive()):
            return
        self._save = self._thread = None
        if job.error is None:
            self._failures, self._newest = 0, job.step
            size = job.manifest.bytes if job.manifest else 0
            told = {"bytes": size, "blocked_seconds": job.blocked, "seconds": job.seconds}
            self._event("save", step=job.step, **told)
            return
        if distributed.process_id() == 0:
            manifest.remove(manifest.partial(self._folder, job.step))
        wait = min(FIRST_WAIT * 2 ** min(self._failures, 20), LONGEST_WAIT)
        self._failures += 1
        self._retry_at = time.monotonic() + wait
        why = _first_line(job.error)
        self._event("save_failed", step=job.step, error=why, retry_seconds=wait)
        self._line(f"step {job.step} could not be saved: {why}; next try in {wait:.0f} s")

    def _wait(self) -> None:
        if self._thread:
            self._thread.join()
        self._poll()

    def finish(self, step: int, state: TrainState, **facts: Any) -> None:
        """Saves and waits until it is done; raises ConfigError where it fails again and again."""
        for attempt in range(LAST_TRIES):
            self.save(step, state, **facts)
            self._wait()
            if not distributed.broadcast(self._failures):
                return
            if attempt + 1 < LAST_TRIES:
                time.sleep(2**attempt)
        raise ConfigError(
            f"{self._folder}: step {step} could not be saved in {LAST_TRIES} tries, see events.jsonl; "
            f"make room or repair it, and run again: it goes on from the newest checkpoint"
        )

    def close(self) -> None:
        self._wait()
        self._arrays.close()


def _first_line(error: Exception) -> str:
    """The first line of an error, which may be a page long."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
