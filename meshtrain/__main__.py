"""The command `meshtrain VERB ...`; without a verb it trains."""

import sys

from meshtrain import cli


def main() -> int:
    """Runs the verb and returns its exit code."""
    arguments = sys.argv[1:]
    verb = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    if verb not in cli.VERBS:
        print(f"{verb}: unknown verb; use one of {', '.join(cli.VERBS)}", file=sys.stderr)
        return 2
    return cli.main(verb, arguments)


if __name__ == "__main__":
    sys.exit(main())
