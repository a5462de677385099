"""`python -m meshtrain.main --config=FILE ...`: the same as `meshtrain train --config=FILE ...`."""

import sys

from meshtrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
