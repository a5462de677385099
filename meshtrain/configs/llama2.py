"""Llama 2 7B (arXiv 2307.09288), for one host of 8 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/llama2-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/llama2 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/llama2.py --workdir=runs/llama2 \\
      --config.checkpoint.init_from=runs/llama2-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=llama2 --target=h100:8`: the compiled step needs 26.0 of 80 GB on
each GPU, and its MFU is at most 56.0 % by the audit's rule (a ceiling, not a measurement).
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
    config.train.num_microbatches = 2
    config.train.dtype = "bfloat16"
    config.model.num_layers = 32
    config.model.d_model = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 32
    config.model.d_ff = 11008
    config.model.vocab_size = 32000
    config.model.max_seq_len = 4096
    config.data.path = "data/llama2"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
