"""Formats a profile as text."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import jax

MAX_DEVICES = 16


def lines(profile: Any, *, top: int) -> Iterator[str]:
    """Yields the lines of a Profile: time of a step, usage of the devices, costliest rows."""
    yield from _timing(profile)
    yield ""
    yield f"{'share of the time':28}{'busy':>9}{'collectives':>14}{'exposed':>10}{'idle':>9}"
    for device in profile.devices[:MAX_DEVICES]:
        yield _usage(device, "")
        for stream in profile.streams.get(device.name, ()):
            yield _usage(stream, "  ")
    if len(profile.devices) > MAX_DEVICES:
        yield f"and {len(profile.devices) - MAX_DEVICES} more devices"
    total = sum(row.seconds for row in profile.rows)
    yield ""
    own_time = f"{total * 1e3:.2f} ms per step and device, concurrent ones added up"
    yield f"own time of all operations: {own_time}"
    yield f"  {_shares(profile.rows, 'phase', total)}"
    yield f"  {_shares(profile.rows, 'kind', total)}"
    yield ""
    yield from _table(profile.rows, top, total)
    yield ""
    yield f"trace in {profile.file}"


def _timing(profile: Any) -> Iterator[str]:
    timing, steps = profile.timing, profile.steps
    traced_steps = f"steps {steps[0]}..{steps[-1]}" if len(steps) > 1 else f"step {steps[0]}"
    kind = jax.local_devices()[0].device_kind
    of = f" of process 0 of {jax.process_count()}" if jax.process_count() > 1 else ""
    yield f"{traced_steps} on {jax.local_device_count()} {kind}{of} · jax {jax.__version__}"
    before = ""
    if timing.untraced is not None:
        before = f"; {timing.untraced * 1e3:.2f} ms before, with the trace off"
    waited = f"{timing.waited * 1e3:.2f} ms waiting for data"
    yield f"{timing.traced * 1e3:.2f} ms a step, {waited}{before}"


def _usage(usage: Any, indent: str) -> str:
    shares = f"{usage.busy:>9.1%}{usage.collective:>14.1%}{usage.exposed:>10.1%}"
    return f"{indent + usage.name:28.27}{shares}{1 - usage.busy:>9.1%}"


def _shares(rows: Iterable[Any], key: str, total: float) -> str:
    shares = Counter()
    for row in rows:
        shares[getattr(row, key)] += row.seconds / total
    return " · ".join(f"{name} {share:.1%}" for name, share in shares.most_common(7))


def _table(rows: list[Any], top: int, total: float) -> Iterator[str]:
    shown, rest = rows[:top], rows[top:]
    kind_width = 2 + max(len(row.kind) for row in shown)
    phase_width = 2 + max(len(row.phase) for row in shown)
    heads = f"{'kind':{kind_width}}{'pass':{phase_width}}source [costliest operation + others]"
    yield f"{'ms':>8}{'%':>7}{'calls':>7}  {heads}"
    for row in shown:
        label = f"{row.kind:{kind_width}}{row.phase:{phase_width}}{row.source}"
        others = f" +{row.num_names - 1}" if row.num_names > 1 else ""
        yield f"{_costs(row.seconds, total, row.calls)}  {label} [{row.name}{others}]"
    if rest:
        seconds = sum(row.seconds for row in rest)
        costs = _costs(seconds, total, sum(row.calls for row in rest))
        yield f"{costs}  in {len(rest)} more rows: --top={len(rows)}"


def _costs(seconds: float, total: float, calls: float) -> str:
    return f"{seconds * 1e3:8.2f}{seconds / total:7.1%}{calls:7.5g}"
