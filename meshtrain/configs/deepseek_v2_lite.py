"""DeepSeek-V2-Lite (arXiv 2405.04434), 15.7B parameters, for 2 hosts of 8 GPUs with 80 GB.

A token uses 2.7B of the parameters.

  meshtrain convert MODEL_FOLDER runs/deepseek_v2_lite-start  # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/deepseek_v2_lite --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/deepseek_v2_lite.py --workdir=runs/deepseek_v2_lite \\
      --config.checkpoint.init_from=runs/deepseek_v2_lite-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Parameters, gradients and both moments in float32 are 251 GB in all, sharded over 16 GPUs.
The tests check its parameter count, and compare tiny models of the family with transformers; it was
not trained at this size, and no audit of it was recorded.
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
    config.model.num_layers = 27
    config.model.d_model = 2048
    config.model.num_heads = 16
    config.model.num_kv_heads = 16
    config.model.head_dim = 128
    config.model.kv_lora_rank = 512
    config.model.rope_head_dim = 64
    config.model.v_head_dim = 128
    config.model.d_ff = 10944
    config.model.vocab_size = 102400
    config.model.max_seq_len = 163840
    config.model.norm_epsilon = 1e-06
    # Scores are divided by sqrt(128 + 64), and multiplied by the square of YaRN's 0.1 x 0.707
    # ln(40) + 1.
    config.model.query_scale = 0.1147213867929261
    config.model.rope_scaling = ("yarn", 40.0, 32.0, 1.0, 4096.0, 1.0, True)
    config.model.num_experts = 64
    config.model.experts_per_token = 6
    config.model.d_expert = 1408
    config.model.num_shared_experts = 2
    config.model.first_dense_layers = 1
    config.model.router = "softmax"
    config.model.balance = "sequence"
    config.model.balance_weight = 0.001
    config.data.path = "data/deepseek_v2_lite"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 4.2e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
