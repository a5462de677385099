"""Qwen 3 30B-A3B (arXiv 2505.09388), for 4 hosts of 8 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/qwen3_moe-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/qwen3_moe --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/qwen3_moe.py --workdir=runs/qwen3_moe \\
      --config.checkpoint.init_from=runs/qwen3_moe-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Parameters, gradients and both moments in float32 are 489 GB in all, sharded over 32 GPUs.
Sized by `meshtrain audit --config=qwen3_moe --target=h100:4x8`: the compiled step needs 25.8 of 80
GB on each GPU, and its MFU is at most 21.3 % by the audit's rule, for balanced routing (a ceiling,
not a measurement). The tests check its parameter count, and compare a tiny model of the family with
transformers; it was not trained at this size.
"""

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.mesh.data = 1
    config.mesh.fsdp = -1
    config.mesh.expert = 8
    config.train.remat = "full"
    config.train.steps = 10000
    config.train.global_batch = 64
    config.train.num_microbatches = 1
    config.train.dtype = "bfloat16"
    config.model.num_layers = 48
    config.model.d_model = 2048
    config.model.num_heads = 32
    config.model.num_kv_heads = 4
    config.model.head_dim = 128
    config.model.d_ff = 6144
    config.model.vocab_size = 151936
    config.model.max_seq_len = 40960
    config.model.norm_epsilon = 1e-06
    config.model.rope_theta = 1000000.0
    config.model.num_experts = 128
    config.model.experts_per_token = 8
    config.model.d_expert = 768
    config.model.balance_weight = 0.001
    config.model.qk_norm = True
    config.data.path = "data/qwen3_moe"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
