"""Draws the pictures of the pages:  python docs/pictures.py

Writes docs/pictures/*.svg, which are in the repository; a test compares them with what this file
draws.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape

from meshtrain.schedules import SCHEDULES
from meshtrain.tools import schedule_drawing

FOLDER = Path(__file__).resolve().parent / "pictures"
PACKAGE = FOLDER.parents[1] / "meshtrain"
DOORS = ("cli", "main", "__main__")  # of the package; they may import everything
INK, PALE, LINE = "#222222", "#ececec", "#999999"
# One colour per device, and its pale form for what the device has a copy of.
COLOURS = ("#2f6db3", "#b3541a", "#2d7d4f", "#8a4bb0")
FORMS = ("#d5e3f2", "#f3ddd0", "#d4eade", "#e6d8ef")
# Of a picture on a dark page: ink, pale ground, and the pale forms of the devices' colours.
DARK = {
    INK: "#e2e4e9",
    PALE: "#343a4a",
    FORMS[0]: "#2b4665",
    FORMS[1]: "#623823",
    FORMS[2]: "#28523b",
    FORMS[3]: "#4d3661",
}


def box(x: float, y: float, width: float, height: float, fill: str, text: str = "") -> str:
    """Returns a box with a text in its middle: white on the dark colours."""
    ink = "#ffffff" if fill in COLOURS else INK
    rect = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" fill="{fill}"/>'
    return rect + (label(x + width / 2, y + height / 2 + 4, text, "middle", ink) if text else "")


def label(x: float, y: float, text: str, anchor: str = "start", ink: str = INK) -> str:
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{ink}"'
    return f"<text {place}>{escape(text)}</text>"


def line(*points: tuple[float, float], width: float = 2, dashed: bool = False, arrow: bool = False):
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    more = ' stroke-dasharray="5 4"' * dashed + ' marker-end="url(#arrow)"' * arrow
    return f'<path d="{path}" fill="none" stroke="{LINE}" stroke-width="{width:g}"{more}/>'


def with_dark_colours(svg: str) -> str:
    """Returns a picture that is dark on a dark page.

    A browser draws a picture with the colour scheme of its page. Other programs ignore the style.
    """
    rules = ['rect[fill="#ffffff"]{fill:none}', 'g[stroke="#ffffff"]{stroke:#1e2129}']
    rules.append(f"g.forward{{fill:{INK}}}")  # numbers on pale boxes of a schedule
    rules += [f'[fill="{light}"]{{fill:{dark}}}' for light, dark in DARK.items()]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    head, rest = svg.split("\n", 1)
    return f"{head}\n{style}\n{rest}"


def picture(title: str, width: int, height: int, *parts: str) -> str:
    """Returns an SVG, on white unless its page is dark."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" font-size="13">'
    )
    tip = '<path d="M0 0L8 4L0 8z" fill="#999999"/>'
    size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    marker = f'<marker id="arrow" {size}>{tip}</marker>'
    background = f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", f"<defs>{marker}</defs>", background, *parts]
        + ["</svg>\n"]
    )


def mesh() -> Iterator[str]:
    """Yields two hosts of four devices: data between them, fsdp and tensor within."""
    for host in range(2):
        left = 20 + 330 * host
        yield f'<rect x="{left}" y="34" width="270" height="206" rx="8" fill="{PALE}"/>'
        yield label(left + 135, 26, f"host {host}: data {host}", "middle")
        for row in range(2):
            yield line((left + 105, 90 + 96 * row), (left + 165, 90 + 96 * row), width=8)
            yield line((left + 60 + 150 * row, 112), (left + 60 + 150 * row, 164), width=3)
            for column in range(2):
                number = 4 * host + 2 * row + column
                at = left + 15 + 150 * column, 66 + 96 * row
                yield box(*at, 90, 48, COLOURS[2 * row + column], f"d{number}")
        yield label(left + 135, 78, "tensor", "middle")
        yield label(left + 72, 143, "fsdp")
    yield line((290, 137), (350, 137), dashed=True)
    yield label(320, 128, "data", "middle")
    rows = (
        ("tensor", "activations, in each layer: the fastest links"),
        ("fsdp", "parameters and gradients, for each micro-batch"),
        ("data", "gradients, once in a step: the slowest links"),
    )
    for number, (axis, text) in enumerate(rows):
        y = 266 + 22 * number
        yield line((20, y - 4), (60, y - 4), width=(8, 3, 2)[number], dashed=axis == "data")
        yield label(72, y, f"{axis}: {text}")
    for number, colour in enumerate(COLOURS):
        yield box(20 + 10 * number, 322, 10, 14, colour)
    yield label(
        72, 334, "colour: the shard of the parameters, which d0 and d4, d1 and d5, ... both hold"
    )


def zero() -> Iterator[str]:
    """Yields what each of four devices stores at the four stages."""
    kinds = ("parameters", "gradients", "optimizer state")
    widths = (60, 60, 120)
    for kind, x in zip(kinds, (110, 200, 290), strict=True):
        yield label(x, 24, kind)
    for stage in range(4):
        top = 40 + 96 * stage
        yield label(20, top + 42, f"stage {stage}")
        for device in range(4):
            y = top + 20 * device
            x = 110
            for kind, width in enumerate(widths):
                yield f'<rect x="{x}" y="{y}" width="{width}" height="15" fill="{PALE}"/>'
                sharded = stage >= (3, 2, 1)[kind]
                part = width / 4 if sharded else width
                yield box(x + (device * part if sharded else 0), y, part, 15, COLOURS[device])
                x += width + 30
            yield label(x - 10, y + 12, f"d{device}")


def context() -> Iterator[str]:
    """Yields the chunks of a sequence, and which pairs of them each of four devices computes."""
    owners = [min(chunk, 7 - chunk) for chunk in range(8)]
    yield label(20, 24, "keys and values, in 8 chunks")
    for key, owner in enumerate(owners):
        yield box(110 + 42 * key, 34, 38, 26, COLOURS[owner], str(key))
    yield label(20, 52, "chunk")
    for query, owner in enumerate(owners):
        y = 74 + 30 * query
        yield label(20, y + 18, f"queries {query}")
        for key in range(query + 1):
            yield box(110 + 42 * key, y, 38, 26, FORMS[owner])
    for device in range(4):
        y = 100 + 52 * device
        yield box(480, y, 44, 26, COLOURS[device], f"d{device}")
        pair = f"chunks {device} and {7 - device}"
        yield label(534, y + 17, f"{pair}: {device + 1} + {8 - device} = 9 pairs")


def experts() -> Iterator[str]:
    """Yields the way of tokens through a layer with four experts on two devices."""
    heads = ("rows of a batch", "tokens of both, sorted", "experts", "results, to their rows")
    for x, head in zip((20, 190, 390, 560), heads, strict=True):
        yield label(x, 24, head)
    for device in range(2):
        top = 40 + 130 * device
        fill, pale = COLOURS[device], FORMS[device]
        yield box(20, top, 110, 100, pale, f"d{device}: rows {device}")
        yield f'<rect x="190" y="{top}" width="130" height="100" rx="3" fill="{PALE}"/>'
        for part in range(2):
            expert = 2 * device + part
            text = f"for expert {expert}"
            for source in range(2):
                yield box(200, top + 10 + 46 * part + 18 * source, 110, 16, FORMS[source])
            yield label(255, top + 32 + 46 * part, text, "middle")
            yield box(390, top + 46 * part + 6, 110, 36, fill, f"expert {expert}")
            yield line((322, top + 26 + 46 * part), (386, top + 24 + 46 * part), arrow=True)
        yield box(560, top, 110, 100, pale, f"d{device}: rows {device}")
        for other in range(2):
            end = 90 + 130 * other
            yield line((132, top + 50), (186, end), arrow=True)
            yield line((502, top + 50), (556, end), arrow=True)
    yield label(132, 300, "gathered")
    yield label(480, 300, "all-to-all, and a sum")


def sync() -> Iterator[str]:
    """Yields the three steps of a hierarchical sum of gradients on two hosts of four devices."""
    steps = ("1. inside each host", "2. between hosts", "3. inside each host")
    texts = ("each device sums one shard", "each device sends its shard", "all shards are gathered")
    for number, (step, text) in enumerate(zip(steps, texts, strict=True)):
        left = 20 + 240 * number
        yield label(left, 22, step)
        yield label(left, 40, text)
        for host in range(2):
            top = 56 + 130 * host
            yield f'<rect x="{left}" y="{top}" width="200" height="84" rx="8" fill="{PALE}"/>'
            yield label(left + 8, top + 17, f"host {host}")
            for device in range(4):
                x = left + 10 + 47 * device
                full = number == 2
                for shard in range(4):
                    fill = COLOURS[shard] if full or shard == device else FORMS[shard]
                    yield (
                        f'<rect x="{x + 10 * shard}" y="{top + 28}" width="10" height="44" '
                        f'fill="{fill}"/>'
                    )
        if number == 1:
            for device in range(4):
                x = left + 15 + 47 * device + 10 * device
                yield line((x, 144), (x, 182), width=2, arrow=True)
                yield line((x, 182), (x, 144), width=2, arrow=True)


def own_imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Yields the module or name in the package of each import in a file, within functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield tuple(f"{node.module}.{alias.name}".split("."))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield tuple(alias.name.split("."))


def box_of(parts: tuple[str, ...]) -> str:
    """Returns the box of a module: its folder or file in the package, of the tools `tools/NAME`."""
    return "/".join(parts[: 2 if parts[0] == "tools" else 1])


def imports_of_boxes() -> dict[str, set[str]]:
    """Returns for each box of the package those that it imports."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]
    modules = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in files}
    imports = {box_of(module): set() for module in modules if module[0] not in DOORS}
    for module, path in modules.items():
        if module[0] in DOORS:
            continue
        own = (parts[1:] for parts in own_imports(path) if parts[0] == "meshtrain")
        imports[box_of(module)] |= {box_of(parts) for parts in own if parts}
    return {box: (others & {*imports}) - {box} for box, others in imports.items()}


def rows_of(imports: dict[str, set[str]]) -> list[list[str]]:
    """Returns rows of boxes from the top, each with imports only from rows below."""
    rows, left = [], dict(imports)
    while left:
        rows.append(sorted(box for box, others in left.items() if not others & {*left}))
        assert rows[-1], f"boxes that import each other: {sorted(left)}"
        left = {box: others for box, others in left.items() if box not in rows[-1]}
    return rows[::-1]


def wing(
    left: float, width: float, title: str, rows: list[list[str]], *, longest: int
) -> Iterator[str]:
    """Yields a panel with rows of boxes from y = 96 down, at most `longest` side by side."""
    lines = [row[i : i + longest] for row in rows for i in range(0, len(row), longest)]
    height = 40 * len(lines) + 34
    yield f'<rect x="{left}" y="96" width="{width}" height="{height}" rx="8" fill="{PALE}"/>'
    yield label(left + 12, 116, title)
    for number, names in enumerate(lines):
        size = (width - 16) / len(names)
        for column, name in enumerate(names):
            x, y = left + 12 + size * column, 126 + 40 * number
            yield box(x, y, size - 8, 28, FORMS[0], name.removeprefix("tools/"))


def code() -> Iterator[str]:
    """Yields the core and the tools, drawn from the imports: a box imports only from lower rows."""
    imports = imports_of_boxes()
    tools = {name: others for name, others in imports.items() if name.startswith("tools/")}
    core = {name: others - {*tools} for name, others in imports.items() if name not in tools}
    yield box(20, 34, 800, 32, COLOURS[0], "cli: a file for each verb")
    yield line((250, 66), (250, 92), arrow=True)
    yield line((680, 66), (680, 92), arrow=True)
    yield from wing(20, 460, "the core", rows_of(core), longest=6)
    yield line((540, 112), (484, 112), arrow=True)
    yield from wing(540, 280, "tools/", rows_of(tools), longest=2)
    lazy = [(name, other) for name in core for other in imports[name] & {*tools}]
    yield label(540, 400, "The core imports:")
    for number, (name, other) in enumerate(sorted(lazy)):
        yield label(540, 422 + 20 * number, f"{other}, in {name}")


def pictures() -> dict[str, str]:
    """Returns the text of each file."""
    table = SCHEDULES["1f1b"](4, 8, 1)
    drawn = {
        "mesh.svg": picture("A mesh on two hosts", 640, 352, *mesh()),
        "zero.svg": picture("What ZeRO shards", 480, 424, *zero()),
        "context.svg": picture("Chunks of a sequence on devices", 740, 330, *context()),
        "experts.svg": picture("Tokens and experts", 700, 320, *experts()),
        "code.svg": picture("The folders of the package", 840, 630, *code()),
        "sync.svg": picture("A hierarchical sum of gradients", 720, 290, *sync()),
        "pipeline.svg": schedule_drawing.svg("1f1b", table),
    }
    return {name: with_dark_colours(text) for name, text in drawn.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
