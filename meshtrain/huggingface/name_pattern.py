"""Matches names of modules with the patterns of PEFT, whatever somebody has written into them.

The patterns are regular expressions, for some of which Python's `re` takes exponential time. Here
each part of a pattern is applied to a set of places in the name, so time is polynomial.
"""

import re
from collections.abc import Sequence
from typing import Any

# A part, and the least and the largest number of its repetitions; None: any.
Repeated = tuple[Any, int, int | None]
# Of one character, or of a group: its alternatives, each a sequence.
Part = re.Pattern[str] | Sequence[Sequence[Repeated]]

TOKEN = re.compile(
    r"(?P<group>\((\?:)?|\)|\|)"
    r"|(?P<one>\\[dwDW.]|\[\^?[\w.-]+\]|[\w.-])"
    r"|(?P<repeat>[*+?]|\{(?P<low>\d{1,3})(?P<comma>,(?P<high>\d{0,3}))?\})"
)
SIGNS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MAX_LENGTH = 1000


def matches(pattern: str, name: str) -> bool:
    """Returns whether `re.match(rf"(.*\\.)?({pattern})$", name)` finds something.

    Raises ValueError for a pattern with anything but characters, sets, groups, alternatives,
    repetitions, and ^ and $ at its ends.
    """
    is_from_start = pattern.startswith("^")
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    alternatives = _parse(inner)
    starts = {0}
    if not is_from_start:
        starts |= {place + 1 for place, letter in enumerate(name) if letter == "."}
    return len(name) in _ends(alternatives, name, starts)


def _parse(pattern: str) -> Sequence[Sequence[Repeated]]:
    """Returns the alternatives of a pattern; raises ValueError for one that is not supported."""
    if len(pattern) > MAX_LENGTH:
        raise ValueError("is too long")
    # The alternatives of each open group, from the outermost one.
    open_groups: list[list[list[Repeated]]] = [[[]]]
    place = 0
    while place < len(pattern):
        token = TOKEN.match(pattern, place)
        if token is None:
            raise ValueError(f"has {pattern[place]!r}")
        place = token.end()
        sequence = open_groups[-1][-1]
        if one := token["one"]:
            sequence.append((re.compile(one), 1, 1))
        elif token["repeat"]:
            if not sequence or sequence[-1][1:] != (1, 1):
                raise ValueError(f"repeats nothing with {token['repeat']!r}")
            part, _, _ = sequence.pop()
            sequence.append((part, *_repetitions(token)))
        elif token["group"] == "|":
            open_groups[-1].append([])
        elif token["group"] == ")":
            if len(open_groups) == 1:
                raise ValueError("closes a group that is not open")
            group = open_groups.pop()
            open_groups[-1][-1].append((group, 1, 1))
        else:
            open_groups.append([[]])
    if len(open_groups) > 1:
        raise ValueError("has a group that is not closed")
    return open_groups[0]


def _repetitions(token: re.Match[str]) -> tuple[int, int | None]:
    if token["repeat"] in SIGNS:
        return SIGNS[token["repeat"]]
    low = int(token["low"])
    if token["comma"] is None:
        return low, low
    return low, int(token["high"]) if token["high"] else None


def _ends(part: Part, name: str, starts: set[int]) -> set[int]:
    """Returns the places in a name where a part may end that starts at one of some places."""
    if isinstance(part, re.Pattern):
        return {start + 1 for start in starts if part.match(name[start : start + 1])}
    found: set[int] = set()
    for sequence in part:
        places = starts
        for repeated, low, high in sequence:
            places = _ends_of_repeated(repeated, low, high, name, places)
        found |= places
    return found


def _ends_of_repeated(
    part: Part, low: int, high: int | None, name: str, starts: set[int]
) -> set[int]:
    places = starts
    for _ in range(low):
        before, places = places, _ends(part, name, places)
        if places == before:  # as they will be after every further repetition
            break
    found = set(places)
    # A further repetition either reaches a new place, or ends.
    new = places
    for _ in range(len(name) + 1 if high is None else high - low):
        new = _ends(part, name, new) - found
        if not new:
            break
        found |= new
    return found
