"""Evaluates a trained or converted model: on its data, on tasks, or on text files.

  meshtrain evaluate --workdir=runs/quickstart
  meshtrain evaluate --workdir=runs/llama --split=all --config.data.path=prepared/text
  meshtrain evaluate --workdir=runs/llama --tasks=hellaswag,arc_easy --num_fewshot=5
  meshtrain evaluate --workdir=runs/llama --files=book.txt --files=code.py

Without --tasks and --files it prints loss, perplexity and bits per byte of the run's data, each
sample counted once; change the data with --config.data.KEY=VALUE. Tasks are those of
lm-evaluation-harness, or your own in its format.
"""

import argparse
from pathlib import Path

from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--split",
        choices=("heldout", "train", "all"),
        help="part of the data to evaluate; data.heldout sets its size (default: heldout)",
    )
    flags.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences per batch, over all devices (default: train.global_batch)",
    )
    flags.add_argument(
        "--max_batches",
        type=int,
        metavar="N",
        help="evaluate at most N batches; 0: all (default)",
    )
    flags.add_argument(
        "--stride",
        type=int,
        metavar="N",
        help="tokens between the beginnings of two windows: they overlap, and each token counts "
        "once, with as much context as possible (default: eval.stride; of files the length of a "
        "window)",
    )
    flags.add_argument(
        "--tasks",
        metavar="NAMES",
        help="tasks, groups and tags of lm-evaluation-harness, patterns of them, or YAML files, "
        "with commas between; needs the extra `evals`",
    )
    flags.add_argument(
        "--include_path",
        type=Path,
        action="append",
        metavar="DIR",
        help="folder with tasks of your own in YAML files; may be repeated",
    )
    flags.add_argument(
        "--num_fewshot",
        type=int,
        metavar="N",
        help="examples in front of each question (default: as the task says)",
    )
    flags.add_argument(
        "--limit",
        type=float,
        metavar="N",
        help="ask only the first N questions of each task; below 1: this share of them",
    )
    flags.add_argument(
        "--apply_chat_template",
        action="store_true",
        default=None,
        help="write questions and examples as messages, by the chat template of the model",
    )
    flags.add_argument(
        "--fewshot_as_multiturn",
        action=argparse.BooleanOptionalAction,
        help="with a chat template: each example is a message and a reply (default), not all one "
        "message",
    )
    flags.add_argument(
        "--files",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="UTF-8 text of which to print bits per byte and perplexity; may be repeated",
    )
    flags.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the model sees of a task or a file (default: as `generate`)",
    )
    flags.add_argument("--tokenizer", metavar="PATH", help="default: the run's tokenizer, or bytes")
    flags.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin the texts of tasks with the begin-of-document token (default: as in the run's "
        "data; of an imported model as transformers does)",
    )
    flags.add_argument(
        "--cache",
        type=Path,
        metavar="FILE",
        help="keep the answers to tasks and files in this file: an interrupted evaluation "
        "continues there",
    )
    flags.add_argument(
        "--output", type=Path, metavar="FILE", help="write the results of tasks and files as JSON"
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the evaluation; returns the exit code."""
    _check_unused(args)
    if args.tasks is None and not args.files:
        # Here: `--help` needs no jax, which takes seconds to load.
        from meshtrain.inference import evaluate

        return evaluate.run(
            cfg,
            args.workdir,
            split=args.split or "heldout",
            global_batch=args.batch,
            max_batches=args.max_batches or 0,
            stride=args.stride,
        )
    from meshtrain.inference import tasks

    settings = tasks.Settings(
        tasks=_names(args.tasks),
        include_paths=args.include_path or [],
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=bool(args.apply_chat_template),
        fewshot_as_multiturn=args.fewshot_as_multiturn is not False,
        files=args.files,
        stride=args.stride,
        context=args.context,
        batch=args.batch,
        tokenizer_path=args.tokenizer,
        bos=args.bos,
        cache=args.cache,
        output=args.output,
        trust_code=args.trust_code,
    )
    return tasks.run(cfg, args.workdir, settings)


def _names(tasks: str | None) -> list[str]:
    """Returns the names in --tasks; raises ConfigError if one is empty."""
    names = [] if tasks is None else [name.strip() for name in tasks.split(",")]
    if not all(names):
        raise ConfigError(f"--tasks={tasks}: has an empty name; use names with commas between")
    return names


def _check_unused(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no effect on what is evaluated."""
    has_tasks, has_files = args.tasks is not None, bool(args.files)
    with_tasks = "only --tasks reads it; add --tasks=NAMES"
    with_both = "only --tasks and --files read it; add one of them"
    with_template = "only --apply_chat_template reads it; add that flag"
    with_data = "--tasks and --files do not read it; leave it out, or leave out those"
    with_windows = "tasks do not read it; leave it out, or add --files=FILE"
    has_both = has_tasks or has_files
    is_read = {
        "include_path": (has_tasks, with_tasks),
        "num_fewshot": (has_tasks, with_tasks),
        "limit": (has_tasks, with_tasks),
        "apply_chat_template": (has_tasks, with_tasks),
        "fewshot_as_multiturn": (args.apply_chat_template, with_template),
        "bos": (has_tasks, with_tasks),
        "context": (has_both, with_both),
        "tokenizer": (has_both, with_both),
        "cache": (has_both, with_both),
        "output": (has_both, with_both),
        "split": (not has_both, with_data),
        "max_batches": (not has_both, with_data),
        "stride": (has_files or not has_tasks, with_windows),
    }
    faults = []
    for name, (has_effect, fault) in is_read.items():
        # A flag that is not given is None: 0 is a value, and so is what --no-bos sets.
        if getattr(args, name) is not None and not has_effect:
            faults.append(f"--{name}: {fault}")
    if faults:
        raise ConfigError(*faults)


VERB = Verb(
    summary="measure loss and bits per byte, or run tasks",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="run",
)
