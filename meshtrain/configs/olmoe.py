"""OLMoE 1B-7B (0924) (arXiv 2409.02060), for one host of 8 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/olmoe-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/olmoe --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/olmoe.py --workdir=runs/olmoe \\
      --config.checkpoint.init_from=runs/olmoe-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Parameters, gradients and both moments in float32 are 111 GB in all, sharded over 8 GPUs.
Sized by `meshtrain audit --config=olmoe --target=h100:8`: the compiled step needs 32.8 of 80 GB on
each GPU, and its MFU is at most 34.0 % by the audit's rule, for balanced routing (a ceiling, not a
measurement). The tests check its parameter count, and compare a tiny model of the family with
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
    config.model.num_layers = 16
    config.model.d_model = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.d_ff = 1024
    config.model.vocab_size = 50304
    config.model.max_seq_len = 4096
    config.model.num_experts = 64
    config.model.experts_per_token = 8
    config.model.router = "softmax"
    config.model.balance_weight = 0.01
    config.model.router_z_loss = 0.001
    config.model.qk_norm = True
    config.model.qk_norm_heads = "all"
    config.data.path = "data/olmoe"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 4e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
