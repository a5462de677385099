"""What a step sends, keeps and compiles is as in tests/golden/programs.json.

tests/lib/golden.py has the command that writes the table, after a change on purpose.
"""

import pytest

from tests.lib import golden

QUICK = "fsdp 2 x tensor 2 x context 2"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != QUICK)) for name in golden.ROWS],
)
def test_a_step_costs_what_it_did(name):
    found = golden.measured(name)
    if golden.IS_UPDATE:
        golden.update(name, found)
    lines = golden.differences(name, found, golden.stored_table())
    assert not lines, "\n".join([*lines, "on purpose? see tests/lib/golden.py"])


def test_the_state_is_donated_in_every_row():
    """All of it: a step that keeps the old state needs it twice."""
    for rows in golden.stored_table().values():
        assert rows.keys() == golden.ROWS.keys()
        for row in rows.values():
            assert row["donated_bytes"] == row["state_bytes"]
            assert row["compilations"] == {"train_step": 1, "eval_step": 1}
            assert row["compiled_late"] == {}


def test_a_difference_names_the_row_and_both_figures():
    stored = golden.stored_table()
    name = QUICK
    row = next(iter(stored.values()))[name]
    kind = next(iter(row["collectives"]))
    worse = {
        **row,
        "donated_bytes": 0,
        "peak_bytes": 2 * row["peak_bytes"],
        "collectives": {**row["collectives"], "all-gather over data": {"tensors": 1, "bytes": 8}},
        "custom_calls": {},
        "compilations": {"train_step": 5, "eval_step": 1},
        "compiled_late": {"f": 2},
    }
    table = {golden.VERSION: {name: row}}
    lines = golden.differences(name, worse, table)
    assert f"{name}: donated_bytes was {row['donated_bytes']:,}, is 0" in lines
    assert f"{name}: compilations: train_step was 1, is 5" in lines
    assert f"{name}: compiled_late: f was 0, is 2" in lines
    added = {"tensors": 1, "bytes": 8}
    assert f"{name}: collectives: all-gather over data was 0, is {added}" in lines
    assert any("peak_bytes" in line for line in lines) and not any(kind in line for line in lines)
    # Of a version without figures, only what the package decides.
    others = golden.differences(name, worse, {"jax 0.1": {name: row}})
    assert others == [line for line in lines if "peak" not in line and "collectives" not in line]
    assert golden.differences(name, row, table) == []
