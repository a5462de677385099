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
        default="heldout",
        help="part of the data to evaluate; data.heldout sets its size (default: %(default)s)",
    )
    flags.add_argument(
        "--batch",
        type=int,
        metavar="N",
        help="sequences per batch, over all devices (default: train.global_batch)",
    )
    flags.add_argument(
        "--max_batches", type=int, default=0, metavar="N", help="evaluate at most N batches; 0: all"
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
        default=[],
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
        help="write questions and examples as messages, by the chat template of the model",
    )
    flags.add_argument(
        "--fewshot_as_multiturn",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with a chat template: each example is a message and a reply, not all one message",
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
    if args.tasks is None and not args.files:
        _check_unused(args)
        # Here: `--help` needs no jax, which takes seconds to load.
        from meshtrain.inference import evaluate

        return evaluate.run(
            cfg,
            args.workdir,
            split=args.split,
            global_batch=args.batch,
            max_batches=args.max_batches,
            stride=args.stride,
        )
    from meshtrain.inference import tasks

    settings = tasks.Settings(
        tasks=_names(args.tasks),
        include_paths=args.include_path,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        apply_chat_template=args.apply_chat_template,
        fewshot_as_multiturn=args.fewshot_as_multiturn,
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
    """Raises ConfigError for flags that only tasks and files read."""
    of_tasks = ("include_path", "num_fewshot", "limit", "apply_chat_template")
    of_both = ("context", "tokenizer", "bos", "cache", "output")
    faults = [
        f"--{name}: only --tasks reads it; add --tasks=NAMES"
        for name in of_tasks
        if getattr(args, name)
    ]
    faults += [
        f"--{name}: only --tasks and --files read it; add one of them"
        for name in of_both
        if getattr(args, name) is not None
    ]
    if faults:
        raise ConfigError(*faults)


VERB = Verb(
    summary="measure loss and bits per byte, or run tasks",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="run",
)
