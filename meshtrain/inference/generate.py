"""Continues texts with a trained or converted model.

python -m meshtrain.inference.generate --workdir=runs/quickstart --prompt="def "
"""

import argparse
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import jax

from meshtrain import checkpoint
from meshtrain.config.schema import Config
from meshtrain.data import tokenizer
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.huggingface import convert
from meshtrain.inference import restore, sampling

BEFORE = 16  # tokens that a new one is decoded after


def add_flags(flags: argparse.ArgumentParser) -> None:
    flags.add_argument(
        "--prompt", action="append", metavar="TEXT", help="may be given several times"
    )
    flags.add_argument("--prompt_file", type=Path, metavar="FILE", help="a prompt on each line")
    flags.add_argument("--length", type=int, default=400, metavar="N", help="tokens to generate")
    flags.add_argument(
        "--temperature", type=float, default=0.7, metavar="T", help="0: the likeliest"
    )
    flags.add_argument(
        "--top_k", type=int, default=0, metavar="K", help="of the K likeliest; 0: all"
    )
    flags.add_argument(
        "--top_p", type=float, default=1.0, metavar="P", help="of the likeliest that add up to P"
    )
    flags.add_argument("--seed", type=int, default=0, metavar="N")
    flags.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN",
        help="end there: a token's number, or its text (default: the tokenizer's end of a document)",
    )
    flags.add_argument(
        "--context", type=int, metavar="N", help="tokens seen (default: data.seq_len)"
    )
    flags.add_argument("--tokenizer", metavar="PATH", help="default: the run's own, or bytes")
    flags.add_argument(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin each prompt with the tokenizer's token for that (default: if the run's data does)",
    )


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Returns the exit code."""
    how = sampling.Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    model = cfg.model.options
    learned = model["max_seq_len"] if model.get("positions") == "learned" else None
    context = args.context
    if context is None:
        seq_len = cfg.data.options["seq_len"]
        context = min(seq_len, learned or seq_len)
    faults = minimum_faults(1, {"--length": args.length, "--context": context})
    if learned and context > learned:
        faults.append(f"--context={context}: is more than model.max_seq_len={learned} positions")
    if cfg.mesh.pipeline > 1:
        faults.append(
            f"mesh.pipeline={cfg.mesh.pipeline}: text is generated without a pipeline; use fsdp or tensor"
        )
    if faults:
        raise ConfigError(*faults)
    words = _tokenizer(args.tokenizer, cfg, checkpoint.workdir_of(args.workdir))
    size = model.get("vocab_size", words.vocab_size)
    first = _first(args, cfg, words)
    prompts = [_encoded(words, text, first, size) for text in _prompts(args)]
    stop = [_token(words, text) for text in args.stop] or [words.eos]
    how = dataclasses.replace(how, vocab_size=words.vocab_size)
    program, params = restore.restore(cfg, args.workdir)
    options = dict(length=args.length, context=context, dtype=cfg.train.dtype)
    steps = sampling.generate(program, params, prompts, sampling=how, stop=stop, **options)
    if jax.process_index() == 0:
        show(words, prompts, steps)
    else:
        all(True for _ in steps)
    return 0


def show(
    words: Tokenizer, prompts: Sequence[list[int]], steps: Iterable[Sequence[int | None]]
) -> None:
    """Prints one text as it grows; of several, each when all are there."""
    if len(prompts) == 1:
        (ids,) = prompts
        print(words.decode(ids), end="", flush=True)
        for new in pieces(words, ids, (token for (token,) in steps)):
            print(new, end="", flush=True)
        print()
        return
    for number, (ids, row) in enumerate(zip(prompts, zip(*steps, strict=True), strict=True)):
        new = [token for token in row if token is not None]
        print(f"--- {number}\n{words.decode([*ids, *new])}")


def pieces(words: Tokenizer, ids: Sequence[int], tokens: Iterable[int | None]) -> Iterator[str]:
    """Yields what each token adds to the text of `ids`, up to the first None; part of a character waits.

    A token is decoded after some that stand before it: in some vocabularies its space depends on them.
    """
    ids = list(ids)[-BEFORE:]
    told = words.decode(ids)
    for token in itertools.takewhile(lambda token: token is not None, tokens):
        ids.append(token)
        text = words.decode(ids)
        if text.endswith("\ufffd"):
            continue
        yield text[len(told) :]
        ids = ids[-BEFORE:]
        told = words.decode(ids)
    yield words.decode(ids)[len(told) :]


def _prompts(args: argparse.Namespace) -> list[str]:
    texts = list(args.prompt or [])
    if args.prompt_file is not None:
        try:
            lines = args.prompt_file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--prompt_file={args.prompt_file}: {error}") from error
        if "" in lines:
            number = lines.index("") + 1
            raise ConfigError(f"--prompt_file={args.prompt_file}: line {number} is empty")
        texts += lines
    return texts or ["\n"]


def _first(args: argparse.Namespace, cfg: Config, words: Tokenizer) -> list[int]:
    """Returns what each prompt begins with: the tokenizer's bos, or nothing."""
    wanted = args.bos
    if wanted is None:
        folders = convert.companions_of(checkpoint.workdir_of(args.workdir), cfg.to_dict())
        wanted = any(map(tokenizer.has_bos, folders))
    if wanted and words.bos is None:
        raise ConfigError(
            f"--bos: tokenizer {words.file or 'bytes'} has no token that begins a document; use --no-bos"
        )
    return [words.bos] if wanted else []


def _encoded(words: Tokenizer, text: str, first: list[int], vocab_size: int) -> list[int]:
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # a byte of the command line
        raise ConfigError(f"--prompt={text!r}: is no valid UTF-8")
    ids = first + words.encode(text).tolist()
    if not ids:
        raise ConfigError(f"--prompt={text!r}: is no token long; say something to go on from")
    if max(ids) >= vocab_size:  # jax would take the last one
        raise ConfigError(
            f"--prompt={text!r}: holds token {max(ids)}, and model.vocab_size={vocab_size}; "
            f"use the model's own --tokenizer"
        )
    return ids


def _token(words: Tokenizer, text: str) -> int:
    """Returns the number of a token that is given as a number, or as text."""
    if text.isdecimal() and int(text) < words.vocab_size:
        return int(text)
    ids = words.encode(text).tolist()
    if len(ids) == 1:
        return ids[0]
    try:
        return tokenizer.load(words.file, eos=text).eos  # a special one, which no text makes
    except (ConfigError, TypeError):
        raise ConfigError(
            f"--stop={text!r}: is no single token of the tokenizer; give its number"
        ) from None


def _tokenizer(path: str | None, cfg: Config, workdir: Path) -> Tokenizer:
    """Returns that of --tokenizer, of the workdir, of the prepared data, or bytes."""
    size = cfg.model.options.get("vocab_size", 0)
    folders = convert.companions_of(workdir, cfg.to_dict())
    found = path or next(map(str, filter(tokenizer.has_tokenizer, folders)), None)
    if found is None and size > 256:
        raise ConfigError(
            f"--workdir={workdir}: model.vocab_size={size} is more than bytes, and no tokenizer is there; "
            f"use --tokenizer=PATH of a tokenizer.json or a SentencePiece model"
        )
    words = tokenizer.load(found or "bytes")
    if words.vocab_size > size > 0 and found:
        raise ConfigError(
            f"--tokenizer={found}: has {words.vocab_size} tokens, and model.vocab_size={size}; use the model's own"
        )
    return words
