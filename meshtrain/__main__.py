"""The command `meshtrain VERB ...`; without a verb it trains."""

import sys

from meshtrain import console
from meshtrain.cluster import signals


def main() -> int:
    """Runs the verb and returns its exit code."""
    # Before the imports, which take a while, and before a new file becomes a closed stdout.
    console.guard()
    with signals.handled_in_thread():
        from meshtrain import cli

        return cli.command(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
