"""The keys of a config with their comments, from the source of configs/default.py.

A comment stands on the line of its key and may continue on comment lines below it; a key without
one there has its comment on the lines above.
"""

import ast
import inspect
import io
import tokenize
from typing import NamedTuple

from meshtrain.configs import default


def source() -> str:
    """Returns the text of configs/default.py."""
    return inspect.getsource(default)


class Entry(NamedTuple):
    """A section or a key: `train` or `train.steps`."""

    name: str
    node: ast.Assign
    comment: str


def entries(text: str) -> list[Entry]:
    """Returns the sections and keys that get_config() assigns, in order, with their comments."""
    (function,) = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    sections: dict[str, str] = {}  # variable -> section
    names: list[str] = []
    nodes: list[ast.Assign] = []
    for node in function.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        owner, _, name = ast.unparse(node.targets[0]).rpartition(".")
        if len(node.targets) == 2:  # config.train = train = Section()
            sections[ast.unparse(node.targets[1])] = name
        section = sections.get(owner)
        names.append(f"{section}.{name}" if section else name)
        nodes.append(node)
    comments = _comments(nodes, text)
    return [Entry(*fields) for fields in zip(names, nodes, comments, strict=True)]


def _comments(nodes: list[ast.Assign], text: str) -> list[str]:
    lines = text.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    marks = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}

    def alone(number: int) -> bool:
        return number in marks and lines[number - 1].lstrip().startswith("#")

    def run(number: int, step: int) -> list[str]:
        """Returns the comment lines that follow each other from a line on, from top to bottom."""
        taken = []
        while alone(number):
            taken.append(marks[number])
            number += step
        return taken[::step]

    def own(node: ast.Assign) -> list[str]:
        if isinstance(node.value, ast.Tuple) and node.end_lineno > node.lineno:
            return []  # comments inside a long value belong to its items
        numbers = range(node.lineno, node.end_lineno + 1)
        return [marks[number] for number in numbers if number in marks]

    found = []
    for i, node in enumerate(nodes):
        comment = own(node)
        if not comment:
            comment = run(node.lineno - 1, -1)
        else:
            below = run(node.end_lineno + 1, +1)
            after = node.end_lineno + len(below) + 1
            is_next = i + 1 < len(nodes) and nodes[i + 1].lineno == after
            comment += [] if is_next and not own(nodes[i + 1]) else below
        found.append(" ".join(comment))
    return found
