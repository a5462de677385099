"""meshtrain: train language models (and other Flax models) on one mesh of devices, small or large."""

from meshtrain.config import ConfigError
from meshtrain.config import load as load_config
from meshtrain.data.source import Batch, Source
from meshtrain.metrics import Metrics, weighted
from meshtrain.models.base import Model, from_linen, from_nnx
from meshtrain.train import Result, train

__version__ = "0.1.0"
__all__ = [
    "Batch",
    "ConfigError",
    "Metrics",
    "Model",
    "Result",
    "Source",
    "from_linen",
    "from_nnx",
    "load_config",
    "train",
    "weighted",
]
