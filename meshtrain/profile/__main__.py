"""python -m meshtrain.profile"""

import sys

from meshtrain.profile import main

if __name__ == "__main__":
    sys.exit(main())
