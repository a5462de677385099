"""Configs of runs of seconds."""

from meshtrain.configs import default


def tiny_config():
    config = default.get_config()
    config.train.steps = 3
    config.train.global_batch = 16
    config.train.log_every = 1
    config.model.num_layers = 2
    config.model.d_model = 32
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.d_ff = 64
    config.model.vocab_size = 64
    config.model.max_seq_len = 16
    config.data.build = "meshtrain.data.synthetic:build"
    config.data.seq_len = 16
    config.optim.warmup_steps = 0
    config.eval.batches = 1
    return config


# A layout of `meshtrain verify`, for tests that change single entries.
LAYOUT = {
    "data": 2,
    "fsdp": 2,
    "tensor": 2,
    "zero_stage": 2,
    "num_microbatches": 2,
    "remat": "full",
}
LAYOUT |= {"packing": False, "masks": False, "sequence_parallel": False}
GPT2 = dict(
    norm="layer", positions="learned", mlp="gelu", bias=True, tie_embeddings=True, z_loss=1e-3
)


def packed(**model):
    """Returns a tiny config with packed rows: positions, segments and uneven token weights."""
    c = tiny_config()
    c.model.update(model)
    c.data.separator = 7
    c.optim.epsilon = 1e-6  # Adam divides by it where the gradient is zero
    return c


def quick(**train):
    """Returns a config whose learning rate does not depend on train.steps."""
    c = tiny_config()
    c.optim.schedule, c.optim.learning_rate = "constant", 1e-2
    c.eval.batches = 0
    c.train.update(train)
    return c
