"""meshtrain: language models and other Flax models, trained on one mesh of devices."""

from meshtrain.cluster.launch import launch
from meshtrain.config.files import load as load_config
from meshtrain.data.source import Batch, Source
from meshtrain.errors import ConfigError
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
    "launch",
    "load_config",
    "train",
    "weighted",
]
