"""Generates text with a trained or converted model.

meshtrain generate --workdir=runs/quickstart --prompt="def "
meshtrain generate --workdir=runs/smollm2-chat --chat --prompt="What is a prime number?"
meshtrain generate --workdir=runs/smollm2-chat --chat --system="Answer in one sentence."
"""

import argparse
import json
from pathlib import Path
from typing import Any

from meshtrain.cli.verbs import Verb
from meshtrain.config.schema import Config
from meshtrain.errors import ConfigError

# Those of inference.sampling.Sampling: type, letter and help.
SAMPLING_FLAGS: dict[str, tuple[type, str, str]] = {
    "temperature": (float, "T", "divides the logits; 0: always the most likely token (else 0.7)"),
    "top_k": (int, "K", "sample from the K most likely tokens; 0: all (else 0)"),
    "top_p": (
        float,
        "P",
        "sample from the most likely tokens whose probabilities add up to P (else 1)",
    ),
    "min_p": (
        float,
        "P",
        "sample from the tokens with at least P times the highest probability (else 0)",
    ),
    "repetition_penalty": (
        float,
        "R",
        "divides positive logits of tokens in prompt and text so far, multiplies negative ones "
        "(else 1)",
    ),
    "presence_penalty": (
        float,
        "A",
        "subtracted from the logits of tokens generated so far (else 0)",
    ),
    "frequency_penalty": (
        float,
        "A",
        "subtracted from the logits of tokens for each time that they were generated (else 0)",
    ),
    "no_repeat_ngram_size": (
        int,
        "N",
        "no N tokens occur twice in the same order in prompt and text; 0: any may (else 0)",
    ),
}


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
        "replies. Without a prompt, each line of stdin is the next message of a conversation",
    )
    flags.add_argument(
        "--system", metavar="TEXT", help="message of the system before those of the user"
    )
    flags.add_argument(
        "--chat_template_kwargs",
        metavar="JSON",
        help="further variables of the chat template, such as '{\"enable_thinking\": false}'",
    )
    flags.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="tokens to generate (default: max_new_tokens of generation_config.json, or 400; in a "
        "conversation until the context is full)",
    )
    flags.add_argument(
        "--num_return_sequences",
        type=int,
        default=1,
        metavar="N",
        help="texts that continue each prompt (default 1)",
    )
    sampling = flags.add_argument_group(
        "sampling", "without a flag, the value of the model's generation_config.json, if it has one"
    )
    for name, (kind, letter, help_text) in SAMPLING_FLAGS.items():
        sampling.add_argument(f"--{name}", type=kind, metavar=letter, help=help_text)
    flags.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the samples")
    flags.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text, at this special token, or at the token with this id; may be "
        "repeated (default: the tokenizer's end-of-document token, the tokens and texts that "
        "generation_config.json lists; with --chat also the tokens that end a reply)",
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
    from meshtrain.inference import chat, generate

    arguments = _template_arguments(args.chat_template_kwargs)
    faults = chat.argument_faults(arguments)
    if not args.chat:
        for flag in ("system", "chat_template_kwargs"):
            if getattr(args, flag) is not None:
                faults.append(f"--{flag}: is for chat models; add --chat")
    if faults:
        raise ConfigError(*faults)
    texts = _read_prompts(args.prompt, args.prompt_file)
    flags = {name: getattr(args, name) for name in SAMPLING_FLAGS}
    sampling_flags = {name: value for name, value in flags.items() if value is not None}
    return generate.run(
        cfg,
        args.workdir,
        texts=texts if texts or args.chat else ["\n"],
        sampling_flags={**sampling_flags, "seed": args.seed},
        length=args.length,
        num_return_sequences=args.num_return_sequences,
        context=args.context,
        stop=args.stop,
        tokenizer_path=args.tokenizer,
        bos=args.bos,
        chat=chat.Settings(args.system, arguments) if args.chat else None,
    )


def _template_arguments(text: str | None) -> dict[str, Any]:
    """Returns the object in --chat_template_kwargs; {} without the flag."""
    if text is None:
        return {}
    example = "'{\"enable_thinking\": false}'"
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"--chat_template_kwargs={text}: is not JSON: {error}; use an object such as {example}"
        ) from None
    if not isinstance(arguments, dict):
        raise ConfigError(
            f"--chat_template_kwargs={text}: is no JSON object; use one such as {example}"
        )
    return arguments


def _read_prompts(texts: list[str] | None, file: Path | None) -> list[str]:
    """Returns the prompts of the command line, then those in the file."""
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
    return prompts


VERB = Verb(
    summary="generate text with a model",
    help=__doc__,
    add_flags=add_flags,
    run=run,
    reads="run",
)
