"""Chat templates: the Jinja templates with which Hugging Face tokenizers write conversations as text.

Templates are code of whoever made the model, so they run in jinja2's sandbox. The environment is that of
`transformers.utils.chat_template_utils` (5.24), so that the text is the same, byte for byte.
"""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meshtrain.errors import ConfigError, import_optional

FILE = "chat_template.jinja"  # in the folder of a tokenizer; it replaces what CONFIG has

CONFIG = "tokenizer_config.json"

# Names of a message's reasoning; the first is what templates read.
REASONING = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]  # "role", "content" and what else the template reads

Span = tuple[int, int]  # first character, and the one after the last


class Rendered(NamedTuple):
    text: str
    generated: list[Span]  # what {% generation %} blocks wrote


@dataclass(frozen=True)
class ChatTemplate:
    """The chat template of a tokenizer, and the special tokens that it may write."""

    render: Callable[..., Rendered]  # see `load`
    marks_replies: bool  # whether it has {% generation %} blocks
    reads_clock: bool  # whether its text depends on the date
    eos_token: str  # of the tokenizer; "": unknown


def load(folder: Path, *, now: datetime.datetime | None = None) -> ChatTemplate:
    """Returns the chat template in a tokenizer's folder; raises ConfigError if it has none, or a faulty one.

    `render(messages, tools=None, add_generation_prompt=False)` returns the text of a conversation, and raises
    ValueError with one line if the template rejects it. `now` is the date for templates that write it; None: the
    current date. With `tools`, JSON schemas of functions, the template named tool_use is used if there is one.
    """
    settings = _read_json(folder / CONFIG)
    sources = _sources(folder, settings)
    chosen = {name: sources[name] for name in ("default", "tool_use") if name in sources}
    if "default" not in chosen:
        has = f"only the chat templates {', '.join(sources)}" if sources else "no chat template"
        raise ConfigError(
            f"{folder}: has {has}; put a Jinja template into {folder / FILE}, or use the tokenizer of a chat model"
        )
    special = _special_tokens(settings or _read_json(folder / "special_tokens_map.json"))
    environment, blocks, spans = _environment(now)
    jinja2 = import_optional("jinja2", "chat")
    try:
        templates = {name: environment.from_string(source) for name, source in chosen.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{folder}: its chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from None

    def render(
        messages: Sequence[Message], tools: list | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        values = {"messages": list(map(_normalized, messages)), "tools": tools, "documents": None}
        values |= {"add_generation_prompt": add_generation_prompt}
        blocks.clear()
        spans.clear()
        try:
            for block in templates[name].generate(**special, **values):
                blocks.append(block)
        # A template may fail in any way on messages that it does not expect.
        except Exception as error:
            message = " ".join(f"{error}".split())
            raise ValueError(f"the chat template rejects it: {message}") from None
        return Rendered("".join(blocks), list(spans))

    text = "".join(chosen.values())
    return ChatTemplate(
        render,
        marks_replies=bool(re.search(r"\{%-?\s*generation\s*-?%\}", chosen["default"])),
        reads_clock="strftime_now" in text,
        eos_token=special.get("eos_token", ""),
    )


def _read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file; {} if there is no file."""
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; copy it again") from None
    return found


def _sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a tokenizer by name; a single one is named default."""
    found = settings.get("chat_template") or {}
    if isinstance(found, str):
        found = {"default": found}
    elif isinstance(found, list):
        found = {one["name"]: one["template"] for one in found if isinstance(one, dict)}
    try:
        if (folder / FILE).is_file():
            found = {"default": (folder / FILE).read_text()}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FILE}: cannot be read: {error}; copy it again") from None
    if not all(isinstance(text, str) for text in found.values()):
        raise ConfigError(f"{folder / CONFIG}: chat_template is neither a text nor a list of them")
    return found


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the special tokens by name (bos_token, eos_token, ...), which templates read as variables."""
    texts = {
        name: value["content"] if isinstance(value, dict) and "content" in value else value
        for name, value in settings.items()
        if name.endswith("_token")
    }
    return {name: value for name, value in texts.items() if isinstance(value, str)}


def _normalized(message: Message) -> dict[str, Any]:
    """Returns a message as templates expect it: without nulls, its reasoning under the usual names."""
    found = {key: value for key, value in message.items() if value is not None}
    reasoning = next((found[key] for key in REASONING if key in found), None)
    if reasoning is not None:
        found = {"thinking": reasoning, **found, "reasoning_content": reasoning}
    return found


def _environment(now: datetime.datetime | None) -> tuple[Any, list[str], list[Span]]:
    """Returns the Jinja environment, the blocks of text that a render collects, and the spans that it marks."""
    jinja2 = import_optional("jinja2", "chat")
    sandbox, extensions = (import_optional(f"jinja2.{name}", "chat") for name in ("sandbox", "ext"))
    blocks: list[str] = []
    spans: list[Span] = []

    class Generation(extensions.Extension):
        """The block {% generation %}...{% endgeneration %}."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller):
            text, start = caller(), sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):
        """`namespace()` without names that begin with an underscore, which lead out of the sandbox."""

        def __init__(*args, **values):
            self, *given = args
            values = dict(*given, **values)
            if any(str(name).startswith("_") for name in values):
                raise jinja2.exceptions.SecurityError("a namespace has a name with an underscore")
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError("a namespace has a name with an underscore")
            super().__setitem__(name, value)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
        # Without the attributes of the class itself.
        dict=lambda *args, **values: dict(*args, **values),
        namespace=Namespace,
    )
    return environment, blocks, spans
