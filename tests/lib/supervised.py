"""The state of a process as its supervisor sees it."""

from meshtrain.supervise.workers import Exit, ProcessStatus


def status(rank=0, phase="step", current_step=5, **fields):
    defaults = dict(pid=7, first_step=0, phase_age=0.0, heartbeat_age=0.0, stopped_for=0.0)
    defaults |= dict(rank=rank, phase=phase, current_step=current_step, step_seconds=0.1)
    return ProcessStatus(**{**defaults, **fields})


def ended(code, rank=0):
    return Exit(rank, code, status(rank), [])
