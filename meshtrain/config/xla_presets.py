"""Compiler options for GPUs, by name of `train.xla_preset`."""

# The options are passed to the compiler by name: for an unknown one it raises an error. In XLA_FLAGS an
# unknown option would abort the process.
PRESETS: dict[str, dict[str, bool | int | str]] = {
    "none": {},
    # Collectives overlap with computation.
    "overlap": {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_highest_priority_async_stream": True,
        "xla_gpu_enable_while_loop_double_buffering": True,
        "xla_gpu_enable_pipelined_all_gather": True,
        "xla_gpu_enable_pipelined_reduce_scatter": True,
        "xla_gpu_enable_pipelined_all_reduce": True,
        "xla_gpu_enable_pipelined_p2p": True,
        # Otherwise XLA runs matrix products again to free memory that the step does not need: 5 to 20 % more FLOPs.
        "xla_disable_hlo_passes": "rematerialization",
    },
    # Kernels are launched in groups, as CUDA graphs.
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
