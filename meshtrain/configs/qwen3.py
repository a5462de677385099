"""Qwen 3 0.6B (arXiv 2505.09388), for one GPU.

  meshtrain convert MODEL_FOLDER runs/qwen3-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/qwen3 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/qwen3.py --workdir=runs/qwen3 \\
      --config.checkpoint.init_from=runs/qwen3-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=qwen3 --target=h100:1`: the compiled step needs 31.4 of 80 GB,
and its MFU is at most 45.3 % by the audit's rule (a ceiling, not a measurement).
On CPU, which has no fused attention, the step needs more memory.
The tests check its parameter count, and compare a tiny model of the family with transformers; it
was not trained at this size.
"""

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.train.steps = 10000
    config.train.global_batch = 32
    config.train.num_microbatches = 4
    config.train.dtype = "bfloat16"
    config.model.num_layers = 28
    config.model.d_model = 1024
    config.model.num_heads = 16
    config.model.num_kv_heads = 8
    config.model.head_dim = 128
    config.model.d_ff = 3072
    config.model.vocab_size = 151936
    config.model.max_seq_len = 40960
    config.model.norm_epsilon = 1e-6
    config.model.rope_theta = 1000000.0
    config.model.qk_norm = True
    config.model.tie_embeddings = True
    config.data.path = "data/qwen3"
    config.data.packing = "best_fit"
    config.data.seq_len = 2048
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
