"""Reads conversations from JSON lines, and checks them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshtrain.data import inputs
from meshtrain.data.replies import Conversation
from meshtrain.errors import ConfigError

MAX_FAULTS_SHOWN = 5


def read(files: list[Path]) -> Iterator[tuple[str, Conversation]]:
    """Yields FILE:LINE and the conversation of each line; raises ConfigError that names every faulty line.

    A line is an object with `messages`, a list of objects with `role` and `content`, or with `prompt` and
    `completion`, each a text or such a list. Blank lines are ignored; `.gz` files are decompressed.
    """
    faults = []
    options = inputs.ReadOptions(field="", separator="", forbidden="")
    for record in inputs.read_records(files, options, len):
        place = f"{files[record.next_position.file]}:{record.next_position.number}"
        try:
            yield place, _parse(record.data)
        except ValueError as error:
            faults.append(f"{place}: {error}")
    report(faults)


def report(faults: list[str]) -> None:
    """Raises ConfigError with the first faults, if there are any."""
    if not faults:
        return
    num_more = len(faults) - MAX_FAULTS_SHOWN
    more = [f"and {num_more} more"] if num_more > 0 else []
    raise ConfigError(*faults[:MAX_FAULTS_SHOWN], *more)


def _parse(line: bytes) -> Conversation:
    found = inputs.parse_json(line)
    if not isinstance(found, dict):
        raise ValueError('is no object; use {"messages": [...]}')
    tools = found.get("tools")
    if not isinstance(tools, list | None):
        raise ValueError(f"tools is {type(tools).__name__}, not a list")
    if "messages" in found:
        prompt, replies = [], _messages("messages", found["messages"], role="")
    elif {"prompt", "completion"} <= found.keys():
        prompt = _messages("prompt", found["prompt"], role="user")
        replies = _messages("completion", found["completion"], role="assistant")
    else:
        raise ValueError("has neither `messages` nor `prompt` and `completion`")
    if not any(message["role"] == "assistant" for message in replies):
        raise ValueError("no message of the assistant, so there is nothing to learn")
    return Conversation([*prompt, *replies], len(prompt), tools or None)


def _messages(name: str, found: Any, *, role: str) -> list[dict[str, Any]]:
    """Returns a list of messages; a text is one of `role`, unless that is ""."""
    if role and isinstance(found, str):
        found = [{"role": role, "content": found}]
    if not isinstance(found, list) or not found:
        kind = "an empty list" if found == [] else type(found).__name__
        raise ValueError(f"{name} is {kind}, not a list of messages")
    for number, message in enumerate(found):
        where = f"{name}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where} is {type(message).__name__}, not an object")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{where} has no role; use user, assistant, system or tool")
        content = message.get("content")
        if content is None and not message.get("tool_calls"):
            raise ValueError(f"{where} has no content")
        if not isinstance(content, str | list | None):
            raise ValueError(f"{where}: content is {type(content).__name__}, not a text")
    return found
