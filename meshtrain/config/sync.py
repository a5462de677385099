"""The section `sync`: what its values mean together."""

from typing import Any

WIRES = ("float32", "bfloat16", "int8", "int4")
PATTERNS = ("xla", "hierarchical", "ring", "tree")
FEEDBACK = ("auto", "on", "off")


def faults(settings: Any) -> list[str]:
    """Returns the faults of a SyncConfig whose choices are known."""
    found, wire, pattern = [], settings.wire, settings.pattern
    if settings.block < 2 or settings.block % 2:
        found.append(f"sync.block={settings.block}: use an even number of elements, such as 256")
    if wire != "float32" and pattern in ("ring", "tree"):
        found.append(
            f"sync.pattern={pattern}: each of its steps would round what sync.wire={wire} sends once more; "
            f"use sync.pattern=hierarchical or xla"
        )
    if wire == "float32" and settings.feedback == "on":
        found.append("sync.feedback=on: sync.wire=float32 loses nothing; use sync.feedback=auto")
    return found


def has_feedback(settings: Any) -> bool:
    """Returns whether what a step loses is added to the gradients of the next."""
    return settings.feedback == "on" or (settings.feedback == "auto" and settings.wire == "int4")


def changed(settings: Any) -> str:
    """Returns the key and value that ask for more than XLA's sum, as KEY=VALUE; "" if none does."""
    if settings.wire != "float32":
        return f"sync.wire={settings.wire}"
    return "" if settings.pattern == "xla" else f"sync.pattern={settings.pattern}"
