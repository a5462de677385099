"""The command `meshtrain VERB ...`; flags without a verb are those of train."""

import sys

from meshtrain import console
from meshtrain.cluster import signals


def main(arguments: list[str] | None = None) -> int:
    """Runs the verb, by default that of the command line, and returns its exit code."""
    # Before the imports, which take a while, and before a new file becomes a closed stdout.
    console.guard()
    with signals.handled_in_thread():
        from meshtrain.cli import app

        return app.command(sys.argv[1:] if arguments is None else arguments)


if __name__ == "__main__":
    sys.exit(main())
