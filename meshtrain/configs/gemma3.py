"""Gemma 3 1B (arXiv 2503.19786), for one GPU.

  meshtrain convert MODEL_FOLDER runs/gemma3-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/gemma3 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/gemma3.py --workdir=runs/gemma3 \\
      --config.checkpoint.init_from=runs/gemma3-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=gemma3 --target=h100:1`: the compiled step needs 23.2 of 80 GB,
and its MFU is at most 37.4 % by the audit's rule (a ceiling, not a measurement).
On CPU, which has no fused attention, the step needs more memory.
The tests check its parameter count, and compare a tiny model of the family with transformers; it
was not trained at this size.
"""

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.train.remat = "full"
    config.train.steps = 10000
    config.train.global_batch = 32
    config.train.num_microbatches = 4
    config.train.dtype = "bfloat16"
    config.model.num_layers = 26
    config.model.d_model = 1152
    config.model.num_heads = 4
    config.model.num_kv_heads = 1
    config.model.head_dim = 256
    config.model.d_ff = 6912
    config.model.vocab_size = 262144
    config.model.max_seq_len = 32768
    config.model.norm = "rms_1p"
    config.model.norm_epsilon = 1e-6
    config.model.rope_theta = 1000000.0
    config.model.rope_theta_local = 10000.0
    config.model.mlp = "geglu"
    config.model.qk_norm = True
    config.model.post_norm = True
    config.model.attention = "lllllg"
    config.model.window = 512
    config.model.query_scale = 256**-0.5
    config.model.embed_scale = 1152**0.5
    config.model.tie_embeddings = True
    config.data.path = "data/gemma3"
    config.data.packing = "best_fit"
    config.data.seq_len = 2048
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
