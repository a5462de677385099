"""Generates text: restores a run's model, encodes prompts, and prints what the model writes."""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax

from meshtrain import console
from meshtrain.checkpoint import find, run_tokenizer
from meshtrain.config.build import BUILDERS
from meshtrain.config.schema import Config
from meshtrain.data import hub, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate, Message
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference import chat as chat_prompts
from meshtrain.inference import generation_config, sampling
from meshtrain.inference.generation_config import Defaults
from meshtrain.inference.restore import restore_params
from meshtrain.inference.sampling import Sampling

# Of models whose generation_config.json has no others.
DEFAULT_SAMPLING = {"temperature": 0.7}
DEFAULT_LENGTH = 400
DECODE_CONTEXT = 16  # earlier tokens that are decoded together with a new one


def run(
    cfg: Config,
    path: Path,
    *,
    texts: Sequence[str],
    sampling_flags: Mapping[str, float],
    length: int | None,
    num_return_sequences: int,
    context: int | None,
    stop: Sequence[str],
    tokenizer_path: str | None,
    bos: bool | None,
    chat: chat_prompts.Settings | None,
) -> int:
    """Prints the texts of prompts and how the run's model continues them; returns the exit code.

    `path` is the workdir of the run, or one of its checkpoints. `sampling_flags` are the values of
    `Sampling` that the user chose; the others, and a `length` of None, are those of the model's
    generation_config.json, or this project's. Each prompt is continued `num_return_sequences`
    times, by `length` tokens. The model sees the last `context` tokens; None: `longest_context`.
    `stop` are tokens that end a text, as ids or texts, and other texts before which it ends; empty:
    the tokenizer's end of a document, and what the model's files list. `tokenizer_path` None is the
    run's tokenizer, `bos` None means as in the run's data. With `chat`, a prompt is a message to a
    chat model, and only its reply is printed, which ends where the context is full; without
    `texts`, the messages of a conversation are read from stdin.
    """
    workdir = find.workdir_of(path)
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    is_imported = run_tokenizer.imported_config(workdir, cfg.to_dict()) is not None
    defaults = generation_config.read(folders)
    sampler = _sampler(sampling_flags, defaults)
    own_context = longest_context(cfg, is_imported=is_imported)
    context = own_context if context is None else context
    is_conversation = chat is not None and not texts
    if length is None:
        # A reply in a conversation ends by itself, at the latest when the context is full.
        length = defaults.length or (context if is_conversation else DEFAULT_LENGTH)
    context = check_lengths(cfg, length, context)
    faults = _sequence_faults(num_return_sequences, sampler, is_conversation=is_conversation)
    if chat is not None and bos is not None:
        faults.append("--bos and --chat: the chat template writes the token; use one of them")
    if faults:
        raise ConfigError(*faults)
    tokenizer = load_tokenizer(tokenizer_path, folders, workdir, cfg)
    vocab_size = cfg.model.options.get("vocab_size", tokenizer.vocab_size)
    end_tokens = {tokenizer.eos, *listed_end_tokens(folders, tokenizer)}
    stop_texts = defaults.stop
    template = None
    if chat is None:
        encode = _text_encoder(tokenizer, bos=_begins_with_bos(bos, tokenizer, folders))
    else:
        template = chat_prompts.load(tokenizer)
        end_tokens.update(chat_prompts.end_tokens(tokenizer, template, chat.arguments))
        encode = partial(chat_prompts.encode_first, tokenizer, template, chat)
    prompts = [_encode_prompt(encode, text, vocab_size) for text in texts]
    if stop:
        end_tokens, stop_texts = _stops(tokenizer, stop)
    notes = _long_prompts(prompts, context, own_context, chat=chat is not None)
    if chat is not None and notes:  # without the beginning of its template it is no conversation
        raise ConfigError(*notes)
    if chat is None and not notes:
        notes = _length_notes(prompts, length, context)
    notes = [*_default_notes(defaults, sampling_flags), *notes]
    if jax.process_index() == 0:
        for note in notes:
            console.say(note, stream="stderr")

    # Last, since it takes the most time: a fault of a flag is reported before.
    program, params = restore_params(
        without_stages(cfg), path, tokenizer=tokenizers.digest(tokenizer)
    )
    generate_rows = sampling.generator(
        program,
        params,
        context=context,
        dtype=cfg.train.dtype,
        # The embedding may have more rows than the tokenizer has tokens.
        sampling=dataclasses.replace(sampler, vocab_size=tokenizer.vocab_size),
        few_shapes=is_conversation,
    )
    if is_conversation:
        assert chat is not None and template is not None
        _converse(
            chat,
            encode=partial(_encode_messages, tokenizer, template, chat, vocab_size),
            reply=partial(
                _reply,
                tokenizer,
                generate_rows,
                length=length,
                context=context,
                end_tokens=end_tokens,
                stop_texts=stop_texts,
            ),
        )
        return 0
    ended: set[int] = set()
    full: list[int] = []  # replies that ended because the context was full
    prompts = [ids for ids in prompts for _ in range(num_return_sequences)]
    titles = _titles(len(texts), num_return_sequences)
    steps = generate_rows(prompts, length=length, stop=end_tokens, ended=ended)
    if chat is not None:
        steps = _within_context(steps, prompts, context, full)
    pieces = continue_texts(tokenizer, prompts, steps, ended, stop_texts)
    if jax.process_index() != 0:
        for _ in pieces:  # every process runs every step
            pass
        return 0
    print_texts(tokenizer, prompts, pieces, titles, replies_only=chat is not None)
    for number in full:
        console.say(
            f"reply {titles[number]} ends because prompt and reply fill the {context} tokens that "
            f"the model sees; use a shorter message{_or_context(context + 1, own_context)}",
            stream="stderr",
        )
    return 0


def _sequence_faults(
    num_return_sequences: int, sampler: Sampling, *, is_conversation: bool
) -> list[str]:
    """Returns a fault for what cannot be printed several times, or read by several processes."""
    faults = minimum_faults(1, {"--num_return_sequences": num_return_sequences})
    if num_return_sequences > 1 and sampler.temperature == 0:
        faults.append(
            f"--num_return_sequences={num_return_sequences}: with temperature 0 all texts of a "
            f"prompt are the same; use --temperature above 0"
        )
    if is_conversation and num_return_sequences > 1:
        faults.append(
            f"--num_return_sequences={num_return_sequences}: a conversation has one reply to each "
            f"message; give --prompt"
        )
    if is_conversation and jax.process_count() > 1:
        faults.append(
            f"--chat: {jax.process_count()} processes cannot read messages from one terminal; give "
            f"--prompt, or use one process"
        )
    return faults


def _sampler(flags: Mapping[str, float], defaults: Defaults) -> Sampling:
    """Returns how to sample; raises ConfigError for an invalid value, with where it is from."""
    try:
        return Sampling(**{**DEFAULT_SAMPLING, **defaults.sampling, **flags})
    except ConfigError as error:
        if not defaults.sampling:
            raise
        Sampling(**{**DEFAULT_SAMPLING, **flags})  # raises if the fault is in a flag
        raise ConfigError(f"{defaults.file}: {error}; or give the flag another value") from None


def _default_notes(defaults: Defaults, flags: Mapping[str, float]) -> list[str]:
    """Returns a line with the values that a file sets, and one with those that it sets in vain."""
    used = [f"{key}={value:g}" for key, value in defaults.sampling.items() if key not in flags]
    notes = []
    if used:
        notes.append(f"sampling: {', '.join(used)}, as {defaults.file} says; flags replace them")
    return [*notes, *defaults.notes()]


def _titles(num_prompts: int, num_return_sequences: int) -> list[str]:
    """Returns the title of each text: the number of its prompt, and of the text if it has more."""
    if num_return_sequences == 1:
        return [str(prompt) for prompt in range(num_prompts)]
    titles = []
    for prompt in range(num_prompts):
        titles += [f"{prompt}.{sequence}" for sequence in range(num_return_sequences)]
    return titles


# ---- conversations ----


def _converse(
    chat: chat_prompts.Settings,
    encode: Callable[[Sequence[Message]], list[int]],
    reply: Callable[[list[int]], str],
) -> None:
    """Prints the reply to each line of stdin, all of them messages of one conversation.

    What cannot be answered is reported, and is no part of the conversation.
    """
    messages = chat.begin()
    for line in chat_prompts.read_messages():
        if line.strip() == chat_prompts.CLEAR:
            messages = chat.begin()
            continue
        asked = [*messages, {"role": "user", "content": line}]
        try:
            said = reply(encode(asked))
        except ConfigError as error:
            console.say(str(error), stream="stderr")
            continue
        messages = [*asked, {"role": "assistant", "content": said}]


def _encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate,
    chat: chat_prompts.Settings,
    vocab_size: int,
    messages: Sequence[Message],
) -> list[int]:
    ids = chat_prompts.encode(tokenizer, template, messages, chat.arguments)
    _check_ids(ids, messages[-1]["content"], vocab_size)
    return ids


def _reply(
    tokenizer: Tokenizer,
    generate_rows: sampling.Generate,
    ids: list[int],
    *,
    length: int,
    context: int,
    end_tokens: Collection[int | None],
    stop_texts: Sequence[str],
) -> str:
    """Prints and returns the reply to a conversation; raises ConfigError if there is no room."""
    # A token is drawn after the model has seen all before it.
    room = context - len(ids) + 1
    if room < 1:
        raise ConfigError(
            f"the conversation has {len(ids)} tokens, more than the {context} that the model sees; "
            f"{chat_prompts.CLEAR} starts a new one"
        )
    ended: set[int] = set()
    steps = generate_rows([ids], length=min(length, room), stop=end_tokens, ended=ended)
    said = []
    for _, piece in continue_texts(tokenizer, [ids], steps, ended, stop_texts):
        console.say(piece, end="")
        said.append(piece)
    console.say("")
    return "".join(said)


# ---- how many tokens the model sees ----


def longest_context(cfg: Config, *, is_imported: bool) -> int | None:
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


def check_lengths(cfg: Config, length: int | None, context: int | None) -> int:
    """Returns `context`; raises ConfigError if the model cannot see as many tokens."""
    if context is None or length is None:
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


def without_stages(cfg: Config) -> Config:
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


def load_tokenizer(
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


def listed_end_tokens(folders: Sequence[Path], tokenizer: Tokenizer) -> list[int]:
    """Returns the ends of a text that the files of the run list, or those next to the tokenizer."""
    folders = run_tokenizer.with_tokenizer(folders, tokenizers.digest(tokenizer))
    if tokenizer.file is not None:
        folders.append(tokenizer.file.parent)
    return run_tokenizer.listed_end_tokens(folders)


def _begins_with_bos(bos: bool | None, tokenizer: Tokenizer, folders: Sequence[Path]) -> bool:
    """Returns `bos`; None: whether the run's documents, or a converted model's texts, begin so."""
    if bos is not None:
        return bos
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
    _check_ids(ids, text, vocab_size)
    return ids


def _check_ids(ids: Sequence[int], text: str, vocab_size: int) -> None:
    """Raises ConfigError if a prompt has no tokens, or tokens that the model does not have."""
    if not ids:
        raise ConfigError(f"--prompt={text!r}: has no tokens; use a longer prompt")
    if max(ids) >= vocab_size:  # JAX would clamp the index to the last row
        raise ConfigError(
            f"--prompt={text!r}: holds token {max(ids)}, but model.vocab_size={vocab_size}; "
            f"use the model's tokenizer with --tokenizer"
        )


def _stops(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[set[int | None], list[str]]:
    """Returns the tokens that end a text, and the texts before which it ends.

    A token is given as its id, or is a special token. Any other text ends what is generated
    wherever it is in it, also as part of a token.
    """
    tokens: set[int | None] = set()
    stop_texts = []
    for text in texts:
        # Digits of other alphabets are texts.
        if text.isascii() and text.isdecimal() and int(text) < tokenizer.vocab_size:
            tokens.add(int(text))
            continue
        try:  # a special token, which has no text
            token = tokenizers.load(tokenizer.file, eos=text).eos
        except (ConfigError, TypeError):
            token = None
        if token is not None and tokenizer.token_bytes()[token] == 0:
            tokens.add(token)
        elif text:
            stop_texts.append(text)
        else:
            raise ConfigError("--stop='': is empty; give a text, a special token, or an id")
    return tokens, stop_texts


# ---- tokens to text ----


class TextStream:
    """The text that generated tokens add to a prompt, up to the first of some stop texts.

    Incomplete characters, ends of lines and what may begin a stop text are held back. A token is
    decoded together with earlier ones: some decoders drop a space at the start of the text.
    """

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], stop_texts: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop_texts = stop_texts
        self._ids = list(ids)[-DECODE_CONTEXT:]
        self._decoded = tokenizer.decode(self._ids)
        self._held = ""  # decoded, and perhaps the beginning of a stop text
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Returns the text that is certain with this token; "" if none is."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # Half of a character, or of the end of a line, \r\n.
        if text.endswith(("\ufffd", "\r")):
            return ""
        new = text[len(self._decoded) :]
        self._ids = self._ids[-DECODE_CONTEXT:]
        self._decoded = self._tokenizer.decode(self._ids)
        return self._before_stop(new)

    def end(self) -> str:
        """Returns the text that is held back, up to a stop text."""
        new = self._tokenizer.decode(self._ids)[len(self._decoded) :]
        text = self._before_stop(new) + self._held
        self._held = ""
        return text

    def _before_stop(self, new: str) -> str:
        if self.is_stopped:
            return ""
        text = self._held + new
        starts = [text.find(stop) for stop in self._stop_texts if stop in text]
        if starts:
            self.is_stopped = True
            self._held = ""
            return text[: min(starts)]
        num_held = 0
        for stop in self._stop_texts:
            for size in range(num_held + 1, min(len(stop), len(text) + 1)):
                if text.endswith(stop[:size]):
                    num_held = size
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def continue_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    steps: Iterable[Sequence[int | None]],
    ended: set[int],
    stop_texts: Sequence[str],
) -> Iterator[tuple[int, str]]:
    """Yields the pieces of text that continue the prompts, each with the number of its prompt.

    `steps` are the next token of each prompt; None after its end. A text ends before the first of
    `stop_texts`; its number is then added to `ended`.
    """
    streams = [TextStream(tokenizer, ids, stop_texts) for ids in prompts]
    for step in steps:
        for number, token in enumerate(step):
            if token is None or streams[number].is_stopped:
                continue
            yield number, streams[number].add(token)
            if streams[number].is_stopped:
                ended.add(number)
    for number, stream in enumerate(streams):
        yield number, stream.end()


def print_texts(
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    pieces: Iterable[tuple[int, str]],
    titles: Sequence[str],
    *,
    replies_only: bool,
) -> None:
    """Prints a single text piece by piece, or several texts once all are complete.

    With `replies_only` the prompts are left out. `pieces` are those of `continue_texts`.
    """
    begins = ["" if replies_only else tokenizer.decode(ids) for ids in prompts]
    if len(prompts) == 1:
        console.say(begins[0], end="")
        for _, piece in pieces:
            console.say(piece, end="")
        console.say("")
        return
    texts = begins
    for number, piece in pieces:
        texts[number] += piece
    for title, text in zip(titles, texts, strict=True):
        console.say(f"--- {title}\n{text}")
