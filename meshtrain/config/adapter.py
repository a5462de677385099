"""The section `adapter`: an update of low rank that is trained instead of the parameters."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AdapterConfig:
    """Values are checked where they are used, in `models.adapter`."""

    rank: int = 0
    alpha: float = 16.0
    targets: tuple = ("layers/*",)
    dropout: float = 0.0
