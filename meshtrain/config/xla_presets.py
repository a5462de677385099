"""Compiler options for GPUs, by name of `train.xla_preset`."""

# Options of each preset. An option goes to the compiler by name, which rejects an unknown
# one with an error; in XLA_FLAGS an unknown option would abort the process.
PRESETS: dict[str, dict[str, bool | int | str]] = {
    "none": {},
    # Collectives run behind computation.
    "overlap": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_p2p": True,
    },
    # Kernels are started many at a time, as CUDA graphs.
    "cuda_graphs": {
        "xla_gpu_enable_command_buffer": "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN",
        "xla_gpu_graph_min_graph_size": 1,
    },
}
NAMES = ("auto", *PRESETS)
REMOVED_IN = {  # first jaxlib version whose XLA rejects the option
    "xla_gpu_enable_pipelined_all_gather": (0, 11),
    "xla_gpu_enable_pipelined_reduce_scatter": (0, 11),
    "xla_gpu_enable_pipelined_all_reduce": (0, 11),
}
