"""A byte-level Llama-style decoder of 1.7 M parameters, trained on Python's standard library."""

import sysconfig

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.train.steps = 600
    config.train.global_batch = 16
    config.train.log_every = 25
    config.model.num_layers = 4
    config.model.d_model = 192
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.d_ff = 512
    config.data.path = sysconfig.get_paths()["stdlib"]
    config.data.pattern = "*.py"
    config.data.exclude = ("site-packages", "dist-packages")
    config.data.seq_len = 128
    config.optim.learning_rate = 3e-3
    config.optim.warmup_steps = 50
    config.eval.every = 200
    config.eval.batches = 16
    config.checkpoint.every = 200
    return config
