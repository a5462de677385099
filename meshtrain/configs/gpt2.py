"""GPT-2 small (124 M parameters; Radford et al., 2019), for one GPU.

  meshtrain convert MODEL_FOLDER runs/gpt2-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/gpt2 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/gpt2.py --workdir=runs/gpt2 \\
      --config.checkpoint.init_from=runs/gpt2-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=gpt2 --target=h100:1`: the compiled step needs 9.1 of 80 GB,
and its MFU is at most 49.9 % by the audit's rule (a ceiling, not a measurement).
On CPU, which has no fused attention, the step needs more memory.
The tests check its parameter count, and compare a tiny model of the family with transformers; it
was not trained at this size.
"""

from meshtrain.configs import default


def get_config():
    config = default.get_config()
    config.train.steps = 20000
    config.train.global_batch = 32
    config.train.num_microbatches = 1
    config.train.dtype = "bfloat16"
    config.model.num_layers = 12
    config.model.d_model = 768
    config.model.num_heads = 12
    config.model.num_kv_heads = 12
    config.model.d_ff = 3072
    config.model.vocab_size = 50257
    config.model.max_seq_len = 1024
    config.model.norm = "layer"
    config.model.positions = "learned"
    config.model.mlp = "gelu"
    config.model.bias = True
    config.model.tie_embeddings = True
    config.data.path = "data/gpt2"
    config.data.packing = "windows"  # as GPT-2 was trained: rows may begin within a document
    config.data.seq_len = 1024
    config.optim.learning_rate = 6e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
