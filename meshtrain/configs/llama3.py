"""Llama 3.1 8B (arXiv 2407.21783), for one host of 8 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/llama3-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/llama3 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/llama3.py --workdir=runs/llama3 \\
      --config.checkpoint.init_from=runs/llama3-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=llama3 --target=h100:8`: the compiled step needs 29.8 of 80 GB on
each GPU, and its MFU is at most 56.4 % by the audit's rule (a ceiling, not a measurement).
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
    config.train.global_batch = 64
    config.train.num_microbatches = 8
    config.train.dtype = "bfloat16"
    config.model.num_layers = 32
    config.model.d_model = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 8
    config.model.d_ff = 14336
    config.model.vocab_size = 128256
    config.model.max_seq_len = 131072
    config.model.rope_theta = 500000.0
    config.model.rope_scaling = ("llama3", 8.0, 1.0, 4.0, 8192)
    config.data.path = "data/llama3"
    config.data.packing = "best_fit"
    config.data.seq_len = 8192
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
