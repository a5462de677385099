"""Generates text: restores a run's model, encodes the prompts, and prints what the model continues."""

import argparse
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax

from meshtrain.checkpoint import arrays, find, resume, run_tokenizer
from meshtrain.config.build import Parts, build_model, optimizer_builder
from meshtrain.config.schema import Config
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference import chat, sampling
from meshtrain.models.base import Params
from meshtrain.program import Program, assemble

DECODE_CONTEXT = 16  # earlier tokens that are decoded together with a new one


def run(args: argparse.Namespace, cfg: Config) -> int:
    """Prints the continued prompts; returns the exit code."""
    settings = sampling.Sampling(args.temperature, args.top_k, args.top_p, args.seed)
    model = cfg.model.options
    max_positions = model["max_seq_len"] if model.get("positions") == "learned" else None
    context = args.context
    if context is None:
        seq_len = cfg.data.options.get("seq_len", max_positions)
        if seq_len is None:
            raise ConfigError("--context: the run's data has no data.seq_len; set --context=N")
        context = min(seq_len, max_positions or seq_len)
    faults = minimum_faults(1, {"--length": args.length, "--context": context})
    if max_positions and context > max_positions:
        faults.append(
            f"--context={context}: is more than model.max_seq_len={max_positions} positions; use less"
        )
    if faults:
        raise ConfigError(*faults)
    tokenizer = _load_tokenizer(args.tokenizer, cfg, find.workdir_of(args.workdir))
    size = model.get("vocab_size", tokenizer.vocab_size)
    encode, ends = _encoder(args, cfg, tokenizer)
    prompts = [_encode_prompt(encode, text, size) for text in _read_prompts(args)]
    stop = [_token_id(tokenizer, text) for text in args.stop] or ends
    settings = dataclasses.replace(settings, vocab_size=tokenizer.vocab_size)
    used = tokenizers.digest(tokenizer)
    program, params = restore_params(_without_stages(cfg), args.workdir, tokenizer=used)
    options = dict(length=args.length, context=context, dtype=cfg.train.dtype)
    steps = sampling.generate(program, params, prompts, sampling=settings, stop=stop, **options)
    if jax.process_index() == 0:
        print_texts(tokenizer, prompts, steps, replies_only=args.chat)
    else:
        all(True for _ in steps)  # every process runs every step
    return 0


def _without_stages(cfg: Config) -> Config:
    """Returns the settings with the devices of the pipeline's stages as further shards of the parameters.

    A token passes all stages one after the other, so stages would only wait for each other. No device needs
    more memory than with mesh.fsdp.
    """
    if cfg.mesh.pipeline == 1:
        return cfg
    mesh = dataclasses.replace(cfg.mesh, pipeline=1, fsdp=cfg.mesh.fsdp * cfg.mesh.pipeline)
    # Below stage 3 of ZeRO, fsdp would replicate the parameters that the stages shard.
    return dataclasses.replace(cfg, mesh=mesh, train=dataclasses.replace(cfg.train, zero_stage=3))


def print_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    steps: Iterable[Sequence[int | None]],
    *,
    replies_only: bool = False,
) -> None:
    """Prints a single text token by token, or several texts once all are complete; with or without the prompts."""
    if len(prompts) == 1:
        (ids,) = prompts
        print("" if replies_only else tokenizer.decode(ids), end="", flush=True)
        for new in stream_text(tokenizer, ids, (token for (token,) in steps)):
            print(new, end="", flush=True)
        print()
        return
    for number, (ids, row) in enumerate(zip(prompts, zip(*steps, strict=True), strict=True)):
        new = [token for token in row if token is not None]
        shown = new if replies_only else [*ids, *new]
        print(f"--- {number}\n{tokenizer.decode(shown)}")


def stream_text(
    tokenizer: Tokenizer, ids: Sequence[int], tokens: Iterable[int | None]
) -> Iterator[str]:
    """Yields the text that each token adds to `ids`, up to the first None; holds back incomplete characters.

    A token is decoded together with earlier ones: some decoders drop a space at the start of the text.
    """
    ids = list(ids)[-DECODE_CONTEXT:]
    printed = tokenizer.decode(ids)
    for token in itertools.takewhile(lambda token: token is not None, tokens):
        ids.append(token)
        text = tokenizer.decode(ids)
        if text.endswith("\ufffd"):
            continue
        yield text[len(printed) :]
        ids = ids[-DECODE_CONTEXT:]
        printed = tokenizer.decode(ids)
    yield tokenizer.decode(ids)[len(printed) :]


def _read_prompts(args: argparse.Namespace) -> list[str]:
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


def _encoder(
    args: argparse.Namespace, cfg: Config, tokenizer: Tokenizer
) -> tuple[Callable[[str], list[int]], list[int]]:
    """Returns the function from a prompt to its tokens, and the tokens that end a text."""
    if not args.chat:
        prefix = _prompt_prefix(args, cfg, tokenizer)
        return lambda text: prefix + tokenizer.encode(text).tolist(), [tokenizer.eos]
    if args.bos is not None:
        raise ConfigError("--bos and --chat: the chat template writes the token; use one of them")
    template = chat.load(tokenizer)
    encode = functools.partial(chat.encode, tokenizer, template)
    return encode, chat.end_tokens(tokenizer, template)


def _prompt_prefix(args: argparse.Namespace, cfg: Config, tokenizer: Tokenizer) -> list[int]:
    """Returns the tokens to put before each prompt: the tokenizer's bos, or none."""
    use_bos = args.bos
    if use_bos is None:
        folders = run_tokenizer.folders(find.workdir_of(args.workdir), cfg.to_dict())
        use_bos = any(map(tokenizers.has_bos, folders))
    if use_bos and tokenizer.bos is None:
        raise ConfigError(
            f"--bos: tokenizer {tokenizer.file or 'bytes'} has no begin-of-document token; use --no-bos"
        )
    return [tokenizer.bos] if use_bos else []


def _encode_prompt(encode: Callable[[str], list[int]], text: str, vocab_size: int) -> list[int]:
    # Python decodes an invalid byte of the command line to a surrogate.
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ConfigError(f"--prompt={text!r}: is not valid UTF-8")
    ids = encode(text)
    if not ids:
        raise ConfigError(f"--prompt={text!r}: has no tokens; use a longer prompt")
    if max(ids) >= vocab_size:  # JAX would clamp the index to the last row
        raise ConfigError(
            f"--prompt={text!r}: holds token {max(ids)}, but model.vocab_size={vocab_size}; "
            f"use the model's tokenizer with --tokenizer"
        )
    return ids


def _token_id(tokenizer: Tokenizer, text: str) -> int:
    """Returns the id of a token, given as its id or its text."""
    if text.isdecimal() and int(text) < tokenizer.vocab_size:
        return int(text)
    ids = tokenizer.encode(text).tolist()
    if len(ids) == 1:
        return ids[0]
    try:  # a special token, which encode never returns
        return tokenizers.load(tokenizer.file, eos=text).eos
    except (ConfigError, TypeError):
        raise ConfigError(
            f"--stop={text!r}: is not a single token of the tokenizer; use its id"
        ) from None


def _load_tokenizer(path: str | None, cfg: Config, workdir: Path) -> Tokenizer:
    """Returns the tokenizer of --tokenizer, or of the run (see checkpoint.run_tokenizer), or bytes."""
    size = cfg.model.options.get("vocab_size", 0)
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    found = path or next(map(str, filter(tokenizers.has_tokenizer, folders)), None)
    if found is None and size > 256:
        raise ConfigError(
            f"--workdir={workdir}: model.vocab_size={size} is more than the 256 bytes, and the run has no tokenizer; "
            f"use --tokenizer=PATH of a tokenizer.json or a SentencePiece model"
        )
    tokenizer = tokenizers.load(found or "bytes")
    if tokenizer.vocab_size > size > 0 and found:
        raise ConfigError(
            f"--tokenizer={found}: has {tokenizer.vocab_size} tokens, but model.vocab_size={size}; "
            f"use the model's tokenizer"
        )
    return tokenizer


def restore_params(cfg: Config, path: Path, *, tokenizer: str = "") -> tuple[Program, Params]:
    """Returns the program of a config, and the parameters of the newest valid checkpoint of a run.

    `path` is the workdir of the run, or one of its checkpoints. The parameters get the program's shardings.
    Raises ConfigError if `tokenizer`, the digest of the one in use, is not the run's, or if a key changes what
    the model computes.
    """
    model = build_model(cfg)
    program = assemble(cfg, Parts(model, optimizer_builder(cfg, model)))
    directory, found = find.find_valid(path, log=partial(print, file=sys.stderr))
    if not found.identity.get("tokenizer"):  # of a run of an older version
        digest = run_tokenizer.digest(find.workdir_of(path), found.config)
        found = dataclasses.replace(found, identity={"tokenizer": digest})
    resume.check(found, cfg.to_dict(), {"tokenizer": tokenizer}, source=directory, only="model.*")
    abstract_params = program.abstract_state.params
    return program, arrays.restore_params(directory, found.arrays, abstract_params)[0]
