"""Gemma 2 2B (arXiv 2408.00118), for 2 GPUs with 80 GB each.

  meshtrain convert MODEL_FOLDER runs/gemma2-start          # if you have Hugging Face's files
  meshtrain prepare my_text/ --output=data/gemma2 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/gemma2.py --workdir=runs/gemma2 \\
      --config.checkpoint.init_from=runs/gemma2-start --config.optim.learning_rate=2e-5

Without `init_from` it trains from random parameters, with the learning rate below.
Sized by `meshtrain audit --config=gemma2 --target=h100:2`: the compiled step needs 42.7 of 80 GB on
each GPU. Its attention is blockwise, with loops whose length the program does not say, so the audit
has no ceiling of MFU. On CPU, which has no fused attention, the step needs more memory.
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
    config.model.d_model = 2304
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.head_dim = 256
    config.model.d_ff = 9216
    config.model.vocab_size = 256000
    config.model.max_seq_len = 8192
    config.model.norm = "rms_1p"
    config.model.norm_epsilon = 1e-6
    config.model.mlp = "geglu"
    config.model.post_norm = True
    config.model.attention = "lg"
    config.model.window = 4096
    config.model.query_scale = 256**-0.5
    config.model.attention_softcap = 50.0
    config.model.logit_softcap = 30.0
    config.model.embed_scale = 2304**0.5
    config.model.tie_embeddings = True
    config.data.path = "data/gemma2"
    config.data.packing = "best_fit"
    config.data.seq_len = 4096
    config.optim.learning_rate = 3e-4
    config.optim.warmup_steps = 200
    config.eval.every = 500
    config.checkpoint.every = 500
    return config
