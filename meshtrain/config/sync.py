"""The section `sync`: how the gradients of batch shards meet."""

from dataclasses import dataclass

from meshtrain.errors import ConfigError, choice_faults

WIRES = ("float32", "bfloat16", "int8", "int4")
PATTERNS = ("xla", "hierarchical", "ring", "tree")
FEEDBACK = ("auto", "on", "off")


@dataclass(frozen=True)
class SyncConfig:
    wire: str = "float32"
    block: int = 256
    exact: tuple = ("scale", "bias")
    feedback: str = "auto"
    pattern: str = "xla"

    def __post_init__(self):
        faults = choice_faults("sync.wire", self.wire, WIRES)
        faults += choice_faults("sync.pattern", self.pattern, PATTERNS)
        faults += choice_faults("sync.feedback", self.feedback, FEEDBACK)
        if self.block < 2 or self.block % 2:
            faults.append(f"sync.block={self.block}: use an even number of elements, such as 256")
        if not faults and self.wire != "float32" and self.pattern in ("ring", "tree"):
            faults.append(
                f"sync.pattern={self.pattern}: every step of it would round again what sync.wire={self.wire} sends; "
                f"use sync.pattern=hierarchical or xla"
            )
        if not faults and self.wire == "float32" and self.feedback == "on":
            faults.append(
                "sync.feedback=on: sync.wire=float32 loses nothing; use sync.feedback=auto"
            )
        if faults:
            raise ConfigError(*faults)

    @property
    def has_feedback(self) -> bool:
        """Whether what a step loses is added to the gradients of the next."""
        return self.feedback == "on" or (self.feedback == "auto" and self.wire == "int4")

    @property
    def is_default(self) -> bool:
        return self.wire == "float32" and self.pattern == "xla"

    @property
    def changed(self) -> str:
        """The key that asks for more than XLA's sum, for a message."""
        return (
            f"sync.wire={self.wire}" if self.wire != "float32" else f"sync.pattern={self.pattern}"
        )
