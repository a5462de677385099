"""Generates text with a trained or converted model.

meshtrain generate --workdir=runs/quickstart --prompt="def "
meshtrain generate --workdir=runs/smollm2-chat --chat --prompt="What is a prime number?"
"""

import argparse
from pathlib import Path

from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError


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
        help="each prompt is a message to a chat model, written by its chat template; prints the "
        "replies",
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
        help="stop at this token, its id or its text (default: the tokenizer's end-of-document "
        "token and those that generation_config.json lists; with --chat also those that end a "
        "reply)",
    )
    flags.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens that the model sees (default: the length of its training rows, data.seq_len; "
        "of a converted model its own length, model.max_seq_len)",
    )
    flags.add_argument("--tokenizer", metavar="PATH", help="default: the run's tokenizer, or bytes")
    flags.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin each prompt with the begin-of-document token (default: as in the run's data; "
        "of a converted model add_bos_token of its tokenizer_config.json)",
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the continued prompts; returns the exit code."""
    # Here: `--help` needs no jax, which takes seconds to load.
    from meshtrain.inference import generate
    from meshtrain.inference.sampling import Sampling

    return generate.run(
        cfg,
        args.workdir,
        texts=_read_prompts(args.prompt, args.prompt_file),
        sampler=Sampling(args.temperature, args.top_k, args.top_p, args.seed),
        length=args.length,
        context=args.context,
        stop=args.stop,
        tokenizer_path=args.tokenizer,
        bos=args.bos,
        chat=args.chat,
    )


def _read_prompts(texts: list[str] | None, file: Path | None) -> list[str]:
    """Returns the prompts of the command line, then those in the file; a newline without any."""
    prompts = [*texts] if texts else []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt_file={file}: {error}") from error
        if "" in lines:
            number = lines.index("") + 1
            raise ConfigError(f"--prompt_file={file}: line {number} is empty")
        prompts += lines
    return prompts or ["\n"]


VERB = Verb(
    summary="generate text with a model",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="run",
)
