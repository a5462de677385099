"""Generates text: restores a run's model, encodes prompts, and prints what the model writes."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import jax

from meshtrain import console
from meshtrain.checkpoint import find, run_tokenizer
from meshtrain.config.build import BUILDERS
from meshtrain.config.schema import Config
from meshtrain.data import hub, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference import chat as chat_prompts
from meshtrain.inference import sampling
from meshtrain.inference.restore import restore_params
from meshtrain.inference.sampling import Sampling

DECODE_CONTEXT = 16  # earlier tokens that are decoded together with a new one


def run(
    cfg: Config,
    path: Path,
    *,
    texts: Sequence[str],
    sampler: Sampling,
    length: int,
    context: int | None,
    stop: Sequence[str],
    tokenizer_path: str | None,
    bos: bool | None,
    chat: bool,
) -> int:
    """Prints the texts of prompts and how the run's model continues them; returns the exit code.

    `path` is the workdir of the run, or one of its checkpoints. `length` tokens are generated. The
    model sees the last `context` tokens; None: see `_own_context`. `stop` are tokens that end a
    text, as ids or texts; empty: the tokenizer's end of a document, and those that the model's
    files list. `tokenizer_path` None is the run's tokenizer, `bos` None means as in the run's data.
    With `chat`, a prompt is a message to a chat model, and only its reply is printed, which ends
    where the context is full.
    """
    workdir = find.workdir_of(path)
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    is_imported = run_tokenizer.imported_config(workdir, cfg.to_dict()) is not None
    own_context = _own_context(cfg, is_imported=is_imported)
    context = _check_lengths(cfg, length, own_context if context is None else context)
    tokenizer = _load_tokenizer(tokenizer_path, folders, workdir, cfg)
    end_tokens = {tokenizer.eos, *_listed_end_tokens(folders, tokenizer)}
    if chat:
        if bos is not None:
            raise ConfigError(
                "--bos and --chat: the chat template writes the token; use one of them"
            )
        template = chat_prompts.load(tokenizer)
        encode = functools.partial(chat_prompts.encode, tokenizer, template)
        end_tokens.update(chat_prompts.end_tokens(tokenizer, template))
    else:
        if bos is None:
            bos = _begins_with_bos(tokenizer, folders)
        encode = _text_encoder(tokenizer, bos=bos)
    vocab_size = cfg.model.options.get("vocab_size", tokenizer.vocab_size)
    prompts = [_encode_prompt(encode, text, vocab_size) for text in texts]
    if stop:
        end_tokens = {_token_id(tokenizer, text) for text in stop}
    notes = _long_prompts(prompts, context, own_context, chat=chat)
    if chat and notes:  # without the beginning of its template it is no conversation
        raise ConfigError(*notes)
    if not chat and not notes:
        notes = _length_notes(prompts, length, context)
    if jax.process_index() == 0:
        for note in notes:
            console.say(note, stream="stderr")

    # Last, since it takes the most time: a fault of a flag is reported before.
    program, params = restore_params(
        _without_stages(cfg), path, tokenizer=tokenizers.digest(tokenizer)
    )
    steps = sampling.generate(
        program,
        params,
        prompts,
        length=length,
        context=context,
        dtype=cfg.train.dtype,
        # The embedding may have more rows than the tokenizer has tokens.
        sampling=dataclasses.replace(sampler, vocab_size=tokenizer.vocab_size),
        stop=end_tokens,
    )
    full: list[int] = []  # replies that ended because the context was full
    if chat:
        steps = _within_context(steps, prompts, context, full)
    if jax.process_index() == 0:
        print_texts(tokenizer, prompts, steps, replies_only=chat)
        for number in full:
            console.say(
                f"reply {number} ends because prompt and reply fill the {context} tokens that the "
                f"model sees; use a shorter message{_or_context(context + 1, own_context)}",
                stream="stderr",
            )
    else:
        for _ in steps:  # every process runs every step
            pass
    return 0


# ---- how many tokens the model sees ----


def _own_context(cfg: Config, *, is_imported: bool) -> int | None:
    """Returns how many tokens a model can see; None: its run does not say.

    An imported model, also if it was trained further, has been trained with max_seq_len tokens
    before. Any other model knows the length of the rows that it was trained with.
    """
    model = cfg.model.options
    seq_len = cfg.data.options.get("seq_len")
    max_positions = _max_positions(cfg)
    lengths = [seq_len, model.get("max_seq_len") if is_imported else None]
    own = max(filter(None, lengths), default=max_positions)
    return min(own, max_positions) if own and max_positions else own


def _max_positions(cfg: Config) -> int | None:
    """Returns the number of rows of a table of positions; None: there is no table."""
    model = cfg.model.options
    return model.get("max_seq_len") if model.get("positions") == "learned" else None


def _check_lengths(cfg: Config, length: int, context: int | None) -> int:
    """Returns `context`; raises ConfigError if the model cannot see as many tokens."""
    if context is None:
        raise ConfigError("--context: the run's data has no data.seq_len; set --context=N")
    max_positions = _max_positions(cfg)
    faults = minimum_faults(1, {"--length": length, "--context": context})
    if max_positions and context > max_positions:
        faults.append(
            f"--context={context}: is more than model.max_seq_len={max_positions} positions; "
            f"use less"
        )
    if faults:
        raise ConfigError(*faults)
    return context


def _long_prompts(
    prompts: Sequence[list[int]], context: int, own_context: int | None, *, chat: bool
) -> list[str]:
    """Returns a line for each prompt that is longer than `context`."""
    lines = []
    for number, ids in enumerate(prompts):
        size, excess = len(ids), len(ids) - context
        if excess <= 0:
            continue
        if chat:
            fault = f"it has {size} tokens with the chat template, {excess} more than the {context}"
            fault += " that the model sees; use a shorter message"
        else:
            fault = f"its first {excess} of {size} tokens are dropped: the model sees the last "
            fault += f"{context}; use a shorter prompt"
        lines.append(f"prompt {number}: {fault}{_or_context(size, own_context)}")
    return lines


def _or_context(num_tokens: int, own_context: int | None) -> str:
    """Returns the other way out for a prompt of `num_tokens`, if the model can see as many."""
    if own_context is None or num_tokens > own_context:
        return ""
    return f", or --context={num_tokens}"


def _length_notes(prompts: Sequence[list[int]], length: int, context: int) -> list[str]:
    """Returns a line if texts may become longer than `context`."""
    longest = max(map(len, prompts))
    if longest + length <= context:
        return []
    newest = sampling.kept_tokens(context)
    return [
        f"--length={length}: with the prompt it is more than the {context} tokens that the model "
        f"sees; a text that reaches them continues with its newest {newest} alone"
    ]


def _within_context(
    steps: Iterable[Sequence[int | None]],
    prompts: Sequence[list[int]],
    context: int,
    full: list[int],
) -> Iterator[list[int | None]]:
    """Yields the tokens of `steps` for which the model has seen the complete prompt.

    A reply beyond them ends, and its number is appended to `full`.
    """
    for number, row in enumerate(steps):
        tokens = list(row)
        for index, ids in enumerate(prompts):
            # The model has seen the prompt and the `number` tokens before this one.
            if tokens[index] is not None and len(ids) + number > context:
                tokens[index] = None
                if index not in full:
                    full.append(index)
        if all(token is None for token in tokens):
            return
        yield tokens


def _without_stages(cfg: Config) -> Config:
    """Returns the settings with the pipeline's devices as further shards of the parameters.

    A token passes all stages one after the other, so stages would only wait for each other. No
    device needs more memory than with mesh.fsdp.
    """
    if cfg.mesh.pipeline == 1:
        return cfg
    mesh = dataclasses.replace(cfg.mesh, pipeline=1, fsdp=cfg.mesh.fsdp * cfg.mesh.pipeline)
    # Below stage 3 of ZeRO, fsdp would replicate the parameters that the stages shard.
    train = dataclasses.replace(cfg.train, zero_stage=3)
    return dataclasses.replace(cfg, mesh=mesh, train=train)


# ---- text to tokens ----


# Of GPT-2, with the rows that fill its embedding up to a multiple of 64.
GPT2_SIZES = range(50257, 50305)


def _load_tokenizer(
    path: str | None, folders: Sequence[Path], workdir: Path, cfg: Config
) -> Tokenizer:
    """Returns the tokenizer in `path`, or in the first folder that has one, or bytes.

    Raises ConfigError if the run was trained on tokens of which nothing says how they were made.
    """
    model_vocab_size = cfg.model.options.get("vocab_size", 0)  # 0: the model has no such key
    if not path:
        path = next((str(folder) for folder in folders if tokenizers.has_tokenizer(folder)), None)
    reason = f"model.vocab_size={model_vocab_size} is more than the 256 bytes"
    if raw := _raw_tokens(cfg):
        reason = f"it was trained on the token ids in {raw}, of which no file says how to read them"
    if not path and (raw or model_vocab_size > 256):
        likely = ""
        if model_vocab_size in GPT2_SIZES:
            likely = f"; GPT-2's comes with: {hub.command('openai-community/gpt2', hub.TOKENIZER)}"
        raise ConfigError(
            f"--workdir={workdir}: {reason}, and the run has no tokenizer; use --tokenizer=PATH of "
            f"a tokenizer.json or a SentencePiece model{likely}"
        )
    tokenizer = tokenizers.load(path or "bytes")
    if path and tokenizer.vocab_size > model_vocab_size > 0:
        raise ConfigError(
            f"--tokenizer={path}: has {tokenizer.vocab_size} tokens, but "
            f"model.vocab_size={model_vocab_size}; use the model's tokenizer"
        )
    return tokenizer


def _raw_tokens(cfg: Config) -> str:
    """Returns the path of the raw token ids that a run was trained on; empty for other data."""
    data = cfg.data.options
    path = data.get("path", "")
    if cfg.data.build != BUILDERS["data"][0] or not isinstance(path, str) or not path:
        return ""
    is_raw = path.endswith(".npy") or data.get("dtype") not in ("", "uint8", None)
    return path if is_raw or tokens.nanogpt_files(path) else ""


def _listed_end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> list[int]:
    """Returns the ends of a text that the files of the run list, or those next to the tokenizer."""
    folders = run_tokenizer.with_tokenizer(folders, tokenizers.digest(tokenizer))
    if tokenizer.file is not None:
        folders.append(tokenizer.file.parent)
    return run_tokenizer.listed_end_tokens(folders)


def _begins_with_bos(tokenizer: Tokenizer, folders: Sequence[Path]) -> bool:
    """Returns whether the run's documents began with bos; of a converted model, its texts."""
    if any(map(tokenizers.is_of_prepared_data, folders)):
        return any(map(tokenizers.has_bos, folders))
    return tokenizer.adds_bos


def _text_encoder(tokenizer: Tokenizer, *, bos: bool) -> Callable[[str], list[int]]:
    """Returns the function from a text to its tokens, after the tokenizer's bos if requested."""
    if bos and tokenizer.bos is None:
        raise ConfigError(
            f"--bos: tokenizer {tokenizer.file or 'bytes'} has no begin-of-document token; "
            f"use --no-bos"
        )
    prefix = [tokenizer.bos] if bos else []
    return lambda text: prefix + tokenizer.encode(text).tolist()


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
    # Digits of other alphabets are texts.
    if text.isascii() and text.isdecimal() and int(text) < tokenizer.vocab_size:
        return int(text)
    ids = tokenizer.encode(text).tolist()
    if len(ids) == 1:
        return ids[0]
    try:  # a special token, which encode never returns
        token = tokenizers.load(tokenizer.file, eos=text).eos
    except (ConfigError, TypeError):
        token = None
    if token is None:
        raise ConfigError(f"--stop={text!r}: is not a single token of the tokenizer; use its id")
    return token


# ---- tokens to text ----


def print_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    steps: Iterable[Sequence[int | None]],
    *,
    replies_only: bool = False,
) -> None:
    """Prints a single text token by token, or several texts once all are complete.

    With `replies_only` the prompts are left out. `steps` are the next token of each prompt; None
    after its end.
    """
    if len(prompts) == 1:
        (ids,) = prompts
        console.say("" if replies_only else tokenizer.decode(ids), end="")
        for text in stream_text(tokenizer, ids, (token for (token,) in steps)):
            console.say(text, end="")
        console.say("")
        return
    rows = zip(*steps, strict=True)
    for number, (ids, row) in enumerate(zip(prompts, rows, strict=True)):
        new = [token for token in row if token is not None]
        text = tokenizer.decode(new if replies_only else [*ids, *new])
        console.say(f"--- {number}\n{text}")


def stream_text(
    tokenizer: Tokenizer, ids: Sequence[int], tokens: Iterable[int | None]
) -> Iterator[str]:
    """Yields the text that each token adds to `ids`, up to the first None.

    Incomplete characters and ends of lines are held back. A token is decoded together with earlier
    ones: some decoders drop a space at the start of the text.
    """
    ids = list(ids)[-DECODE_CONTEXT:]
    printed = tokenizer.decode(ids)
    for token in itertools.takewhile(lambda token: token is not None, tokens):
        ids.append(token)
        text = tokenizer.decode(ids)
        # Half of a character, or of the end of a line, \r\n.
        if text.endswith(("\ufffd", "\r")):
            continue
        yield text[len(printed) :]
        ids = ids[-DECODE_CONTEXT:]
        printed = tokenizer.decode(ids)
    yield tokenizer.decode(ids)[len(printed) :]
