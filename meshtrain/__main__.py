"""The command `meshtrain VERB ...`: each verb is a module with a `main`; without one it trains."""

import importlib
import sys

VERBS = {
    "train": "meshtrain.main",
    "launch": "meshtrain.launch",
    "info": "meshtrain.info",
    "prepare": "meshtrain.prepare",
    "convert": "meshtrain.convert",
    "generate": "meshtrain.generate",
    "evaluate": "meshtrain.evaluate",
    "verify": "meshtrain.verify",
    "audit": "meshtrain.audit",
    "profile": "meshtrain.profile",
    "schedule": "meshtrain.schedule",
    "checkpoint": "meshtrain.checkpoint.__main__",
}


def main() -> int:
    """Returns the exit code of the verb."""
    arguments = sys.argv[1:]
    verb = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "train"
    if verb not in VERBS:
        print(f"{verb}: no such verb; use one of {', '.join(VERBS)}", file=sys.stderr)
        return 2
    return importlib.import_module(VERBS[verb]).main(arguments)


if __name__ == "__main__":
    sys.exit(main())
