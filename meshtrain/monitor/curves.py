"""Draws the loss of runs with matplotlib, which the extra `notebook` installs."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshtrain.errors import import_optional

INCHES = (7.2, 3.4)
DOTS_PER_INCH = 100
MAX_FIXED = 1e6  # from here on a loss is written with an exponent


@dataclass(frozen=True)
class Curve:
    """The losses of a run by step; NaN where a step has none."""

    name: str
    steps: np.ndarray  # (N,)
    loss: np.ndarray  # (N,)
    heldout_steps: np.ndarray  # (M,)
    heldout_loss: np.ndarray  # (M,)


def draw(curves: Sequence[Curve], *, title: str = "") -> Any:
    """Returns a matplotlib Figure, which a notebook shows as a picture.

    The legend has the last value of each curve. Raises ConfigError if matplotlib is missing.
    """
    import_optional("matplotlib", "notebook")
    from matplotlib.figure import Figure

    class Picture(Figure):
        """Has its own picture: a figure made without pyplot has none in a notebook."""

        def _repr_png_(self) -> bytes:
            return png(self)

    figure = Picture(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = figure.add_subplot()
    for number, curve in enumerate(curves):
        # Training and held-out loss of one run have two colours, of several runs one each.
        colors = ("C0", "C1") if len(curves) == 1 else (f"C{number}", f"C{number}")
        prefix = "" if len(curves) == 1 else f"{curve.name}: "
        if np.isfinite(curve.loss).any():
            label = f"{prefix}training loss {_last(curve.loss)}"
            axes.plot(curve.steps, curve.loss, color=colors[0], linewidth=1.2, label=label)
        if np.isfinite(curve.heldout_loss).any():
            label = f"{prefix}held-out loss {_last(curve.heldout_loss)}"
            axes.plot(
                curve.heldout_steps,
                curve.heldout_loss,
                color=colors[1],
                linestyle="--",
                marker="o",
                markersize=4,
                label=label,
            )
    axes.locator_params(axis="x", integer=True)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    # Given, since matplotlib leaves out labels that start with _ when it collects them.
    handles = axes.get_lines()
    legend = axes.legend(handles, [line.get_label() for line in handles], frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name may have $
    if title:
        figure.suptitle(title, x=0.01, ha="left", family="monospace", fontsize=8)
    return figure


def png(figure: Any) -> bytes:
    """Returns the picture of a figure, without the version of matplotlib in it."""
    file = io.BytesIO()
    figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _last(values: np.ndarray) -> str:
    last = values[np.isfinite(values)][-1]
    return f"{last:.4f}" if abs(last) < MAX_FIXED else f"{last:.4g}"
