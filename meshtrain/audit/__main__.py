"""python -m meshtrain.audit"""

import sys

from meshtrain.audit import main

if __name__ == "__main__":
    sys.exit(main())
