"""Mixtral 8x7B v0.1 (arXiv 2401.04088), for 4 hosts of 8 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/mixtral-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/mixtral --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/mixtral.py --workdir=runs/mixtral \\
      --config.checkpoint.init_from=runs/mixtral-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Parameters, gradients and both moments in float32 are 747 GB in all, sharded over 32 GPUs.
Sized by `meshtrain audit --config=mixtral --target=h100:4x8`: the compiled step needs 36.9 of 80 GB
on each GPU, and its MFU is at most 34.8 % by the audit's rule, for balanced routing (a ceiling, not
a measurement). The tests check its parameter count, and compare a tiny model of the family with
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
    config.model.num_layers = 32
    config.model.d_model = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.d_ff = 14336
    config.model.vocab_size = 32000
    config.model.max_seq_len = 32768
    config.model.rope_theta = 1000000.0
    config.model.num_experts = 8
    config.model.experts_per_token = 2
    config.model.balance_weight = 0.02
    config.data.path = "data/mixtral"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
