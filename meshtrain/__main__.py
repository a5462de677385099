"""The command `meshtrain VERB ...`: each verb is a module with a `main`; without one it trains."""

import importlib
import sys

VERBS = {
    "train": "meshtrain.main",
    "launch": "meshtrain.cluster.launch",
    "info": "meshtrain.cluster.info",
    "prepare": "meshtrain.data.prepare",
    "convert": "meshtrain.huggingface.convert",
    "generate": "meshtrain.inference.generate",
    "evaluate": "meshtrain.inference.evaluate",
    "verify": "meshtrain.verify",
    "audit": "meshtrain.analysis.audit",
    "profile": "meshtrain.analysis.profile",
    "schedule": "meshtrain.analysis.schedule",
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
