r"""Templates that join the fields of a row to one text: "{question}\n{answer}".

A name in braces is a field, with dots for one within another: "{answer.text}". The escapes \n, \t
and \\ are read, since a shell passes them on as they are; {{ and }} are braces of the text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meshtrain.errors import ConfigError

ESCAPES = {"\\n": "\n", "\\t": "\t", "\\\\": "\\"}
PARTS = re.compile(r"\{\{|\}\}|\{[^{}]*\}|\\.?|[^{}\\]+|[{}]", re.DOTALL)
USE = (
    r'use text and fields in braces, "{question}\n{answer}"; \n, \t and \\ are escapes, {{ and }} '
    r"are braces of the text"
)
MAX_SHOWN = 5  # names of fields in a message


@dataclass(frozen=True)
class Template:
    """The texts and the fields of a template, in order."""

    parts: tuple[tuple[bool, str], ...]  # (whether it is a field, its name or the text)

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its fields, each once."""
        return tuple(dict.fromkeys(part for is_field, part in self.parts if is_field))

    def render(self, row: Mapping[str, Any]) -> str:
        """Returns the text of a row; raises ValueError for a field that it lacks, or is no text."""
        texts = []
        for is_field, part in self.parts:
            texts.append(text_of(field_of(row, part), part) if is_field else part)
        return "".join(texts)


def parse(text: str) -> Template:
    """Returns the template that a text describes; raises ConfigError if it is none."""
    parts: list[tuple[bool, str]] = []
    for part in PARTS.findall(text):
        if part in ("{{", "}}"):
            parts.append((False, part[0]))
        elif part in ("{", "}"):
            raise _fault(text, f"has a {part} without its other one")
        elif part.startswith("{"):
            if not all(part[1:-1].split(".")):
                raise _fault(text, f"has {part}, which names no field")
            parts.append((True, part[1:-1]))
        elif part.startswith("\\"):
            if part not in ESCAPES:
                raise _fault(text, f"has {part}, which is no escape")
            parts.append((False, ESCAPES[part]))
        else:
            parts.append((False, part))
    if not any(is_field for is_field, _ in parts):
        raise _fault(text, "names no field")
    return Template(tuple(parts))


def _fault(text: str, fault: str) -> ConfigError:
    return ConfigError(f"template {text!r}: {fault}; {USE}")


def field_of(row: Mapping[str, Any], name: str) -> Any:
    """Returns a field of a row: the one of this name, or with dots one within another.

    Raises ValueError if there is none.
    """
    if not isinstance(row, Mapping):
        raise ValueError(f"no field {name!r}: it is no object")
    if name in row:
        return row[name]
    value: Any = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            known = ", ".join(map(repr, [*row][:MAX_SHOWN]))
            raise ValueError(f"no field {name!r}" + (f" among {known}" if known else ""))
        value = value[key]
    return value


def text_of(value: Any, name: str) -> str:
    """Returns a text or a number as text; raises ValueError for another value of field `name`."""
    if isinstance(value, bool):
        return str(value).lower()  # as JSON spells it
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{name} is {type(value).__name__}, not a text or a number")
