"""Checks that layouts compute what one device computes; see verify.py."""

from collections.abc import Iterable

from meshtrain import lazy
from meshtrain.errors import ConfigError, choice_faults

lazy.load_modules_of(__name__)

QUICK_LAYOUTS = 5  # number of layouts that `quick` tries

# Checks that `--without` can leave out, for models that they do not apply to.
OPTIONAL = ("packing", "masks", "weights", "causality", "cross-entropy", "gradient")

# Of Python's garbage collection. Tracing makes many objects and few cycles; the usual thresholds
# cost 7 % of the time.
GC_THRESHOLDS = 200_000, 50, 100


def check_without(names: Iterable[str]) -> None:
    """Raises ConfigError for names that are no checks of OPTIONAL."""
    faults = []
    for name in names:
        faults += choice_faults("without", name, OPTIONAL)
    if faults:
        raise ConfigError(*faults)
