"""Chat templates: Jinja templates with which Hugging Face tokenizers write conversations.

Templates are code of whoever made the model, so they run in jinja2's sandbox. The environment is
that of `transformers.utils.chat_template_utils` (5.24), so that the text is the same, to the byte.
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


def load(folder: Path, *, now: datetime.datetime | None = None) -> ChatTemplate:
    """Returns the chat template in a tokenizer's folder.

    Raises ConfigError if the folder has none, or a faulty one.
    `render(messages, tools=None, add_generation_prompt=False)` returns the text of a conversation,
    and raises ValueError with one line if the template rejects it. `now` is the date for templates
    that write it; None: the current date. With `tools`, JSON schemas of functions, the template
    named tool_use is used if there is one.
    """
    settings = read_config(folder)
    sources = _sources(folder, settings)
    used = {name: sources[name] for name in ("default", "tool_use") if name in sources}
    if "default" not in used:
        has = f"only the chat templates {', '.join(sources)}" if sources else "no chat template"
        raise ConfigError(
            f"{folder}: has {has}; put a Jinja template into {folder / FILE}, or use the tokenizer "
            f"of a chat model"
        )
    special = special_tokens(settings)
    environment, blocks, spans = _environment(now)
    jinja2 = import_optional("jinja2", "chat")
    try:
        templates = {name: environment.from_string(source) for name, source in used.items()}
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{folder}: its chat template is not valid Jinja: line {error.lineno}: {error.message}"
        ) from None

    def render(
        messages: Sequence[Message], tools: list | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        variables = {
            **special,
            "messages": [_normalized(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        blocks.clear()
        spans.clear()
        try:
            for block in templates[name].generate(variables):
                blocks.append(block)
        # A template may fail in any way on messages that it does not expect.
        except Exception as error:
            message = " ".join(f"{error}".split())
            raise ValueError(f"the chat template rejects it: {message}") from None
        return Rendered("".join(blocks), list(spans))

    return ChatTemplate(
        render,
        marks_replies=bool(re.search(r"\{%-?\s*generation\s*-?%\}", used["default"])),
        reads_clock="strftime_now" in "".join(used.values()),
        names=frozenset(re.findall(r"\w+", " ".join(used.values()))),
        eos_token=special.get("eos_token", ""),
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a tokenizer's folder, or the file of an older tokenizer.

    It is {} if there is neither.
    """
    return read_json(folder / CONFIG) or read_json(folder / "special_tokens_map.json")


def has_template(folder: Path) -> bool:
    """Returns whether a tokenizer's folder has a chat template."""
    return "default" in _sources(folder, read_config(folder))


def read_json(file: Path) -> dict[str, Any]:
    """Returns the object in a file; {} if there is no file."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}; copy it again") from None
    return settings


def _sources(folder: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the templates of a tokenizer by name; a single one is named default."""
    sources = settings.get("chat_template") or {}
    if isinstance(sources, str):
        sources = {"default": sources}
    elif isinstance(sources, list):
        sources = {entry["name"]: entry["template"] for entry in sources if isinstance(entry, dict)}
    try:
        if (folder / FILE).is_file():
            sources = {"default": (folder / FILE).read_text(encoding="utf-8")}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / FILE}: cannot be read: {error}; copy it again") from None
    if not all(isinstance(text, str) for text in sources.values()):
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


def _environment(now: datetime.datetime | None) -> tuple[Any, list[str], list[Span]]:
    """Returns the Jinja environment, and two lists that a render fills.

    They are the blocks of its text, and the spans that it marks.
    """
    jinja2 = import_optional("jinja2", "chat")
    sandbox = import_optional("jinja2.sandbox", "chat")
    extensions = import_optional("jinja2.ext", "chat")
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
            text = caller()
            start = sum(map(len, blocks))
            spans.append((start, start + len(text)))
            return text

    class Namespace(jinja2.utils.Namespace):
        """`namespace()` without names with an underscore first, which lead out of the sandbox."""

        def __init__(*args, **values):
            # `self` is not a parameter: a template may use it as a name.
            self, *mappings = args
            members: dict[Any, Any] = dict(*mappings, **values)
            if any(str(name).startswith("_") for name in members):
                raise jinja2.exceptions.SecurityError("a namespace has a name with an underscore")
            jinja2.utils.Namespace.__init__(self, members)

        def __setitem__(self, name, value):
            if str(name).startswith("_"):
                raise jinja2.exceptions.SecurityError("a namespace has a name with an underscore")
            super().__setitem__(name, value)

    class Dict:
        """`dict` without the other attributes of the class, which change dicts."""

        def __call__(self, *args, **values):
            return dict(*args, **values)

        def fromkeys(self, keys, value=None):
            return dict.fromkeys(keys, value)

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, extensions.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
        dict=Dict(),
        namespace=Namespace,
    )
    return environment, blocks, spans
