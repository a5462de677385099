"""Generates text with a trained or converted model.

meshtrain generate --workdir=runs/quickstart --prompt="def "
meshtrain generate --workdir=runs/smollm2-chat --chat --prompt="What is a prime number?"
"""

import argparse
from pathlib import Path

from meshtrain.config.schema import Config


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="text to continue (default: a newline); may be repeated",
    )
    flags.add_argument(
        "--prompt_file", type=Path, metavar="FILE", help="file with one prompt per line"
    )
    flags.add_argument(
        "--chat",
        action="store_true",
        help="each prompt is a message to a chat model, written by its chat template; prints the replies",
    )
    flags.add_argument("--length", type=int, default=400, metavar="N", help="tokens to generate")
    flags.add_argument(
        "--temperature",
        type=float,
        default=0.7,
        metavar="T",
        help="divides the logits; 0: always the most likely token",
    )
    flags.add_argument(
        "--top_k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K most likely tokens; 0: all",
    )
    flags.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )
    flags.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the samples")
    flags.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="stop at this token, its id or its text (default: the tokenizer's end-of-document token; with --chat also "
        "those that end a reply)",
    )
    flags.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the model sees (default: data.seq_len)",
    )
    flags.add_argument("--tokenizer", metavar="PATH", help="default: the run's tokenizer, or bytes")
    flags.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin each prompt with the begin-of-document token (default: as in the run's data)",
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the continued prompts; returns the exit code."""
    from meshtrain.inference import generate

    return generate.run(args, cfg)
