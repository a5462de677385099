"""`meshtrain schedule`: the printed table, the drawing, and the messages for wrong flags."""

import sys
from xml.etree import ElementTree

import pytest

from meshtrain import __main__ as command
from meshtrain.cli import app
from meshtrain.schedules import SCHEDULES
from meshtrain.tools import schedule_drawing

SVG = "{http://www.w3.org/2000/svg}"


def flags(name, P, M, V=1, output=None):
    values = {"schedule": name, "stages": P, "microbatches": M, "chunks": V, "output": output}
    return [f"--{key}={value}" for key, value in values.items() if value is not None]


ONE_CHUNK = """\
tick      0
stage 0 F 0 1 2 · ·
        B · · 0 1 2
stage 1 F · 0 1 2 ·
        B · 0 1 2 ·

ticks             5
bubble            25.0 % of a step = (P-1)/(MV+P-1)
live activations  at most 3 chunk inputs on a stage (gpipe: 3)
predicted cost    12, if a stage's forward of a micro-batch costs 1 and its backward 2
                  1.33 times the ideal, M(F+B) = 9
"""

TWO_CHUNKS = """\
tick       0              5
stage 0 F 0a 1a 0b 1b 2a  · 2b  ·  ·  ·
        B  ·  ·  ·  · 0b 1b 0a 1a 2b  ·
stage 1 F  · 0a 1a 0b 1b 2a  · 2b  ·  ·
        B  ·  ·  · 0b 1b 0a 1a 2b  · 2a

tick      10
stage 0 F  ·
        B 2a
stage 1 F  ·
        B  ·

ticks             11
bubble            25.0 % of a step; (P-1)/(MV+P-1) if P divides M, for example M = 2 or 4
live activations  at most 5 chunk inputs on a stage (gpipe: 3)
predicted cost    12, if a stage's forward of a micro-batch costs 1 and its backward 2
                  1.33 times the ideal, M(F+B) = 9
"""


@pytest.mark.parametrize(
    ("case", "columns", "printed"),
    [(("1f1b", 2, 3), 80, ONE_CHUNK), (("interleaved", 2, 3, 2), 40, TWO_CHUNKS)],
)
def test_the_printed_table_and_figures(monkeypatch, capsys, case, columns, printed):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["meshtrain", "schedule", *flags(*case)])
    assert command.main() == 0
    assert capsys.readouterr() == (printed, "")


@pytest.mark.parametrize("columns", [1, 40, 80, 100])
def test_a_wide_table_is_wrapped_and_complete(columns):
    table = SCHEDULES["1f1b"](4, 120, 1)
    lines = schedule_drawing.text_lines(table, columns)
    assert max(map(len, lines)) <= max(columns, 30)
    rows = [line[9:].split() for line in lines if line.startswith("stage 2 F")]
    expected = ["·" if m < 0 else str(m) for m in table.forward.microbatch[:, 2]]
    assert sum(rows, []) == expected
    heads = [line for line in lines if line.startswith("tick")]
    assert [*map(int, " ".join(heads).replace("tick", "").split())] == [*range(0, 126, 5)]
    # A number ends at the same position as its column.
    for head, block in zip(heads, rows, strict=True):
        ends = {len(head[: head.index(number) + len(number)]) for number in head.split()[1:]}
        assert ends == {9 + 4 * column for column in range(1, len(block) + 1, 5)}


def test_every_chunk_has_a_distinct_name():
    for V in (2, 26, 27, 100):
        assert len({schedule_drawing.cell(3, chunk, V) for chunk in range(V)}) == V


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"P": 0}, "--stages=0: use 1 or more"),
        ({"M": -1}, "--microbatches=-1: use 1 or more"),
        ({"V": 0}, "--chunks=0: use 1 or more"),
        (
            {"name": "interleave"},
            '--schedule=interleave: unknown (did you mean "interleaved"?); '
            "use one of 1f1b, gpipe, interleaved",
        ),
        ({"V": 2}, "--chunks=2: 1f1b has one chunk per stage; use --schedule=interleaved"),
        (
            {"name": "gpipe", "V": 3},
            "--chunks=3: gpipe has one chunk per stage; use --schedule=interleaved",
        ),
        ({"output": "x.png"}, "--output=x.png: use a name ending in .svg, which any tool converts"),
        ({"output": ""}, "--output=.: use a name ending in .svg, which any tool converts"),
        ({"output": "no/x.svg"}, "--output=no/x.svg: there is no folder no; make it first"),
        ({"output": "d.svg"}, "--output=d.svg: Is a directory; use a file that can be written"),
        (
            {"P": 0, "output": "no/x.pdf"},
            "--stages=0: use 1 or more\n"
            "--output=no/x.pdf: use a name ending in .svg, which any tool converts\n"
            "--output=no/x.pdf: there is no folder no; make it first",
        ),
    ],
)
def test_a_wrong_flag_is_reported_in_one_line(monkeypatch, tmp_path, capsys, changes, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.svg").mkdir()
    assert app.main("schedule", flags(**{"name": "1f1b", "P": 4, "M": 8, **changes})) == 2
    assert capsys.readouterr() == ("", message + "\n")
    assert [path.name for path in tmp_path.iterdir()] == ["d.svg"]


def boxes(root, kind):
    """Returns (x, y, width, number, fill) of each box."""
    group = next(group for group in root.iter(SVG + "g") if group.get("class") == kind)
    rects, numbers = group.findall(SVG + "rect"), group.findall(SVG + "text")
    assert len(rects) == len(numbers)
    return [
        (*(float(rect.get(key)) for key in ("x", "y", "width")), int(number.text), rect.get("fill"))
        for rect, number in zip(rects, numbers, strict=True)
    ]


@pytest.mark.parametrize(
    ("name", "P", "M", "V"),
    [("1f1b", 4, 8, 1), ("gpipe", 3, 4, 1), ("interleaved", 2, 5, 3), ("1f1b", 1, 1, 1)],
)
def test_the_drawing_has_a_box_for_each_forward_and_backward(tmp_path, capsys, name, P, M, V):
    path = tmp_path / "x.svg"
    assert app.main("schedule", flags(name, P, M, V, path)) == 0
    table, root = SCHEDULES[name](P, M, V), ElementTree.parse(path).getroot()
    forward, backward = boxes(root, "forward"), boxes(root, "backward")
    unit = forward[0][2]
    assert {box[2] for box in forward} == {unit} and {box[2] for box in backward} == {2 * unit}
    for drawn, work in ((forward, table.forward), (backward, table.backward)):
        rows = sorted({box[1] for box in drawn})
        assert len(rows) == P
        for stage, row in enumerate(rows):
            numbers = [m for m in work.microbatch[:, stage].tolist() if m >= 0]
            assert [box[3] for box in sorted(drawn) if box[1] == row] == numbers
    everything = forward + backward
    length = max(x + w for x, _, w, *_ in everything) - min(x for x, *_ in everything)
    assert length == pytest.approx(table.cost() * V * unit)
    for row in {box[1] for box in everything}:  # no two boxes of a stage overlap
        spans = sorted((x, x + w) for x, y, w, *_ in everything if y == row)
        assert all(a[1] <= b[0] + 1e-6 for a, b in zip(spans, spans[1:], strict=False))
    assert len({fill for *_, fill in everything}) == 2 * V * min(M, len(schedule_drawing.COLOURS))
    width, height = float(root.get("width")), float(root.get("height"))
    assert max(x + w for x, _, w, *_ in everything) < width and max(b[1] for b in forward) < height
    background = root.find(SVG + "rect")
    assert tuple(background.get(key) for key in ("width", "height", "fill")) == (
        root.get("width"),
        root.get("height"),
        schedule_drawing.WHITE,
    )
    words = " ".join(text.text for text in root.iter(SVG + "text"))
    for part in (name, f"P = {P}", f"M = {M}", f"V = {V}", f"{100 * table.bubble:.1f} %", "time"):
        assert part in words


def test_a_tick_has_time_for_a_forward_and_a_backward_if_any_stage_has_one():
    table = SCHEDULES["1f1b"](2, 2, 1)  # F, FB, FB, B
    start_times = schedule_drawing.start_times(table)
    assert start_times["forward"].tolist() == [0, 1, 4, 7]
    assert start_times["backward"].tolist() == [1, 2, 5, 7]


def test_boxes_of_a_long_drawing_are_exactly_spaced():
    table = SCHEDULES["1f1b"](1, 10_000, 1)
    root = ElementTree.fromstring(schedule_drawing.svg("a <b> & c", table))
    for kind in ("forward", "backward"):  # more than a million pixels wide
        drawn, unit = boxes(root, kind), boxes(root, "forward")[0][2]
        assert {b[0] - a[0] for a, b in zip(drawn, drawn[1:], strict=False)} == {3 * unit}
    assert root.find(SVG + "title").text.startswith("a <b> & c: P = 1 stages")


@pytest.mark.parametrize("num_chunks", [1, 2, 5])
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_numbers_contrast_with_their_boxes(kind, num_chunks):
    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ink = luminance({"forward": schedule_drawing.INK, "backward": schedule_drawing.WHITE}[kind])
    for m in range(len(schedule_drawing.COLOURS)):
        for chunk in range(num_chunks):
            box = luminance(schedule_drawing.shade(kind, m, chunk, num_chunks))
            contrast = (max(box, ink) + 0.05) / (min(box, ink) + 0.05)
            assert contrast >= 4.5, (m, chunk)  # WCAG AA
