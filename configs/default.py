"""Every key of a config, with what it means. The other files change some and keep the rest."""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()

    # Number of devices along each axis of the mesh; one may be -1: all that are left.
    config.mesh = mesh = ConfigDict()
    mesh.data = -1  # rows of the batch; parameters are whole on each
    mesh.fsdp = 1  # rows of the batch; parameters, gradients and optimizer state are cut up
    mesh.expert = 1  # for mixtures of experts; not in this version
    mesh.pipeline = 1  # stages: groups of layers, which micro-batches pass through
    mesh.context = 1  # positions in the sequence; not in this version
    mesh.tensor = 1  # heads, feed-forward and vocabulary

    # Where each logical dim lives: (name, mesh axis or axes or None). The first line that fits wins:
    # its axes are still free in that array, and divide the dim. No line fits: the dim is whole.
    config.rules = (
        ("batch", ("data", "fsdp")),
        ("vocab", ("pipeline", "tensor")),  # embedding and head are no stage's: all have a share
        ("vocab", "tensor"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("embed", "fsdp"),  # of parameters; in activations the same dim is called "residual"
        ("residual", None),
        ("residual_seq", "context"),  # between blocks
        ("seq", "context"),  # inside attention and feed-forward
        ("head_dim", None),
        ("layers", "pipeline"),
    )

    config.train = train = ConfigDict()
    train.steps = 1000  # optimizer steps in all
    train.global_batch = 32  # sequences per step, over all devices and micro-batches
    train.num_microbatches = 1  # the batch is worked off in so many parts, to save memory
    train.seed = 0  # of parameters, data order and dropout
    train.log_every = 10  # steps between lines
    train.zero_stage = 3  # fsdp cuts: 0 nothing, 1 optimizer state, 2 + gradients, 3 + parameters
    train.remat = "none"  # recomputed in the backward pass: "none", "full", all but "dots", or all
    # but results kept by name: "names:attention,mlp"
    train.unroll = 8  # at most so many layers in one turn of the loop over them, if remat is none
    train.xla_preset = "auto"  # options of the compiler: "none", "overlap" (of collectives with
    # computation), "cuda_graphs"; "auto": overlap on several GPUs, else none
    train.dtype = "float32"  # to compute in: float32, bfloat16, float16 (its loss scale looks after
    # itself, steps that overflow are skipped), float64
    train.param_dtype = "float32"  # of parameters: float32, bfloat16 (loses small updates), float64

    config.pipeline = pipeline = ConfigDict()  # read where mesh.pipeline is more than 1
    pipeline.schedule = "1f1b"  # or "gpipe", "interleaved"; `meshtrain schedule` prints them
    pipeline.num_chunks = 1  # of layers on each stage, which takes turns; more: "interleaved"
    pipeline.keep = "inputs"  # of a chunk until its backward, which runs it again; or "residuals":
    # all that the backward needs, so that nothing is run twice

    config.model = model = ConfigDict()
    model.build = "meshtrain.models.transformer:build"  # of the keys below: a Model
    model.num_layers = 4  # blocks
    model.d_model = 256  # width of the residual stream
    model.num_heads = 8  # of queries; d_model is cut up among them
    model.num_kv_heads = 8  # fewer than num_heads: grouped-query attention
    model.head_dim = 0  # width of a head; 0: d_model / num_heads
    model.d_ff = 768  # feed-forward width
    model.vocab_size = 256  # 256 for bytes
    model.max_seq_len = 256  # rows of the position table, where positions are learned
    model.norm = "rms"  # "rms", "layer", or "rms_1p", which multiplies by 1 + scale
    model.norm_epsilon = 1e-5  # added to the variance
    model.positions = "rope"  # "rope" or "learned"
    model.rope_theta = 10000.0  # base of rope's frequencies; larger for longer sequences
    model.rope_theta_local = 0.0  # that of local layers, which is not scaled; 0: as the others
    model.rope_scaling = ()  # ("linear", FACTOR) or ("llama3", FACTOR, LOW, HIGH, ORIGINAL_LENGTH)
    model.mlp = "swiglu"  # "swiglu", "gelu", or "geglu"
    model.bias = False  # in linear maps and LayerNorm
    model.qkv_bias = False  # in the maps to queries, keys and values alone
    model.qk_norm = False  # norms of each head's queries and keys
    model.post_norm = False  # norms also of what attention and feed-forward return
    model.attention = "g"  # kinds that layers take in turn: g sees all before, l the last `window`
    model.window = 0  # tokens that a local layer sees, the newest included
    model.query_scale = 0.0  # scores are multiplied by it; 0: 1 / sqrt(head dim)
    model.attention_softcap = 0.0  # scores become cap * tanh(score / cap); 0: they stay
    model.logit_softcap = 0.0  # the same of the logits
    model.embed_scale = 1.0  # embedded tokens are multiplied by it
    model.tie_embeddings = False  # the output head is the embedding table
    model.z_loss = 0.0  # weight of logsumexp(logits)^2, 1e-4 where logits drift
    model.attention_impl = "auto"  # how it is computed: "xla"; "cudnn", fused, on NVIDIA's GPUs;
    # "blockwise", in memory linear in seq_len; "auto" takes one and says which
    model.loss_chunk_mib = 256  # of logits that a device makes at a time, the rest after; 0, or
    # float16: all at once

    config.data = data = ConfigDict()
    data.build = "meshtrain.data.tokens:build"  # of the keys below and split: a Source
    data.path = ""  # what `meshtrain prepare` made, a token file, or a folder of text
    data.mixture = ()  # (("PATH", WEIGHT), ...) in place of path: samples of each by weight
    data.packing = "windows"  # the stream cut into rows; "best_fit": rows of whole documents
    data.dtype = "uint8"  # of a raw token file: uint8 (any text, as bytes), uint16, uint32, int32
    data.pattern = "*.txt"  # files of a folder
    data.exclude = ()  # names of folders to leave out
    data.seq_len = 256  # tokens a sequence
    data.vocab_size = model.get_oneway_ref("vocab_size")  # tokens must be below it
    data.separator = -1  # token that ends a document, which attention does not cross; -1: none
    data.heldout = 0.05  # fraction kept for evaluation
    data.seed = train.get_oneway_ref("seed")  # of the order of the samples

    config.optim = optim = ConfigDict()
    optim.build = "meshtrain.optim:adamw"  # of its keys below: an optax optimizer
    optim.learning_rate = 3e-4  # at its highest
    optim.schedule = "cosine"  # "constant", "cosine", "linear", "wsd"
    optim.warmup_steps = 100  # linearly up to learning_rate
    optim.decay_fraction = 0.2  # of the steps, at the end; for "wsd"
    optim.final_fraction = 0.1  # of learning_rate, where the schedule ends
    optim.clip_norm = 1.0  # of all gradients together
    optim.moment_dtype = train.get_oneway_ref("param_dtype")  # what the optimizer keeps of each
    # parameter: float32, bfloat16 (rounded by chance, half the memory), float64
    optim.b1 = 0.9  # decay of the first moment
    optim.b2 = 0.95  # decay of the second moment
    optim.epsilon = 1e-8  # added to the root of the second moment
    optim.weight_decay = 0.1  # times learning_rate, off every parameter but those of no_decay
    optim.no_decay = ("bias", "scale")  # parameters with these names are not decayed

    config.eval = evaluation = ConfigDict()
    evaluation.every = 0  # steps between evaluations; 0: only at the end
    evaluation.batches = 8  # of global_batch held-out sequences; 0: never

    config.checkpoint = checkpoint = ConfigDict()
    checkpoint.every = 0  # steps between saves; 0: only at the end
    checkpoint.every_minutes = 0.0  # between saves, whatever the steps; 0: by steps alone
    checkpoint.keep = 2  # the newest so many
    checkpoint.keep_every = 0  # and those whose step is a multiple of this; 0: none
    checkpoint.keep_best = 0  # and so many with the lowest best_by
    checkpoint.best_by = (
        "eval_loss"  # or "loss", "grad_norm"; of evaluations due in the step of a save
    )
    checkpoint.allow_cast = False  # goes on with arrays of another dtype, which loses precision
    checkpoint.init_from = ""  # another run's workdir, or one of its checkpoints: where a new run's
    # parameters come from
    checkpoint.init_only = "*"  # of them, patterns such as "layers/*,tokens/*"; others start anew

    config.divergence = divergence = ConfigDict()
    divergence.max_skips = (
        25  # steps in a row with a loss or gradient that is not finite, which have
    )
    # no effect, until the run ends with exit code 17
    divergence.spike = 8.0  # a loss so many standard deviations above the running mean is told
    divergence.rollback = False  # and undone: back to the newest checkpoint, past the data since

    config.health = health = ConfigDict()
    health.every = (
        500  # steps between checks that all copies of the state are the same, and that no
    )
    # process is slow; also before each save; 0: never

    return config.lock()
