"""The default of every config key, and what the key means.

Other config files start from these and change some.
"""

from ml_collections import ConfigDict

from meshtrain.configs._sections import Section, Sections


def get_config() -> ConfigDict:
    config = Sections()

    # Number of devices along each axis of the mesh; one may be -1: all remaining devices.
    config.mesh = mesh = Section()
    # devices along `data`, which shards the rows of the batch and replicates parameters; -1: all
    # remaining devices
    mesh.data = -1
    # devices along `fsdp`, which shards the rows of the batch, and parameters, gradients and
    # optimizer state as far as train.zero_stage says; -1: all remaining devices
    mesh.fsdp = 1
    # devices along `expert`, which shards the experts of a mixture, and the batch; -1: all
    # remaining devices
    mesh.expert = 1
    # pipeline stages: consecutive groups of layers, through which micro-batches pass; -1: all
    # remaining devices
    mesh.pipeline = 1
    # devices along `context`, which shards sequences, and the state as fsdp does; -1: all remaining
    # devices
    mesh.context = 1
    # devices along `tensor`, which shards attention heads, feed-forward and vocabulary; -1: all
    # remaining devices
    mesh.tensor = 1
    # equal parts of `data` with a slow network between them: each TPU slice, or group of hosts,
    # holds one; 1: as many as there are TPU slices, else no parts
    mesh.slices = 1
    # whether `train` chooses the axes whose size is 1 or -1, train.zero_stage,
    # train.num_microbatches, train.remat, model.loss_chunk_mib and the pipeline's keys: the layout
    # that `meshtrain plan` predicts to be fastest on these devices
    mesh.auto = False

    # Sharding of each logical dim: (name, mesh axis or axes or None). For each dim of an array, the
    # rules with its name are tried in order. A rule applies if its axes shard no other dim of the
    # array yet, and their sizes divide the dim. If none applies, the dim is not sharded.
    config.rules = (
        ("batch", ("data", "fsdp", "expert")),
        # All pipeline stages share embedding and head.
        ("vocab", ("pipeline", "tensor")),
        ("vocab", "tensor"),
        ("heads", "tensor"),
        ("kv_heads", "tensor"),
        ("mlp", "tensor"),
        ("expert", ("expert", "tensor")),
        ("expert", "expert"),
        # Of parameters; in activations the same dim is called "residual".
        ("embed", ("fsdp", "context")),
        ("embed", "fsdp"),
        ("residual", None),
        ("residual_seq", "context"),  # between blocks
        ("seq", "context"),  # inside attention and feed-forward
        ("head_dim", None),
        ("layers", "pipeline"),
    )

    config.train = train = Section()
    train.steps = 1000  # total number of optimizer steps
    train.epochs = 0.0  # passes over the training data, which replace train.steps; 0: train.steps
    train.global_batch = 32  # sequences per step, over all devices and micro-batches
    # sequences of each step on each shard of the batch, which replace train.global_batch; 0:
    # train.global_batch
    train.batch_per_device = 0
    train.num_microbatches = 1  # number of micro-batches that a batch is split into, to save memory
    train.seed = 0  # seed of the initial parameters, the data order and dropout
    train.log_every = 10  # steps between log lines
    # what is sharded over fsdp and context: 0 nothing, 1 optimizer state, 2 gradients as well, 3
    # parameters as well
    train.zero_stage = 3
    # what the backward pass recomputes: "none"; "full", all activations inside a layer; "dots", all
    # but results of matrix products; "names:attention,mlp", all but the results with these names;
    # "offload", as "full", with the inputs of the layers in the host's memory; and
    # "offload:attention,layer_input", all but the results with these names, in the host's memory
    train.remat = "none"
    # largest number of layers per iteration of the loop over layers, if train.remat is "none"; GPU,
    # TPU: all or 1
    train.unroll = 12
    # sets of compiler options, with commas between: "none"; "overlap", collectives overlap with
    # computation, and XLA computes nothing again by itself to save memory; "cublas": cuBLAS
    # computes the products, with bias and activation, and Triton none; "cuda_graphs"; "auto": on
    # GPUs "cublas", or what meshtrain/hardware.toml says of the GPU, on several also "overlap",
    # otherwise "none"
    train.xla_preset = "auto"
    # formulas of norms, feed-forward and loss: "plain"; "fused", which have derivatives of their
    # own, read less memory and keep more; "pallas", the fused ones, with kernels written by hand
    # for the loss and the backward pass of norms (NVIDIA GPUs; CPUs interpret them, slowly);
    # "auto": "fused" on GPUs, otherwise "plain"
    train.kernels = "auto"
    # compute dtype: "float32", "bfloat16", "float64", or "float16", which scales the loss
    # dynamically and skips steps whose gradients overflow
    train.dtype = "float32"
    # dtype of the parameters: "float32", "float64", or "bfloat16", which loses small updates
    train.param_dtype = "float32"

    # patterns, separated by commas, of the parameters that are trained, such as
    # "layers/attention/*,output/*"; others keep their values, and have no gradients and no
    # optimizer state. With adapter.rank: in addition to the adapter
    train.trainable = "*"

    # Used if mesh.pipeline is more than 1.
    config.pipeline = pipeline = Section()
    # pipeline schedule: "gpipe", "1f1b" or "interleaved"; `meshtrain schedule` prints them
    pipeline.schedule = "1f1b"
    # chunks of layers per stage: consecutive chunks are on consecutive stages; more than 1 only
    # with schedule "interleaved"
    pipeline.num_chunks = 1
    # what a chunk stores for its backward pass: "inputs", its input, from which the forward pass is
    # recomputed; "residuals", everything that the backward pass needs, so that nothing is
    # recomputed
    pipeline.keep = "inputs"

    # Used if mesh.context is more than 1.
    config.context = context = Section()
    # how devices that hold parts of a sequence compute its attention: "ring", keys and values
    # travel from device to device; "gather", they are gathered once per layer; "ulysses", an
    # all-to-all exchanges parts of the sequence for heads, which mesh.context x mesh.tensor must
    # divide; "auto", ulysses where the heads divide and there is a fused kernel or it sends less,
    # else ring with a fused kernel; without one gather, or ring between hosts. All three call
    # cuDNN's kernels where they can
    context.method = "auto"

    # Used if the model has experts; the method, if mesh.expert is more than 1.
    config.expert = expert = Section()
    # how tokens reach the devices that hold their experts: "gather", each device gets all tokens of
    # its group; "dispatch", each token is sent only where its experts are, in further rounds if
    # they are used unequally; "auto", dispatch where it sends clearly fewer bytes
    expert.method = "auto"
    # how a device multiplies the rows of its experts: "batched", equal shares as one batch of
    # products, what is left in blocks; "grouped", groups of any size in one kernel: megablox on
    # TPUs, Mosaic GPU on Hopper GPUs, there in 16 bits and for dims that are multiples of 64;
    # "auto", batched: no grouped kernel was measured yet
    expert.kernel = "auto"

    # Used if several devices along data, or along fsdp at ZeRO stage 0 or 1, have gradients to add.
    config.sync = sync = Section()
    # what gradients are sent as: "float32", nothing is lost; "bfloat16"; "int8" or "int4", integers
    # with a scale for each block of elements. For slow networks
    sync.dtype = "float32"
    sync.block_size = 256  # elements that share a scale
    # parameters with such a name in their path are sent as float32
    sync.uncompressed = ("scale", "bias")
    # whether what a step loses is added to the gradients of the next: "on"; "off", int4 is then
    # rounded stochastically; "auto", for int4
    sync.feedback = "auto"
    # who sends to whom: "xla", one collective; "hierarchical", first inside each host or slice,
    # then between them, where alone sync.dtype applies; "ring" and "tree", from device to device,
    # in float32
    sync.pattern = "xla"

    config.model = model = Section()
    # function, "package.module:name", that builds a Model from the keys below
    model.build = "meshtrain.models.transformer:build"
    model.num_layers = 4  # number of transformer blocks
    model.d_model = 256  # width of the residual stream
    model.num_heads = 8  # number of query heads
    # number of key/value heads; fewer than num_heads: grouped-query attention
    model.num_kv_heads = 8
    model.head_dim = 0  # width of a head; 0: d_model / num_heads
    # dims of the latent vector from which latent attention computes the keys and values of all
    # heads (DeepSeek-V2); model.head_dim is then the part of queries and keys without rope
    # (qk_nope_head_dim); 0: ordinary attention
    model.kv_lora_rank = 0
    # dims of the latent vector of queries; 0: they are computed from the input
    model.q_lora_rank = 0
    # dims with rope of each query head, and of the key that all heads share (qk_rope_head_dim)
    model.rope_head_dim = 0
    model.v_head_dim = 0  # width of the values of a head; 0: as model.head_dim
    model.d_ff = 768  # width of the feed-forward layer
    model.vocab_size = 256  # number of tokens in the vocabulary; 256 for bytes
    model.max_seq_len = 256  # rows of the position table; used if model.positions is "learned"
    model.norm = "rms"  # normalization: "rms", "layer", or "rms_1p", RMSNorm times 1 + scale
    model.norm_epsilon = 1e-5  # epsilon added to the variance in the norms
    model.positions = "rope"  # position encoding: "rope" or "learned"
    # pattern of the layers with rope, repeated over the layers: "r" has rope, "n" has no positions
    # at all (NoPE), as in "r" or "rrrn" (SmolLM3)
    model.rope_layers = "r"
    model.rope_theta = 10000.0  # base of the rope frequencies; larger for longer sequences
    # base of the rope frequencies in local layers, to which rope_scaling does not apply; 0: as in
    # global layers
    model.rope_theta_local = 0.0
    # scaling of the rope frequencies: () for none, or a kind ("linear", "llama3", "yarn",
    # "dynamic", "longrope") and its values, such as ("linear", FACTOR); meshtrain/models/rope.py
    # documents them
    model.rope_scaling = ()
    # fraction of the dims of a head that rope rotates, the first ones: 0.5 of GLM, 0.25 of StableLM
    model.rope_fraction = 1.0
    # whether rope rotates adjacent dims (2 k, 2 k + 1), as in GLM and ERNIE, instead of
    # (k, k + K / 2); latent attention always does
    model.rope_interleaved = False
    # feed-forward layer: "swiglu", "gelu", "geglu", or "clamped_swiglu" (gpt-oss), which is
    # (up + 1) gate sigmoid(glu_slope gate) after up is clamped to at most glu_limit and at least
    # -glu_limit, and gate to at most glu_limit
    model.mlp = "swiglu"
    model.glu_limit = 7.0  # limit of "clamped_swiglu"
    model.glu_slope = 1.702  # factor in the sigmoid of "clamped_swiglu"
    # routed experts of a layer, of which a token uses model.experts_per_token; 0: one feed-forward
    # layer for all tokens
    model.num_experts = 0
    model.experts_per_token = 2  # routed experts that a token uses
    model.d_expert = 0  # width of the feed-forward of an expert; 0: d_ff
    model.num_shared_experts = 0  # experts that all tokens use, in addition
    # width of the feed-forward of all shared experts together; 0: num_shared_experts x d_expert
    model.d_shared = 0
    # whether the output of the shared experts is multiplied by a sigmoid of the token's own
    # (Qwen2-MoE)
    model.shared_gate = False
    model.first_dense_layers = 0  # layers at the start without experts, of width d_ff
    # weights of the experts: "topk_softmax", softmax over the chosen ones (Mixtral); "softmax",
    # over all experts; "sigmoid", sigmoids, divided by the sum of the chosen ones (DeepSeek-V3)
    model.router = "topk_softmax"
    model.router_scale = 1.0  # factor of these weights
    # (GROUPS, GROUPS_PER_TOKEN): a token chooses among the experts of the best groups; (): among
    # all
    model.expert_groups = ()
    # assignments that an expert accepts from a row, relative to an equal share; others are dropped;
    # 0: never
    model.capacity_factor = 0.0
    # what balances the load: "batch", a loss with the load of the last global batch (Switch);
    # "sequence", with the load of the document; "bias", a bias in the choice of experts, without
    # loss (DeepSeek-V3); "none"
    model.balance = "batch"
    # weight of the balance loss of a layer, which is 1 if all experts are used equally; of balance
    # "bias", the step of the bias
    model.balance_weight = 0.01
    model.router_z_loss = 0.0  # weight of logsumexp(router logits)^2 in the loss
    model.bias = False  # whether linear layers and LayerNorm have biases
    model.norm_bias = False  # whether LayerNorm has biases, also where linear layers have none
    model.qkv_bias = False  # whether the query, key and value projections have biases
    model.out_bias = False  # whether the output projection of attention has a bias
    model.expert_bias = False  # whether the router and the experts have biases (gpt-oss)
    model.qk_norm = False  # whether queries and keys are normalized
    # heads that model.qk_norm normalizes together: "each", by itself (Qwen 3), or "all" (OLMoE)
    model.qk_norm_heads = "each"
    model.pre_norm = True  # whether the inputs of attention and feed-forward are normalized
    # whether their outputs are normalized: in addition (Gemma 2), or instead (OLMo 2)
    model.post_norm = False
    # pattern of layer kinds, repeated over the layers: "g" is global attention, "l" local attention
    # to the last model.window tokens, as in "g" or "lllllg"
    model.attention = "g"
    model.window = 0  # number of tokens that a local layer attends to, the current one included
    # probability of dropout as in GPT-2: after the embedding, of attention probabilities, and after
    # attention and feed-forward; the same on every mesh and schedule. In training only
    model.dropout = 0.0
    model.query_scale = 0.0  # factor of the attention scores; 0: 1 / sqrt(head dim)
    # factor of the logarithm by which queries grow with their position p, so that attention stays
    # sharp in long rows (Ministral 3): 1 + query_growth log(1 + floor(p / query_growth_length));
    # 0: queries do not grow
    model.query_growth = 0.0
    model.query_growth_length = 8192  # number of first positions whose queries do not grow
    model.attention_softcap = 0.0  # soft cap c of attention scores: c tanh(score / c); 0: none
    # whether each head has a learned logit in the denominator of its softmax, an attention sink
    # (gpt-oss): a query can attend to nothing
    model.attention_sinks = False
    model.logit_softcap = 0.0  # soft cap c of the logits: c tanh(logit / c); 0: none
    model.logit_scale = 1.0  # factor of the logits, before their soft cap
    model.embed_scale = 1.0  # factor of the token embeddings
    # factor of the outputs of attention and feed-forward, before they are added to the residual
    # stream (Granite)
    model.branch_scale = 1.0
    model.tie_embeddings = False  # whether the output head is the embedding table
    model.z_loss = 0.0  # weight of logsumexp(logits)^2 in the loss; 1e-4 if the logits drift
    # implementation of attention: "xla"; "cudnn", fused, on NVIDIA GPUs; "blockwise", whose memory
    # is linear in seq_len; "auto" chooses one and logs which; "xla:N" and "blockwise:N" compute
    # blocks of N tokens; "emulated", of tests: where sequences are sharded, cuDNN's calls in plain
    # JAX
    model.attention_impl = "auto"
    # MiB of logits that a device holds at a time while it computes the loss; 0 or float16: all at
    # once. Small chunks are slow on GPU: each reads and writes the gradient of the output head
    model.loss_chunk_mib = 2048.0

    config.data = data = Section()
    # function, "package.module:name", that builds a Source from the keys below and the name of the
    # split
    data.build = "meshtrain.data.tokens:build"
    # path of a folder from `meshtrain prepare`, on a disk or as s3://BUCKET/FOLDER or
    # gs://BUCKET/FOLDER, of a token file, or of a folder of text
    data.path = ""
    # GB of data on object stores that are cached on the local disk, for all processes of the host
    # and later runs; at most half of the free space is used. 0: nothing is cached
    data.cache_gb = 100.0
    # weighted mixture, (("PATH", WEIGHT), ...), instead of data.path: samples are drawn in
    # proportion to WEIGHT
    data.mixture = ()
    # mixtures one after the other, ((LENGTH, MIXTURE), ...), instead of data.mixture: LENGTH is an
    # integer of steps or a fraction of the run, and the last one lasts to its end; MIXTURE is as
    # data.mixture, or a path. On resume, phases ahead may be changed
    data.phases = ()
    # what the weights of a mixture are shares of: "tokens", or "documents"
    data.weights = "tokens"
    # most passes over each path of the data: a run that would read one more often is rejected;
    # 0: any number
    data.max_epochs = 0.0
    # tokenizer of data.build=meshtrain.data.rows:build: "bytes", a file or a folder; of
    # data.build=meshtrain.data.chat:build: the folder of a Hugging Face model with a chat template
    data.tokenizer_path = ""
    data.field = "text"  # column with the text of a row (meshtrain.data.rows:build)
    # text made of several columns, instead of data.field: "{question}\n{answer}"
    data.template = ""
    # what is learned of a conversation (meshtrain.data.chat:build): "replies" of the assistant, its
    # "last_reply", or "all" of the text
    data.learned = "replies"
    # processes that read and tokenize rows and conversations; 0: the process that trains
    data.num_workers = 2
    # folder for what is computed once from rows and conversations, such as the lengths of all rows;
    # "": .meshtrain next to the data, else the user's cache
    data.index_path = ""
    # how rows are filled: "windows", the stream of tokens is split every seq_len tokens;
    # "best_fit", rows hold complete documents, and only documents longer than seq_len are split
    data.packing = "windows"
    # whether windows see the documents in a new order in each epoch, shuffled among neighbours
    data.shuffle_documents = False
    # dtype of a raw token file: "uint8", "uint16" (nanoGPT's .bin), "uint32" or "int32"; "": bytes,
    # which is an error if vocab_size is above 256 or the bytes look like wider numbers
    data.dtype = ""
    data.pattern = "*.txt"  # pattern of the file names to read in a folder of text
    data.exclude = ()  # names of subfolders to skip in a folder of text
    data.seq_len = 256  # tokens per sequence
    # size of the vocabulary: every token must be below it; default: model.vocab_size
    data.vocab_size = model.get_oneway_ref("vocab_size")
    # token that ends a document, which attention does not cross, in addition to the documents that
    # the files mark; -1: none. A raw file marks none: without a separator it is one stream
    data.separator = -1
    # whether an iterable that is passed to train() yields, on each process, the rows of this
    # process alone
    data.per_process = False
    data.heldout = 0.05  # fraction of the data that is held out for evaluation
    data.heldout_path = ""  # other data that is held out instead, in any format of data.path
    # share of the documents in training rows that are written for filling in the middle
    data.fim_rate = 0.0
    data.fim_spm_rate = 0.5  # share of these that are written as suffix, prefix, middle
    # the tokens before prefix, suffix and middle, as ids or texts; (): the tokenizer has them under
    # a name that is known
    data.fim_tokens = ()
    data.seed = train.get_oneway_ref("seed")  # seed of the sample order; default: train.seed

    config.optim = optim = Section()
    # function, "package.module:name", that builds an optax optimizer from the keys that the trainer
    # does not use itself: b1, b2, epsilon, weight_decay and no_decay, or the keys of your own
    # function; also of the package: "meshtrain.optim.muon:muon", "...:adafactor", "...:lion" and
    # "...:schedule_free_adamw"
    optim.build = "meshtrain.optim.base:adamw"
    optim.learning_rate = 3e-4  # peak learning rate
    optim.schedule = "cosine"  # learning-rate schedule: "constant", "cosine", "linear" or "wsd"
    optim.warmup_steps = 100  # steps of linear warm-up to learning_rate
    optim.decay_fraction = 0.2  # fraction of the steps, at the end, in which "wsd" decays
    optim.final_fraction = 0.1  # final learning rate, as a fraction of learning_rate
    # largest global norm of the gradients: larger gradients are scaled down to it; inf: no limit
    optim.clip_norm = 1.0
    # dtype of the optimizer's moments: "float32", "float64", or "bfloat16", which takes half the
    # memory of float32 and is rounded stochastically; default: train.param_dtype
    optim.moment_dtype = train.get_oneway_ref("param_dtype")
    # whether the moments, the arrays of the optimizer that have the shape of their parameter, are
    # in the host's memory between updates; each update copies them to the device and back
    optim.offload = False
    optim.b1 = 0.9  # decay rate of the first moment
    optim.b2 = 0.95  # decay rate of the second moment
    optim.epsilon = 1e-8  # epsilon added to the square root of the second moment
    optim.weight_decay = 0.1  # weight decay, which is multiplied by the learning rate (AdamW)
    optim.no_decay = ("bias", "scale")  # names of parameters without weight decay

    # Used if adapter.rank is more than 0: LoRA (arXiv 2106.09685).
    config.adapter = adapter = Section()
    adapter.rank = 0  # rank of the update A B of the kernels of linear layers; 0: no adapter
    adapter.alpha = 16.0  # the update is multiplied by alpha / rank
    # whether it is multiplied by alpha / sqrt(rank) instead (rsLoRA, arXiv 2312.03732)
    adapter.rslora = False
    # patterns of the linear layers that get an update, such as ("layers/attention/query",
    # "layers/attention/value")
    adapter.targets = ("layers/*",)
    # whether the kernels of routed experts that adapter.targets match get an update too, one for
    # each expert
    adapter.experts = False
    adapter.dropout = 0.0  # probability of dropout of the input of A, in training only
    # folder of an adapter in the layout of PEFT, with which a new run begins; with adapter.rank=0
    # rank, alpha, rslora, dropout, targets and experts come from the folder too; "": none
    adapter.init_from = ""

    config.eval = evaluation = Section()
    evaluation.every = 0  # steps between evaluations; 0: only at the end
    # batches per evaluation, global_batch held-out sequences each; 0: no evaluation
    evaluation.batches = 8
    # tokens between the beginnings of two held-out windows, fewer than data.seq_len:
    # windows overlap, each token counts once, also in the last partial window; 0: windows do not
    # overlap, and the last partial one does not count
    evaluation.stride = 0
    # tasks of lm-evaluation-harness, groups and tags of them, or YAML files, separated by commas,
    # as `meshtrain evaluate --tasks` has them; needs the extra `evals`; "": none
    evaluation.tasks = ""
    evaluation.tasks_every = 0  # steps between evaluations of the tasks; 0: only at the end
    evaluation.tasks_path = ""  # folder with tasks of your own in YAML files; "": none
    # questions of each task: the first N, or below 1 this share of them; 0: all
    evaluation.tasks_limit = 0.0
    evaluation.tasks_fewshot = -1  # examples in front of each question; -1: as the task says
    # whether questions and examples are written as messages, by the tokenizer's chat template
    evaluation.tasks_chat_template = False

    config.checkpoint = checkpoint = Section()
    checkpoint.every = 0  # steps between saves; 0: only at the end
    # minutes between saves, in addition to `every`; 0: by steps only
    checkpoint.every_minutes = 0.0
    checkpoint.keep_last = 2  # number of newest checkpoints to keep
    checkpoint.keep_every = 0  # checkpoints whose step is a multiple of this are kept too; 0: none
    checkpoint.keep_best = 0  # number of checkpoints with the lowest best_by that are kept too
    # metric for keep_best: "eval_loss" (only checkpoints of steps with an evaluation have it),
    # "loss" or "grad_norm"
    checkpoint.best_by = "eval_loss"
    # whether to resume from arrays of another dtype, cast to the present one, which may lose
    # precision
    checkpoint.allow_cast = False
    # keys, separated by commas, that may change when a run resumes although they define the model,
    # the data or the tokenizer, such as "model.rope_theta,data,tokenizer"
    checkpoint.allow_change = ""
    # workdir of another run, one of its checkpoints, or a Hugging Face folder, from which a new run
    # takes its parameters; "": none. With a larger model.vocab_size, new tokens begin as the mean
    # of the old ones
    checkpoint.init_from = ""
    # patterns, separated by commas, of the parameters to take from init_from, such as
    # "layers/*,tokens/*"; all others are initialized
    checkpoint.init_only = "*"
    # format in which the run also writes its model to WORKDIR/model/STEP, in the background: "hf",
    # a Hugging Face folder; "": none. At the end of the run, and after every export_every steps
    checkpoint.export = ""
    # steps between exports, each of which needs a checkpoint and saves one; 0: only at the end
    checkpoint.export_every = 0

    config.divergence = divergence = Section()
    # limit of consecutive steps whose loss or gradient is not finite: each is skipped, and at the
    # limit the run ends with exit code 17
    divergence.max_skips = 25
    # standard deviations, each at least 1 % of the mean, above the running mean beyond which a loss
    # is logged as a spike; never in the first 50 steps; inf: never
    divergence.spike_sigmas = 8.0
    # whether the run, after a spike, returns to the newest checkpoint and skips the data since then
    divergence.rollback = False

    config.health = health = Section()
    # steps between checks that all replicas of the state are identical and that no process is slow;
    # replicas are also checked before each save; 0: never
    health.every = 500

    config.monitor = monitor = Section()
    # whether the rows of metrics.jsonl are also written to WORKDIR/tensorboard; needs the extra
    # `tensorboard`
    monitor.tensorboard = False
    # project of Weights & Biases to which they are also sent; needs the extra `wandb`; "": none
    monitor.wandb = ""
    # number of steps after which each process writes what its devices hold, in the format of pprof,
    # to WORKDIR/memory/STEP/rank-N.pprof; 0: never
    monitor.memory_profile_step = 0

    config.hardware = hardware = Section()
    # peak FLOP/s of a device, by which the MFU divides; 0: the dense bfloat16 peak by the device's
    # name, as in meshtrain/hardware.toml
    hardware.peak_flops = 0.0

    return config.lock()
