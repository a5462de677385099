"""Converts a Hugging Face folder to a workdir, or a run's newest checkpoint to such a folder.

  meshtrain convert HF_FOLDER WORKDIR    reads config.json and safetensors; writes a checkpoint of
                                         step 0
  meshtrain convert HUB_NAME WORKDIR --download
                                         the same for a model on the Hugging Face hub, such as
                                         HuggingFaceTB/SmolLM2-135M
  meshtrain convert WORKDIR HF_FOLDER    WORKDIR, or one checkpoint: WORKDIR/checkpoints/STEP
  meshtrain convert SOURCE FILE.gguf     WORKDIR, a checkpoint or a Hugging Face folder, for
                                         llama.cpp (needs the extra gguf)
  meshtrain convert WORKDIR FOLDER --adapter
                                         only the adapter of a run with adapter.rank, as PEFT
                                         stores it

Parameters are copied bit for bit unless --dtype changes them. TARGET must not exist; it appears
only when it is complete.
"""

import argparse
import os
from importlib.util import find_spec
from pathlib import Path

from meshtrain import storage
from meshtrain.cli.verbs import Verb
from meshtrain.cluster import environment
from meshtrain.data import hub
from meshtrain.errors import ConfigError


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument("source", type=_path, metavar="SOURCE", help="folder to convert")
    flags.add_argument(
        "target", type=Path, metavar="TARGET", help="new folder, or new file with the suffix .gguf"
    )
    flags.add_argument(
        "--download",
        action="store_true",
        help="SOURCE is the name of a model on the Hugging Face hub: download it to the hub's "
        "cache (needs the extra hub)",
    )
    flags.add_argument(
        "--dtype",
        choices=("float32", "bfloat16", "float16"),
        help="dtype of the parameters (default: unchanged)",
    )
    flags.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with adapter.rank, write only the adapter, in the layout of PEFT "
        "(default: merged weights)",
    )
    flags.add_argument(
        "--max_shard_gb",
        type=float,
        default=5.0,
        metavar="GB",
        help="size limit of each file, in 10^9 bytes (default: 5); a larger tensor has its own",
    )
    flags.add_argument(
        "--config",
        default="configs/default.py",
        metavar="FILE",
        help="config of the new workdir, except its model section (default: %(default)s)",
    )
    environment.add_flags(flags)


def _path(text: str) -> Path:
    """Returns the path; an absolute one of ./a, which is a folder, while a may be a hub's name."""
    return Path(text).absolute() if text.startswith("./") else Path(text)


def run(args: argparse.Namespace) -> int:
    """Converts a folder; returns the exit code."""
    # All that can be checked without jax comes first, and before a download.
    _check_flags(args)
    name = str(args.source)
    if args.download:
        # config.json comes first: an unsupported model is rejected before its weights are fetched.
        args.source = hub.download(name, ["config.json"], required="config.json", advised=hub.MODEL)
    from meshtrain.huggingface import convert, weights
    from meshtrain.inference import chat

    if args.download:
        weights.model_section(args.source)
        args.source = hub.download(name, hub.MODEL, required="model*.safetensors")
    return convert.run(args, ends_of_replies=chat.ends_of_replies)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError if the flags are wrong, or there is nothing to convert."""
    if os.path.lexists(args.target):
        raise ConfigError(f"{args.target}: exists already; use another TARGET, or remove it")
    if not args.max_shard_gb > 0:
        raise ConfigError(f"--max_shard_gb={args.max_shard_gb}: use more than 0")
    if faults := storage.open_workdir(args.target.absolute()).name_faults(""):
        raise ConfigError(*faults)
    name = str(args.source)
    command, folder = hub.command(name, hub.MODEL), hub.folder_of(name)
    if args.download:
        faults = hub.name_faults("", name)
        process = (args.coordinator, args.num_processes, args.process_id)
        if not faults and environment.process_info(os.environ, process):
            faults.append(
                f"--download: each process would download {name}; run once: {command}; then "
                f"convert {folder}"
            )
        if faults:
            raise ConfigError(*faults)
    elif not os.path.lexists(args.source):
        fault = f"{name}: no such folder"
        if hub.is_name(name):
            needs = "" if find_spec("huggingface_hub") else " (needs the extra hub)"
            fault += (
                f"; if it is a model on the Hugging Face hub, use --download{needs}, or run: "
                f"{command}; then convert {folder}"
            )
        raise ConfigError(fault)


VERB = Verb(
    summary="convert from and to Hugging Face folders",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
