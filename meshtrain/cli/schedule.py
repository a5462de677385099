"""Prints a pipeline schedule and its cost, and draws it.

  meshtrain schedule --schedule=interleaved --stages=4 --microbatches=8 --chunks=2 --output=x.svg

F is forward, B backward. A column is a tick: each stage runs at most one forward and one backward.
With several chunks per stage, 3b is micro-batch 3 in chunk 1. No devices are needed.
"""

import argparse
import shutil
from pathlib import Path

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.errors import ConfigError, did_you_mean, minimum_faults, nearest_multiples
from meshtrain.schedules import SCHEDULES, Table
from meshtrain.tools import schedule_drawing


def cost_lines(name: str, table: Table) -> list[str]:
    """Returns the cost of a schedule as lines: ticks, bubble, memory and time."""
    M, F, B = table.num_microbatches, schedule_drawing.FORWARD, schedule_drawing.BACKWARD
    cost = table.cost(F, B)
    ideal = M * (F + B)
    live = f"{table.num_live} chunk input{'s' * (table.num_live > 1)}"
    gpipe = "" if name == "gpipe" else f" (gpipe: {M})"
    return [
        f"ticks             {table.num_ticks}",
        f"bubble            {100 * table.bubble:.1f} % of a step{_formula(table)}",
        f"live activations  at most {live} on a stage{gpipe}",
        f"predicted cost    {round(cost, 2):.10g}, if a stage's forward of a micro-batch costs {F} "
        f"and its backward {B}",
        f"                  {cost / ideal:.2f} times the ideal, M(F+B) = {ideal}",
    ]


def _formula(table: Table) -> str:
    """Returns the formula of the bubble, or when it holds."""
    P, M, V = table.num_stages, table.num_microbatches, table.num_chunks
    formula = "(P-1)/(MV+P-1)"
    if abs(table.bubble - (P - 1) / (M * V + P - 1)) < 1e-9:
        return f" = {formula}"
    return f"; {formula} if P divides M, for example M = {nearest_multiples(M, P)}"


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("--schedule", required=True, metavar="NAME", help=", ".join(SCHEDULES))
    add("--stages", required=True, type=int, metavar="P", help="size of mesh.pipeline")
    add("--microbatches", required=True, type=int, metavar="M", help="train.num_microbatches")
    add("--chunks", default=1, type=int, metavar="V", help="chunks of layers on each stage")
    add("--output", type=Path, metavar="FILE.svg", help="draw the timeline to this file")


def run(args: argparse.Namespace) -> int:
    """Prints the schedule; returns the exit code."""
    faults = _faults(args)
    if faults:
        raise ConfigError(*faults)
    table = SCHEDULES[args.schedule](args.stages, args.microbatches, args.chunks)
    if args.output:
        _write(args.output, schedule_drawing.svg(args.schedule, table))
    lines = schedule_drawing.text_lines(table, shutil.get_terminal_size().columns)
    console.say(*lines, "", *cost_lines(args.schedule, table))
    return 0


def _faults(args: argparse.Namespace) -> list[str]:
    name, chunks, output = args.schedule, args.chunks, args.output
    counts = {"--stages": args.stages, "--microbatches": args.microbatches, "--chunks": chunks}
    faults = minimum_faults(1, counts)
    if name not in SCHEDULES:
        near = did_you_mean(name, SCHEDULES)
        faults.append(f"--schedule={name}: unknown{near}; use one of {', '.join(SCHEDULES)}")
    elif name != "interleaved" and chunks > 1:
        faults.append(
            f"--chunks={chunks}: {name} has one chunk per stage; use --schedule=interleaved"
        )
    if output and output.suffix != ".svg":
        faults.append(f"--output={output}: use a name ending in .svg, which any tool converts")
    if output and not output.parent.is_dir():
        faults.append(f"--output={output}: there is no folder {output.parent}; make it first")
    return faults


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output={path}: {error.strerror}; use a file that can be written"
        ) from error


VERB = Verb(
    summary="print and draw a pipeline schedule",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
