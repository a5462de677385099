"""meshtrain: trains language models and other Flax models on one mesh of devices.

Names and modules are imported when they are first used, so that a command without devices does not
load jax.
"""

import importlib

from meshtrain import lazy, moved

__version__ = "0.1.0"
_MODULES = {
    "Batch": "data.source",
    "ConfigError": "errors",
    "Metrics": "metrics",
    "Model": "models.base",
    "Result": "train",
    "Source": "data.source",
    "dropout": "ops.dropout",
    "from_blocks": "models.from_modules",
    "from_linen": "models.from_modules",
    "from_nnx": "models.base",
    "initialize": "cluster.runtime",
    "launch": "supervise.launch",
    "load_config": "config.load",
    "plot": "tools.report.plot",
    "verify_loss": "tools.verify.loss",
    "weighted": "metrics",
}
__all__ = list(_MODULES)

moved.install()


def __getattr__(name: str):
    if name not in _MODULES:
        return lazy.load_module(__name__, name)
    module = importlib.import_module(f"{__name__}.{_MODULES[name]}")
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
