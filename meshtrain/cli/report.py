"""Shows how one or several runs went, in one HTML page that needs no network.

  meshtrain report runs/quickstart --output=report.html
  meshtrain report runs/one runs/two --output=compared.html
  meshtrain report runs/quickstart --serve

The page has the curves of metrics.jsonl, where the time went, restarts and rollbacks on a time
line, memory, the mesh and the pipeline schedule, the settings and how they differ. An audit.json or
a verify.json in the workdir is shown as well. With --serve the page updates while the run
continues; Ctrl-C ends the server.
"""

import argparse
import contextlib
import os
from pathlib import Path

from meshtrain import console
from meshtrain.cli.verbs import Verb
from meshtrain.errors import ConfigError

DEFAULT_PORT = 8420


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("workdirs", nargs="+", type=Path, metavar="WORKDIR", help="folder of a run")
    flags.add_argument("--output", type=Path, metavar="FILE", help="write the page to this file")
    flags.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on 127.0.0.1 instead, at an address that is printed; it updates",
    )
    flags.add_argument(
        "--port", type=int, metavar="N", help=f"port of --serve (default {DEFAULT_PORT}; 0: any)"
    )
    flags.add_argument(
        "--verdict",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="JSON of `audit --output`, or a verify.json, that is not in a workdir; "
        "may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    """Writes or serves the page; returns the exit code."""
    from meshtrain.tools.report import page, read, serve

    _check(args)
    runs = [read.Run(workdir) for workdir in args.workdirs]
    if not args.serve:
        text = page.html(page.data_of(runs, args.verdict), live=False)
        _write(args.output, text)
        steps = sum(run.metrics.num_rows for run in runs)
        size = args.output.stat().st_size
        number = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
        console.say(f"written {args.output}: {number}, {steps:,} rows, {size:,} bytes")
        return 0
    port = DEFAULT_PORT if args.port is None else args.port
    server, address = serve.server(lambda: page.data_of(runs, args.verdict), port)
    console.say(f"open {address}", "Ctrl-C ends the server")
    with server:
        server.serve_forever()
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.serve == bool(args.output):
        raise ConfigError("use either --output=FILE or --serve")
    if args.port is not None and not args.serve:
        raise ConfigError(f"--port={args.port}: use it with --serve")
    if args.output and (args.output.is_dir() or not os.access(args.output.parent, os.W_OK)):
        raise ConfigError(f"--output={args.output}: use a file in a folder that can be written")


def _write(path: Path, text: str) -> None:
    """Writes the page; one that is there is replaced only when the new one is complete."""
    new = path.with_name(f"{path.name}.new")
    try:
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            new.unlink()
        raise ConfigError(f"--output={path}: {error.strerror}; use another file") from error


VERB = Verb(
    summary="show runs in one HTML page",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
