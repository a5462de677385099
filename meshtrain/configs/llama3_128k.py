"""Llama 3.1 8B (arXiv 2407.21783) on sequences of 131,072 tokens, for 8 GPUs with 141 GB each.

  meshtrain prepare my_books/ --output=data/llama3 --tokenizer=MODEL_FOLDER
  meshtrain train --config=configs/llama3_128k.py --workdir=runs/llama3-128k \\
      --config.checkpoint.init_from=runs/llama3

`init_from` is a run or a converted model, see configs/llama3.py. Each sequence is split over all 8
GPUs; its attention is computed with `context.method` "ulysses": fused kernels, each for some of the
heads. Sized by `meshtrain audit --config=llama3_128k --target=h200:8`: the compiled step needs 32.5
of 141 GB on each GPU, and its MFU is at most 56.5 % by the audit's rule (a ceiling, not a
measurement). It was not trained at this size.
"""

from meshtrain.configs import llama3


def get_config():
    config = llama3.get_config()
    config.mesh.fsdp = 1
    config.mesh.context = -1
    config.train.steps = 1000
    config.train.global_batch = 8
    config.train.num_microbatches = 8
    config.data.seq_len = 131072
    config.optim.learning_rate = 2e-5
    config.optim.warmup_steps = 50
    return config
