"""The state of a process as its supervisor sees it."""

from meshtrain.supervise.workers import Exit, ProcessStatus


def status(rank=0, phase="step", current_step=5, **fields):
    defaults = dict(pid=7, first_step=0, phase_age=0.0, heartbeat_age=0.0, stopped_for=0.0)
    defaults |= dict(rank=rank, phase=phase, current_step=current_step, step_seconds=0.1)
    return ProcessStatus(**{**defaults, **fields})


def ended(code, rank=0):
    return Exit(rank, code, status(rank), [])


class PromisedBudget:
    """When a supervisor gives up, and how long it waits, as docs/guides/resume.md promises.

    Calls with the time of an attempt's end, its exit code (negative: a signal), whether it reached
    a step, the step at its end, the steps it took, and its number of processes.
    """

    def __init__(self, *, max_restarts, window):
        self.max_restarts, self.window = max_restarts, window
        self.restarted_at = []  # those that count
        self.ends = []  # code, step and number of processes of each attempt since a preemption
        self.num_idle = 0  # attempts in a row without a step

    def gives_up(self, now, code, *, reached, step, taken, num_processes):
        if code in (2, 17):
            return True
        self.num_idle = 0 if taken else self.num_idle + 1
        if code == 75:
            self.ends = []
            return False
        self.ends.append((code, step, reached, num_processes))
        num_same = 3 if code in (-9, 18) else 2
        if self.ends[-num_same:] == [self.ends[-1]] * num_same:
            return True
        recent = [at for at in self.restarted_at if now - at <= self.window]
        if len(recent) >= self.max_restarts:
            return True
        self.restarted_at.append(now)
        return False

    def wait(self):
        """Returns the seconds until the next attempt: 0, 1, 3, 7, 15 and then always 30."""
        return [0.0, 1.0, 3.0, 7.0, 15.0, 30.0][min(self.num_idle, 5)]
