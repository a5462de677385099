"""Phases of a run: exact places, no sample of a part twice, and what a resumed run may change."""

import dataclasses

import numpy as np
import pytest

from meshtrain.data import mixture, phases, tokens
from meshtrain.data.source import Phase, Timeline, last_sample
from meshtrain.errors import ConfigError
from tests.lib.documents import build, documents, write

# Parts of 40, 60 and 25 windows of 8 tokens: the thousands of a token are the part.
WINDOWS = {"a": 40, "b": 60, "c": 25}


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    paths = {}
    for number, (name, size) in enumerate(WINDOWS.items()):
        stream = np.arange(1, 8 * size + 2) + 1000 * number
        paths[name] = write(folder / name, [stream])
    return paths


def rows(source, first, last):
    """Returns the part (n,) and the window (n,) of each sample."""
    firsts = source.read(np.arange(first, last)).tokens[:, 0] - 1
    return firsts // 1000, firsts % 1000 // 8


def phased(parts, *entries, **changes):
    by_path = []
    for length, weights in entries:
        mixed = tuple((parts[name], weight) for name, weight in weights.items())
        by_path.append((length, mixed))
    return build("", phases=tuple(by_path), **changes)


ENTRIES = ((0.5, {"a": 3, "b": 1}), (10, {"b": 1}), (0.1, {"c": 1, "a": 1}))


def test_a_phase_has_its_parts_alone_and_each_part_continues_its_epochs(parts, monkeypatch):
    monkeypatch.setattr(mixture, "BLOCK", 8)
    entries = (*ENTRIES[:2], (0.1, {"c": 1, "a": 1, "b": 2}))
    run = phased(parts, *entries).in_run(Timeline(num_steps=40, global_batch=6))
    assert [(phase.step, phase.sample) for phase in run.phases] == [(0, 0), (20, 120), (30, 180)]
    part, window = rows(run, 0, 240)
    counts = [np.bincount(one, minlength=3).tolist() for one in np.split(part, [120, 180])]
    assert counts[:2] == [[90, 30, 0], [0, 60, 0]] and abs(counts[2][1] - 30) < 3
    # Phases end within a block; up to the end of one, each epoch has each window once.
    part, window = rows(run, 0, 180 + 64)
    for number, size in enumerate(WINDOWS.values()):
        times = np.bincount(window[part == number], minlength=size)
        num_epochs, rest = divmod(int(times.sum()), size)
        assert sorted(times.tolist()) == [num_epochs] * (size - rest) + [num_epochs + 1] * rest
    # A sample is a function of its index.
    shuffled = np.random.default_rng(0).permutation(240)
    again = run.read(shuffled).tokens
    assert np.array_equal(again, run.read(np.arange(240)).tokens[shuffled])
    read = {one.name: one.samples for one in run.parts(0, 180 + 64)}
    assert read == dict(zip(parts.values(), np.bincount(part).tolist(), strict=True))


@pytest.mark.parametrize("cut", [0, 1, 119, 120, 121, 7 * 8, 240, 1000])
def test_the_samples_of_each_part_are_counted(parts, monkeypatch, cut):
    monkeypatch.setattr(mixture, "BLOCK", 16)
    run = phased(parts, *ENTRIES).in_run(Timeline(num_steps=200, global_batch=6))
    part, _ = rows(run, cut, 1200)
    assert [one.samples for one in run.parts(cut, 1200)] == np.bincount(part, minlength=3).tolist()


def test_one_phase_is_the_mixture_and_a_path_alone_keeps_its_order(parts):
    run = phased(parts, (1.0, {"a": 3, "b": 1})).in_run(Timeline(10, 4))
    mixed = build("", mixture=((parts["a"], 3), (parts["b"], 1)))
    alone = build(parts["a"])
    phase = build("", phases=((5, parts["a"]), (0.5, parts["b"]))).in_run(Timeline(20, 4))
    for one, other, last in ((run, mixed, 99), (phase, alone, 20)):
        assert np.array_equal(rows(one, 0, last), rows(other, 0, last))
    assert run.identity == mixed.identity


@pytest.mark.parametrize("start", ["path", "mixture"])
def test_a_run_without_phases_may_get_them(parts, start):
    """As when a run that was begun without a plan is to end with better data."""
    if start == "path":
        before, first = build(parts["a"]), parts["a"]
    else:
        first = ((parts["a"], 3), (parts["b"], 1))
        before = build("", mixture=first)
    before = before.in_run(Timeline(40, 6))
    after = build("", phases=((20, first), (0.1, parts["c"]))).in_run(resumed(before, 15))
    assert np.array_equal(rows(before, 0, 120), rows(after, 0, 120))
    assert set(rows(after, 120, 240)[0]) == {2}
    with pytest.raises(
        ConfigError, match=r"\[1\]: would begin at step 10, but the run is at step 15"
    ):
        build("", phases=((10, first), (0.1, parts["c"]))).in_run(resumed(before, 15))
    with pytest.raises(ConfigError, match=r"\[0\]: .*other data or weights"):
        build("", phases=((20, parts["c"]), (20, first))).in_run(resumed(before, 15))


# ---- resumed runs ----


def resumed(run, step, *, batch=6, num_steps=40, same_batch=True):
    """Returns the timeline of a run that continues at `step` of `run`, with batches of 6 before."""
    return Timeline(num_steps, batch, step, 6 * step, run.phases, same_batch=same_batch)


def test_phases_ahead_may_change_and_no_others(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    longer = (*ENTRIES[:1], (15, {"b": 1}), *ENTRIES[2:])
    other = (*ENTRIES[:2], (0.1, {"c": 1}))
    added = (*ENTRIES[:2], (5, {"c": 1}), (0.1, {"c": 1, "a": 1}))
    for step, entries in ((25, longer), (20, longer), (29, other), (30, other), (25, added)):
        changed = phased(parts, *entries).in_run(resumed(run, step))
        position = 6 * step
        for one, now in zip(rows(run, 0, position), rows(changed, 0, position), strict=True):
            assert np.array_equal(one, now)
        assert changed.phases[:1] == run.phases[:1]
    for step, entries, expected in (
        (31, longer, r"\[2\]: the run is at step 31 .*would begin at step 35 and began at step 30"),
        (31, other, r"\[2\]: .*other data or weights"),
        (31, ENTRIES[:2], r"\[2\]: .*it is missing"),
        (25, ((0.25, {"a": 3, "b": 1}), *ENTRIES[1:]), r"\[1\].*step 10 and began at step 20"),
        (25, (*ENTRIES[:1], (2, {"b": 1}), *ENTRIES[2:]), r"\[2\]: would begin at step 22, but"),
    ):
        with pytest.raises(ConfigError, match=expected):
            phased(parts, *entries).in_run(resumed(run, step))


def test_a_phase_that_begins_with_the_next_sample_has_not_begun(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    changed = phased(parts, ENTRIES[0], (10, {"c": 1})).in_run(resumed(run, 20))
    part, _ = rows(changed, 120, 240)
    assert set(part) == {2}


def test_another_batch_moves_the_phases_ahead(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    again = phased(parts, *ENTRIES).in_run(resumed(run, 25, batch=4, same_batch=False))
    assert [(one.step, one.sample) for one in again.phases] == [(0, 0), (20, 120), (30, 170)]
    assert last_sample(resumed(run, 25, batch=4)) == 150 + 15 * 4
    part, _ = rows(again, 150, 210)
    assert set(part[:20]) == {1} and set(part[20:]) == {0, 2}
    # From then on with the same batch, which keeps these places.
    later = Timeline(40, 4, 28, 162, again.phases)
    assert phased(parts, *ENTRIES).in_run(later).phases == again.phases


def test_a_checkpoint_without_phases_has_begun_none(parts):
    """As those of earlier versions have none, and where a change of all data was allowed."""
    old = Timeline(40, 4, 25, 150, ())  # 25 batches of 6 before
    run = phased(parts, *ENTRIES).in_run(old)
    assert [(one.step, one.sample) for one in run.phases] == [(0, 0), (20, 130), (30, 170)]
    larger = Timeline(40, 100, 25, 150, ())
    run = phased(parts, *ENTRIES).in_run(larger)
    assert [one.sample for one in run.phases] == [0, 0, 650]
    part, _ = rows(run, 150, 700)
    assert set(part[:500]) == {1} and set(part[500:]) == {0, 2}


def test_after_samples_were_left_out_the_plan_stays(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    skipped = Timeline(40, 6, 22, 150, run.phases)
    assert phased(parts, *ENTRIES).in_run(skipped).phases == run.phases


def test_a_longer_run_with_lengths_in_steps_may_resume(parts):
    entries = ((20, {"a": 1}), (10, {"b": 1}))
    run = phased(parts, *entries).in_run(Timeline(40, 6))
    assert phased(parts, *entries).in_run(resumed(run, 40, num_steps=80)).phases == run.phases
    fractions = ((0.5, {"a": 1}), (0.5, {"b": 1}))
    run = phased(parts, *fractions).in_run(Timeline(40, 6))
    with pytest.raises(ConfigError, match="would begin at step 40 and began at step 20"):
        phased(parts, *fractions).in_run(resumed(run, 40, num_steps=80))


# ---- limits and mistakes ----


def test_documents_weigh_by_their_length(tmp_path):
    short = write(tmp_path / "short", documents([4] * 100))
    long = write(tmp_path / "long", documents([16] * 100))
    run = build("", mixture=((short, 1), (long, 1)), weights="documents")
    few, many = (part.samples for part in run.parts(0, mixture.BLOCK))
    assert abs(many / few - 4) < 1e-3
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "raw.bin")
    raw = str(tmp_path / "raw.bin")
    with pytest.raises(ConfigError, match="data.weights=documents: .*raw.bin does not mark"):
        build("", mixture=((raw, 1), (long, 1)), weights="documents", dtype="uint16")


def test_a_run_with_too_many_epochs_of_a_part_is_rejected(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    most = max(part.samples / part.size for part in run.parts(0, 240))
    assert phased(parts, *ENTRIES, max_epochs=most).in_run(Timeline(40, 6)).phases == run.phases
    with pytest.raises(ConfigError, match=rf"the run would read .*/a {most:.3g} times"):
        phased(parts, *ENTRIES, max_epochs=most - 0.01).in_run(Timeline(40, 6))
    alone = build(parts["a"], max_epochs=2.0)
    assert alone.in_run(Timeline(20, 4)).size == 40
    with pytest.raises(ConfigError, match=r"would read .*/a 2.1 times"):
        alone.in_run(Timeline(21, 4))


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ((0.5,), r"data.phases\[0\]=0.5: is not a \(LENGTH, MIXTURE\)"),
        (((True, "x"),), r"is not a \(LENGTH, MIXTURE\)"),
        ((("x", 0.5),), r"is not a \(LENGTH, MIXTURE\)"),
        (((0, "x"),), "its length is 0"),
        (((-1.0, "x"),), "its length is -1.0"),
        (((1.5, "x"),), "its length is 1.5"),
        (((float("nan"), "x"),), "its length is nan"),
        (((0.7, "x"), (0.7, "y")), "add up to 1.4"),
        (((1, ()),), r"data.phases\[0\]: \(\) is not a mixture"),
        (((1, (("x", 0),)),), r"data.phases\[0\]: \('x', 0\) is not a \(path, weight above 0\)"),
        (((1, (("x", 1), ("x", 2))),), "x is named twice"),
        (((1, ""),), "'' is not a mixture"),
        (((1, "missing"),), "data.path=missing: no such file"),
    ],
)
def test_phases_that_are_none_are_rejected(entries, expected):
    with pytest.raises(ConfigError, match=expected):
        build("", phases=entries)


def test_a_phase_after_the_end_of_the_run_is_named(parts):
    source = phased(parts, (30, {"a": 1}), (5, {"b": 1}), (5, {"c": 1}))
    assert source.in_run(Timeline(40, 6)).warnings == []
    assert source.in_run(Timeline(35, 6)).warnings == [
        "data.phases[2]: begins at step 35, and train.steps=35: the run does not read it"
    ]


def test_a_phase_without_a_step_is_rejected(parts):
    source = phased(parts, (0.001, {"a": 1}), (0.9, {"b": 1}))
    with pytest.raises(
        ConfigError, match=r"data.phases\[0\]: 0.001 of train.steps=40 is less than"
    ):
        source.in_run(Timeline(40, 6))


def test_phases_and_a_mixture_are_not_both_given(parts):
    with pytest.raises(ConfigError, match="data.path=x and data.phases=.*needs data.path=''"):
        build("x", phases=((1, parts["a"]),))


def test_the_held_out_data_is_that_of_the_last_phase(parts):
    source = phased(parts, *ENTRIES, split="heldout", heldout=0.2)
    part, _ = rows(source, 0, 50)
    assert set(part) == {0, 2} and source.in_run is None


def test_places_are_recorded_as_a_checkpoint_has_them(parts):
    run = phased(parts, *ENTRIES).in_run(Timeline(40, 6))
    digests = {phase.digest for phase in run.phases}
    assert len(digests) == 3 and all(isinstance(one, str) for one in digests)
    restored = [Phase(*[*phase]) for phase in run.phases]
    assert phases.place([0, 20, 30], [one.digest for one in restored], resumed(run, 35)) == restored
    assert dataclasses.replace(run).phases == run.phases
    assert tokens.WEIGHTS[0] == "tokens"
