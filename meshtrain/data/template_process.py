"""Renders chat templates, as a process with limits of time and memory.

chat_template.py runs this file. Each line of stdin is a request in JSON, each line of stdout the
answer. The first request has the sources of the templates, the date and the limit of time; each
other one the name of a template and its variables. An answer has the text and its spans, or a
fault. A text that takes too long ends the process, by SIGPROF.

The templates run in jinja2's sandbox. The environment is that of
`transformers.utils.chat_template_utils` (5.24), so that the text is the same, to the byte. Nothing
of meshtrain is imported.
"""

import datetime
import functools
import json
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

MAX_BYTES = 1 << 30  # of memory
MAX_CHARS = 16 << 20  # of a text
MAX_FAULT_CHARS = 2000
Span = tuple[int, int]


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    settings = json.loads(sys.stdin.readline())
    now = settings["now"] and datetime.datetime.fromisoformat(settings["now"])
    environment, blocks, spans = _environment(now)
    templates: dict[str, jinja2.Template] = {}

    def compile_all() -> dict[str, Any]:
        for name, source in settings["sources"].items():
            try:
                templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                return {"fault": f"line {error.lineno}: {error.message}"}
        return {}

    def render(line: str) -> dict[str, Any]:
        request = json.loads(line)
        blocks.clear()
        spans.clear()
        num_chars = 0
        for block in templates[request["template"]].generate(request["variables"]):
            num_chars += len(block)
            if num_chars > MAX_CHARS:
                return {"fault": f"it writes more than {MAX_CHARS:,} characters"}
            blocks.append(block)
        return {"text": "".join(blocks), "spans": spans}

    _answer(compile_all, settings["seconds"])
    for line in sys.stdin:
        _answer(functools.partial(render, line), settings["seconds"])


def _answer(action: Callable[[], dict[str, Any]], seconds: float) -> None:
    """Writes what an action returns; if it takes more CPU time, this process ends."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        answer = json.dumps(action())
    except MemoryError:
        answer = json.dumps({"fault": f"it needs more than {MAX_BYTES:,} bytes of memory"})
    # A template may fail in any way on messages that it does not expect.
    except Exception as error:
        answer = json.dumps({"fault": str(error)[:MAX_FAULT_CHARS]})
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


def _environment(now: datetime.datetime | None) -> tuple[jinja2.Environment, list[str], list[Span]]:
    """Returns the Jinja environment, and two lists that a render fills.

    They are the blocks of its text, and the spans that it marks.
    """
    blocks: list[str] = []
    spans: list[Span] = []

    class Generation(jinja2.ext.Extension):
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

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: (now or datetime.datetime.now()).strftime(form),
        dict=Dict(),
        namespace=Namespace,
    )
    return environment, blocks, spans


if __name__ == "__main__":
    main()
