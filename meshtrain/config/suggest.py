"""Suggests a key of the config for a name that is none: a misspelt one, or another trainer's."""

from collections.abc import Iterable

from meshtrain.errors import did_you_mean, nearest

# What PyTorch, transformers, nanoGPT, MaxText, torchtitan, Megatron, Lightning and DeepSpeed call
# the keys of configs/default.py.
OTHER_NAMES = {
    "lr": "optim.learning_rate",
    "max_lr": "optim.learning_rate",
    "min_lr": "optim.final_fraction",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "lr_decay_style": "optim.schedule",
    "scheduler": "optim.schedule",
    "warmup": "optim.warmup_steps",
    "warmup_iters": "optim.warmup_steps",
    "num_warmup_steps": "optim.warmup_steps",
    "lr_warmup_iters": "optim.warmup_steps",
    "beta1": "optim.b1",
    "adam_beta1": "optim.b1",
    "beta2": "optim.b2",
    "adam_beta2": "optim.b2",
    "eps": "optim.epsilon",
    "adam_epsilon": "optim.epsilon",
    "wd": "optim.weight_decay",
    "clip_grad": "optim.clip_norm",
    "grad_clip": "optim.clip_norm",
    "gradient_clip_val": "optim.clip_norm",
    "gradient_clipping": "optim.clip_norm",
    "max_grad_norm": "optim.clip_norm",
    "max_norm": "optim.clip_norm",
    "optimizer": "optim.build",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "max_epochs": "train.epochs",
    "num_steps": "train.steps",
    "max_steps": "train.steps",
    "max_iters": "train.steps",
    "train_iters": "train.steps",
    "training_steps": "train.steps",
    "num_train_steps": "train.steps",
    "max_train_steps": "train.steps",
    "batch_size": "train.global_batch",
    "train_batch_size": "train.global_batch",
    "global_batch_size": "train.global_batch",
    "per_device_batch_size": "train.batch_per_device",
    "per_device_train_batch_size": "train.batch_per_device",
    "local_batch_size": "train.batch_per_device",
    "micro_batch_size": "train.num_microbatches",
    "num_pipeline_microbatches": "train.num_microbatches",
    "accumulate_grad_batches": "train.num_microbatches",
    "grad_accum": "train.num_microbatches",
    "gradient_accumulation": "train.num_microbatches",
    "gradient_accumulation_steps": "train.num_microbatches",
    "log_interval": "train.log_every",
    "logging_steps": "train.log_every",
    "log_freq": "train.log_every",
    "zero": "train.zero_stage",
    "zero_optimization": "train.zero_stage",
    "activation_checkpoint": "train.remat",
    "activation_checkpointing": "train.remat",
    "gradient_checkpointing": "train.remat",
    "recompute_granularity": "train.remat",
    "remat_policy": "train.remat",
    "amp": "train.dtype",
    "use_amp": "train.dtype",
    "autocast": "train.dtype",
    "mixed_precision": "train.dtype",
    "precision": "train.dtype",
    "bf16": "train.dtype",
    "fp16": "train.dtype",
    "torch_dtype": "train.dtype",
    "weight_dtype": "train.param_dtype",
    "freeze": "train.trainable",
    "dp": "mesh.data",
    "data_parallel": "mesh.data",
    "ici_data_parallelism": "mesh.data",
    "dcn_data_parallelism": "mesh.slices",
    "data_parallel_shard_degree": "mesh.fsdp",
    "ici_fsdp_parallelism": "mesh.fsdp",
    "tp": "mesh.tensor",
    "tensor_parallel": "mesh.tensor",
    "tensor_parallel_degree": "mesh.tensor",
    "tensor_model_parallel_size": "mesh.tensor",
    "ici_tensor_parallelism": "mesh.tensor",
    "pp": "mesh.pipeline",
    "pipeline_parallel": "mesh.pipeline",
    "pipeline_parallel_degree": "mesh.pipeline",
    "pipeline_model_parallel_size": "mesh.pipeline",
    "ici_pipeline_parallelism": "mesh.pipeline",
    "cp": "mesh.context",
    "context_parallel": "mesh.context",
    "context_parallel_degree": "mesh.context",
    "context_parallel_size": "mesh.context",
    "ep": "mesh.expert",
    "expert_parallel_degree": "mesh.expert",
    "expert_model_parallel_size": "mesh.expert",
    "pipeline_parallel_schedule": "pipeline.schedule",
    "num_pipeline_repeats": "pipeline.num_chunks",
    "num_virtual_stages": "pipeline.num_chunks",
    "logical_axis_rules": "rules",
    "vocab": "model.vocab_size",
    "n_layer": "model.num_layers",
    "n_layers": "model.num_layers",
    "num_hidden_layers": "model.num_layers",
    "base_num_decoder_layers": "model.num_layers",
    "n_head": "model.num_heads",
    "n_heads": "model.num_heads",
    "num_attention_heads": "model.num_heads",
    "base_num_query_heads": "model.num_heads",
    "n_kv_heads": "model.num_kv_heads",
    "num_key_value_heads": "model.num_kv_heads",
    "num_query_groups": "model.num_kv_heads",
    "base_num_kv_heads": "model.num_kv_heads",
    "kv_channels": "model.head_dim",
    "n_embd": "model.d_model",
    "dim": "model.d_model",
    "hidden_size": "model.d_model",
    "embed_dim": "model.d_model",
    "base_emb_dim": "model.d_model",
    "ffn_hidden_size": "model.d_ff",
    "intermediate_size": "model.d_ff",
    "base_mlp_dim": "model.d_ff",
    "n_positions": "model.max_seq_len",
    "max_position_embeddings": "model.max_seq_len",
    "num_local_experts": "model.num_experts",
    "num_experts_per_tok": "model.experts_per_token",
    "top_k_experts": "model.experts_per_token",
    "attn_implementation": "model.attention_impl",
    "attention_type": "model.attention_impl",
    "flash_attention": "model.attention_impl",
    "sliding_window": "model.window",
    "block_size": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "max_target_length": "data.seq_len",
    "sequence_length": "data.seq_len",
    "seq_length": "data.seq_len",
    "data_path": "data.path",
    "dataset": "data.path",
    "dataset_path": "data.path",
    "train_file": "data.path",
    "dataset_type": "data.build",
    "val_split": "data.heldout",
    "validation_split": "data.heldout",
    "eval_interval": "eval.every",
    "eval_steps": "eval.every",
    "val_check_interval": "eval.every",
    "eval_iters": "eval.batches",
    "limit_val_batches": "eval.batches",
    "save_steps": "checkpoint.every",
    "save_interval": "checkpoint.every",
    "checkpoint_period": "checkpoint.every",
    "ckpt_interval": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "save_top_k": "checkpoint.keep_best",
    "pretrained": "checkpoint.init_from",
    "load_from": "checkpoint.init_from",
    "model_name_or_path": "checkpoint.init_from",
    "lora_r": "adapter.rank",
    "lora_rank": "adapter.rank",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "target_modules": "adapter.targets",
    "wandb_project": "monitor.wandb",
    "use_wandb": "monitor.wandb",
    "report_to": "monitor.wandb",
    "use_tensorboard": "monitor.tensorboard",
}

# Flags of other trainers' commands, and ours.
OTHER_FLAGS = {
    "out_dir": "--workdir",
    "output_dir": "--workdir",
    "save_dir": "--workdir",
    "log_dir": "--workdir",
    "logdir": "--workdir",
    "checkpoint_dir": "--workdir",
    "default_root_dir": "--workdir",
    "base_output_directory": "--workdir",
    "run_name": "--workdir",
    "ckpt_path": "--workdir",
    "load_dir": "--workdir",
    "resume": "--workdir",
    "resume_from": "--workdir",
    "resume_from_checkpoint": "--workdir",
    "config_file": "--config",
    "nproc_per_node": "--nproc",
    "num_processes_per_node": "--nproc",
    "master_addr": "--coordinator",
    "rdzv_endpoint": "--coordinator",
    "start": "--prompt",
    "max_gen_len": "--length",
    "max_new_tokens": "--length",
    "max_tokens": "--length",
    "n_predict": "--length",
}


def key_for(name: str, known: Iterable[str]) -> str:
    """Returns the key that `name` probably means, as "section.key"; "" if none is near.

    `known` are the keys that exist. `name` may have a section: train.lr is optim.learning_rate.
    """
    known = list(known)
    section, _, leaf = name.lower().replace("-", "_").rpartition(".")
    other = OTHER_NAMES.get(leaf)
    if other in known:
        return other
    # The same name in another section; one that several sections have says nothing.
    namesakes = [key for key in known if key.rpartition(".")[2] == leaf]
    if len(namesakes) == 1:
        return namesakes[0]
    in_section = [key for key in known if key.rpartition(".")[0] == section]
    if section and in_section:
        leaves = [key.rpartition(".")[2] for key in in_section]
        near = nearest(leaf, leaves)
        return f"{section}.{near}" if near else ""
    return nearest(name, known)


def did_you_mean_key(name: str, known: Iterable[str]) -> str:
    """Returns ' (did you mean "section.key"?)', or '' if no key is near."""
    key = key_for(name, known)
    return f' (did you mean "{key}"?)' if key else ""


# Flags of other trainers that have no counterpart, by what is answered.
EXPLAINED = {
    "backend": "--platform=cpu, cuda or tpu chooses the devices; their collectives are those of "
    "Gloo, NCCL or the TPU's own network, which XLA uses without a setting",
}


def did_you_mean_flag(name: str, flags: Iterable[str], keys: Iterable[str] = ()) -> str:
    """Returns ' (did you mean "--flag"?)', or '' if no flag or key of the config is near.

    `keys` are those of the config that the verb reads: --lr is --config.optim.learning_rate.
    """
    flags = list(flags)
    bare = name.lstrip("-").lower().replace("-", "_")
    if bare in EXPLAINED and "--platform" in flags:
        return f"; {EXPLAINED[bare]}"
    other = OTHER_FLAGS.get(bare)
    if other in flags:
        return f' (did you mean "{other}"?)'
    key = key_for(bare, keys)
    is_exact = bare in OTHER_NAMES or key.endswith(f".{bare}")
    if key and (is_exact or not nearest(name, flags)):
        return f' (did you mean "--config.{key}"?)'
    return did_you_mean(name, flags)
