"""Chat templates: Jinja templates with which Hugging Face tokenizers write conversations.

Templates are code of whoever made the model, so they run in a process of their own, within limits
of time and memory: template_process.py.
"""

import datetime
import hashlib
import json
import re
import signal
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from meshtrain import foreign
from meshtrain.errors import ConfigError, import_optional

FILE = "chat_template.jinja"  # in the folder of a tokenizer; it replaces what CONFIG has
CONFIG = "tokenizer_config.json"
SECONDS = 10.0  # of CPU time that a template may take for one text

# Names of a message's reasoning; the first is what templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")
Message = Mapping[str, Any]  # "role", "content" and what else the template reads
Span = tuple[int, int]  # first character, and the one after the last


class Rendered(NamedTuple):
    """A conversation as a template writes it."""

    text: str
    generated: list[Span]  # what {% generation %} blocks wrote


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, and the special tokens that it may write."""

    render: Callable[..., Rendered]  # see `load`
    marks_replies: bool  # whether it has {% generation %} blocks
    reads_clock: bool  # whether its text depends on the date
    names: frozenset[str]  # the words in it, among them the keys of messages that it reads
    eos_token: str  # of the tokenizer; "": unknown
    special: tuple[str, ...]  # the texts of special tokens
    digest: str  # of the templates and the special tokens


def load(folder: Path, *, now: datetime.datetime | None = None) -> ChatTemplate:
    """Returns the chat template in a tokenizer's folder.

    Raises ConfigError if the folder has none, or a faulty one.
    `render(messages, tools, add_generation_prompt, arguments, documents)` returns the text of a
    conversation; all but the messages may be left out. It raises ValueError with one line if the
    template rejects it, and ConfigError if the template exceeds the limit of time. `arguments` are
    further variables that it may read, such as enable_thinking. `now` is the date for templates
    that write it; None: the current date. With `tools`, JSON schemas of functions, the template
    named tool_use is used if there is one. `documents` are texts that the replies refer to.
    """
    settings = read_config(folder)
    special = special_tokens(settings)
    sources = _sources(folder, settings)
    used = {name: sources[name] for name in ("default", "tool_use") if name in sources}
    if "default" not in used:
        has = f"only the chat templates {', '.join(sources)}" if sources else "no chat template"
        raise ConfigError(
            f"{folder}: has {has}; put a Jinja template into {folder / FILE}, or use the tokenizer "
            f"of a chat model"
        )
    process = _Process(folder, used, now)

    def render(
        messages: Sequence[Message],
        tools: list | None = None,
        add_generation_prompt: bool = False,
        arguments: Mapping[str, Any] = MappingProxyType({}),
        documents: list | None = None,
    ) -> Rendered:
        name = "tool_use" if tools is not None and "tool_use" in used else "default"
        variables = {
            "documents": None,
            **special,
            **arguments,
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if documents is not None:
            variables["documents"] = documents
        answer = process.ask({"template": name, "variables": variables})
        if "fault" in answer:
            message = " ".join(answer["fault"].split())
            raise ValueError(f"the chat template rejects it: {message}")
        return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])

    return ChatTemplate(
        render,
        marks_replies=bool(re.search(r"\{%-?\s*generation\s*-?%\}", used["default"])),
        reads_clock="strftime_now" in "".join(used.values()),
        names=frozenset(re.findall(r"\w+", " ".join(used.values()))),
        eos_token=special.get("eos_token", ""),
        special=tuple(sorted({*special.values(), *_added_tokens(folder)} - {""})),
        digest=hashlib.sha256(json.dumps([used, special]).encode()).hexdigest(),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a tokenizer's folder, or the file of an older tokenizer.

    It is {} if there is neither.
    """
    return read_json(folder / CONFIG) or read_json(folder / "special_tokens_map.json")


def named_special_tokens(folder: Path) -> dict[str, str]:
    """Returns the special tokens by name that transformers reads in a tokenizer's folder.

    Those that tokenizer_config.json does not name are in special_tokens_map.json, if there is one.
    """
    settings = read_json(folder / CONFIG)
    return special_tokens(read_json(folder / "special_tokens_map.json")) | special_tokens(settings)


def has_template(folder: Path) -> bool:
    """Returns whether a tokenizer's folder has a chat template."""
    return "default" in _sources(folder, read_config(folder))


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file; {} if there is no file."""
    try:
        return foreign.read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; copy it again") from None


def _sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a tokenizer by name; a single one is named default."""
    sources: Any = settings.get("chat_template") or {}
    if isinstance(sources, str):
        sources = {"default": sources}
    elif isinstance(sources, list):
        entries = [entry for entry in sources if isinstance(entry, dict)]
        sources = {str(entry.get("name")): entry.get("template") for entry in entries}
    try:
        if (folder / FILE).is_file():
            sources = {"default": foreign.read_utf8(folder / FILE)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FILE}: cannot be read: {error}; copy it again") from None
    is_dict = isinstance(sources, dict)
    if not is_dict or not all(isinstance(text, str) for text in sources.values()):
        raise ConfigError(f"{folder / CONFIG}: chat_template is neither a text nor a list of them")
    return sources


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the special tokens by name (bos_token, ...), which templates read as variables."""
    special = {}
    for name, value in settings.items():
        if not name.endswith("_token"):
            continue
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            special[name] = value
    return special


def _added_tokens(folder: Path) -> list[str]:
    """Returns the texts of the tokens that a tokenizer.json lists next to its vocabulary."""
    added = read_json(folder / "tokenizer.json").get("added_tokens")
    entries = added if isinstance(added, list) else []
    contents = [entry.get("content") for entry in entries if isinstance(entry, dict)]
    return [content for content in contents if isinstance(content, str)]


def _normalized(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it.

    It has no nulls, and its reasoning has the usual names.
    """
    normalized = {key: value for key, value in message.items() if value is not None}
    for key in REASONING:
        if key in normalized:
            reasoning = normalized[key]
            return {"thinking": reasoning, **normalized, "reasoning_content": reasoning}
    return normalized


class _Process:
    """The process that renders the templates of a folder."""

    def __init__(self, folder: Path, sources: Mapping[str, str], now: datetime.datetime | None):
        """Starts it; raises ConfigError for a faulty template."""
        import_optional("jinja2", "chat")
        self._folder = folder
        # -P: modules of the script's folder must not stand for others of their name.
        self._process = subprocess.Popen(
            [sys.executable, "-P", Path(__file__).with_name("template_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        weakref.finalize(self, _end, self._process)
        settings = {"sources": sources, "now": now and now.isoformat(), "seconds": SECONDS}
        answer = self.ask(settings)
        if "fault" in answer:
            raise ConfigError(f"{folder}: its chat template is not valid Jinja: {answer['fault']}")

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the answer to a request; raises ConfigError if the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        answer = b""
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:  # it has ended
            pass
        if not answer:
            code = self._process.wait()
            if code == -signal.SIGPROF:
                fault = f"takes more than {SECONDS:.0f} s for one text"
            else:
                fault = f"ends its process with exit code {code}"
            raise ConfigError(f"{self._folder}: its chat template {fault}; repair the template")
        return json.loads(answer)


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()
