"""Tokenizers: UTF-8 bytes, a Hugging Face tokenizer.json, or a SentencePiece model."""

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import console, errors, foreign
from meshtrain.data import chat_template, files, hub, prepared, split_points
from meshtrain.errors import ConfigError

# V vocabulary

FILES = ("tokenizer.json", "tokenizer.model")  # file names of a tokenizer in a folder
PIECE_CHARS = 1 << 20  # a long text is tokenized in pieces of about this size, if it can be split


@dataclass(frozen=True)
class Tokenizer:
    """Converts text into token ids below `vocab_size`, and back.

    Special tokens spelled in a text are encoded as text. `encode_batch` returns an int32 array per
    text, without special tokens; `decode` skips special tokens, and writes U+FFFD for invalid
    UTF-8.
    `token_bytes` returns the number of text bytes of each token (V,): 0 for special tokens.
    """

    kind: str  # "bytes", "huggingface" or "sentencepiece"
    vocab_size: int
    eos: int | None  # ends a document
    bos: int | None  # begins a document, if `adds_bos` or requested
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Iterable[int | np.integer]], str]
    token_bytes: Callable[[], np.ndarray]
    spelling: Callable[[int], str]  # the name of a token in its vocabulary
    # text -> the last index at which a split does not change its tokens; 0: there is none
    last_split_point: Callable[[str], int]
    file: Path | None = None
    adds_bos: bool = False  # whether its documents, or the texts of its model, begin with `bos`
    # The texts of `eos` and `bos` that only tokenizer_config.json tells, by its keys.
    configured: Mapping[str, str] = field(default_factory=dict)
    warnings: Sequence[str] = ()  # lines to log before it tokenizes data

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (int32) of a text of any length."""
        return np.concatenate([np.zeros(0, np.int32), *self.encode_batch(self.pieces(text))])

    def pieces(self, text: str) -> list[str]:
        """Splits the text into pieces; their concatenated tokens are the tokens of the text."""
        pieces = []
        start = 0
        end = PIECE_CHARS
        while end < len(text):
            split = self.last_split_point(text[start:end])
            if split:
                pieces.append(text[start : start + split])
                start += split
                end = start + PIECE_CHARS
            else:
                # Double the range, so that the search for a split point takes linear time.
                end = start + 2 * (end - start)
        return [*pieces, text[start:]]


def load(path: str | Path, eos: str = "") -> Tokenizer:
    """Returns the tokenizer "bytes", or the one in a file or in a folder.

    A folder has one of FILES, or was written by `meshtrain prepare`. The tokens that end and begin
    documents are those of the prepared documents, else those in tokenizer_config.json, else the
    first with a well-known spelling. `eos` overrides the token that ends documents. Raises
    ConfigError if there is no such tokenizer.
    """
    if str(path) == "bytes":
        return _with_eos(_bytes(), eos, {})
    path = Path(path)
    accepted = "use bytes, a tokenizer.json, a SentencePiece .model, or a folder with one"
    fault = files.path_fault(path)
    if fault:
        name = str(path)
        if fault == files.MISSING and hub.is_name(name):
            accepted += (
                f"; if it is a model on the Hugging Face hub, run: "
                f"{hub.command(name, hub.TOKENIZER)}; then use {hub.folder_of(name)}"
            )
        raise ConfigError(f"tokenizer {path}: {fault}; {accepted}")
    entry = {}
    if path.is_dir():
        entry = entry_of(path)
        if entry.get("kind") == "bytes":
            return _with_eos(_bytes(), eos, {})
        names = [entry["file"]] if entry else FILES
        existing = [path / name for name in names if (path / name).is_file()]
        if not existing:
            raise ConfigError(f"tokenizer {path}: no {' or '.join(names)} in that folder")
        path = existing[0]
    try:
        with foreign.open_file(path) as file:
            start = file.read(64)
    except OSError as error:
        raise ConfigError(f"tokenizer {path}: {error.strerror}; {accepted}") from None
    if not start:
        raise ConfigError(f"tokenizer {path}: is empty; {accepted}")
    is_json = path.suffix == ".json" or start.lstrip()[:1] == b"{"
    tokenizer, ids = _huggingface(path) if is_json else _sentencepiece(path)
    tokenizer = _with_config(tokenizer, ids, chat_template.read_config(path.parent))
    if entry:
        bos = entry.get("bos")
        tokenizer = dataclasses.replace(
            tokenizer,
            eos=entry["eos"],
            bos=tokenizer.bos if bos is None else bos,
            adds_bos=bos is not None,
        )
    return _with_eos(tokenizer, eos, ids)


def _with_config(
    tokenizer: Tokenizer, ids: Mapping[str, int], config: Mapping[str, Any]
) -> Tokenizer:
    """Returns the tokenizer with the special tokens that a tokenizer_config.json names."""
    named = chat_template.special_tokens(config)
    eos = ids.get(named.get("eos_token", ""), tokenizer.eos)
    bos = ids.get(named.get("bos_token", ""), tokenizer.bos)
    configured = {}
    if eos != tokenizer.eos:
        configured["eos_token"] = named["eos_token"]
    if bos != tokenizer.bos:
        configured["bos_token"] = named["bos_token"]
    return dataclasses.replace(
        tokenizer,
        eos=eos,
        bos=bos,
        adds_bos=bos is not None and config.get("add_bos_token") is True,
        configured=configured,
    )


def _with_eos(tokenizer: Tokenizer, eos: str, ids: Mapping[str, int]) -> Tokenizer:
    if not eos:
        return tokenizer
    if eos not in ids:
        raise ConfigError(f"--eos={eos}: tokenizer {tokenizer.file or 'bytes'} has no such token")
    return dataclasses.replace(tokenizer, eos=ids[eos])


# ---- the tokenizer of a folder, without loading it ----


def has_tokenizer(folder: Path) -> bool:
    """Returns True if a folder contains a tokenizer file or a manifest, which names one."""
    return any((folder / name).is_file() for name in (*FILES, prepared.MANIFEST))


def is_of_prepared_data(folder: Path) -> bool:
    """Returns True if `folder` has the tokenizer of prepared data, or its copy."""
    return folder.is_dir() and bool(entry_of(folder))


def has_bos(folder: Path) -> bool:
    """Returns True if `folder` is a prepared folder whose documents begin with `bos`."""
    return is_of_prepared_data(folder) and entry_of(folder).get("bos") is not None


def digest_of(folder: Path) -> str:
    """Returns the digest of a folder's tokenizer, as manifests store it; "": there is none."""
    return next(iter(digests_of(folder)), "")


def digests_of(folder: Path) -> list[str]:
    """Returns the digest of each file that a folder's tokenizer may be loaded from."""
    entry = entry_of(folder) if folder.is_dir() else {}
    if entry:
        return [entry["sha256"]]
    paths = [folder / name for name in FILES]
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()]


def digest(tokenizer: Tokenizer) -> str:
    """Returns the digest of a tokenizer: of its file, or BYTES."""
    file = tokenizer.file
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else BYTES


def entry_of(folder: Path) -> dict[str, Any]:
    """Returns the tokenizer's entry in a prepared folder's manifest; {} without a manifest."""
    try:
        manifest = foreign.read_json(folder / prepared.MANIFEST)
        return {**prepared.tokenizer_entry(manifest)}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / prepared.MANIFEST} cannot be read: {error}") from None


def added_bytes(path: Path) -> np.ndarray:
    """Returns how many bytes a tokenizer added to the token after each one of documents, (V,).

    Many tokenizers put a space before a text. It is part of the first token, which is a target if
    the document begins with `bos`. `path` is a tokenizer's file, or a prepared folder.
    """
    entry = entry_of(path) if path.is_dir() else {}
    if entry and entry["bos"] is None:
        return np.zeros(entry["vocab_size"], np.int32)
    loaded = load(path)
    added_V = np.zeros(loaded.vocab_size, np.int32)
    if loaded.adds_bos:
        first = loaded.encode("a")
        added_V[loaded.bos] = max(loaded.token_bytes()[first].sum() - len("a"), 0)
    return added_V


# ---- bytes ----

BYTES = "bytes"  # kind and digest of the tokenizer of bytes
BYTES_ENTRY = {
    "kind": BYTES,
    "file": None,
    "sha256": BYTES,
    "vocab_size": 256,
    "eos": 0,
    "bos": None,
}


def _bytes() -> Tokenizer:
    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        if any("\0" in text for text in texts):
            raise ConfigError(
                "the text holds a NUL character, which the tokenizer `bytes` uses to end documents"
            )
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Iterable[int | np.integer]) -> str:
        return bytes(int(token) for token in ids if token).decode(errors="replace")

    return Tokenizer(
        "bytes",
        vocab_size=256,
        eos=0,
        bos=None,
        encode_batch=encode_batch,
        decode=decode,
        token_bytes=lambda: np.arange(256, dtype=np.int32).clip(max=1),
        spelling=chr,
        last_split_point=len,
    )


# ---- tokenizer.json ----

# Without a tokenizer_config.json the first of these in a tokenizer.json ends documents; --eos
# selects another token.
EOS_TOKENS = (
    "<|endoftext|>",
    "</s>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<|im_end|>",
    "<eos>",
)

BOS_TOKENS = ("<s>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>")


MAX_FILE_BYTES = 1 << 29  # of a tokenizer.json or a SentencePiece model
MAX_GROWTH = 1000  # characters that the replacements of a tokenizer may make of one


@contextlib.contextmanager
def reporting_faults(path: Path, fault: str) -> Iterator[None]:
    """Raises ConfigError for any error of the package that reads the tokenizer in `path`.

    A panic of Rust is no Exception, and prints a page to stderr before it is raised. So what
    arrives there during the block is kept, and printed only if there was none.
    """
    with console.keeping_stderr() as discard:
        try:
            yield
        except (ConfigError, MemoryError):
            raise
        except BaseException as error:
            is_panic = type(error).__name__ == "PanicException"
            if is_panic:
                discard()
            elif not isinstance(error, Exception):
                raise  # Ctrl-C
            raise ConfigError(f"tokenizer {path} {fault}: {error}") from None


def read_model(path: Path) -> tuple[Any, list[str]]:
    """Returns the `tokenizers.Tokenizer` in a tokenizer.json, and what was switched off in it.

    It encodes a text of any length, and always to the same tokens: without truncation, padding and
    dropout. Raises ConfigError if it is damaged, or claims sizes that do not fit that of its file.
    """
    tokenizers = errors.import_optional("tokenizers")
    with reporting_faults(path, "is not a tokenizer.json"):
        content = foreign.read_bytes(path, max_bytes=MAX_FILE_BYTES)
        model = tokenizers.Tokenizer.from_buffer(content)
        model.no_truncation()
        model.no_padding()
        growth = _growth(foreign.parse_json(model.to_str().encode()))
        ids = model.get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    # A token takes several bytes of the file, and ids count from 0.
    if not 0 <= largest < len(content):
        raise ConfigError(
            f"tokenizer {path}: its largest token id is {largest}, in a file of {len(content)} "
            f"bytes; download it again"
        )
    if growth > MAX_GROWTH:
        raise ConfigError(
            f"tokenizer {path}: its replacements may make {growth:,} characters of one; remove "
            f"some of them"
        )
    warnings = []
    # BPE dropout leaves out merges at random: other tokens each time a text is encoded.
    dropout = getattr(model.model, "dropout", None)
    if dropout:
        model.model.dropout = None
        warnings.append(
            f"tokenizer {path}: sets dropout={dropout:.3g}, which makes tokens random; it is "
            f"ignored, so a text always has the same tokens"
        )
    return model, warnings


def _growth(tokenizer_json: dict) -> int:
    """Returns how many characters the replacements of a tokenizer may make of one."""
    growth = 1
    for step in split_points.steps(tokenizer_json, "normalizer", "decoder"):
        if step["type"] == "Replace":
            replaced = len(step["pattern"].get("String", "")) or 1
            growth *= max(1, -(-len(step["content"]) // replaced))
    return growth


def _huggingface(path: Path) -> tuple[Tokenizer, dict[str, int]]:
    """Returns the tokenizer in a tokenizer.json, and the id of each token."""
    model, warnings = read_model(path)
    tokenizer_json = json.loads(model.to_str())
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    special = {token["content"] for token in tokenizer_json["added_tokens"] if token["special"]}

    def first_id(tokens: Sequence[str]) -> int | None:
        return next((ids[token] for token in tokens if token in special), None)

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        arrays = []
        for group in _group_texts(texts):
            with reporting_faults(path, "fails"):
                encodings = model.encode_batch_fast(group, add_special_tokens=False)
            for encoding in encodings:
                arrays.append(np.array(encoding.ids, np.int32))
        return arrays

    def decode(tokens: Iterable[int | np.integer]) -> str:
        with reporting_faults(path, "fails"):
            return model.decode([int(token) for token in tokens], skip_special_tokens=True)

    can_split = split_points.can_split(tokenizer_json)
    tokenizer = Tokenizer(
        "huggingface",
        vocab_size=max(ids.values()) + 1,
        eos=first_id(EOS_TOKENS),
        bos=first_id(BOS_TOKENS),
        encode_batch=encode_batch,
        decode=decode,
        token_bytes=lambda: _token_bytes(ids, tokenizer_json),
        spelling=model.id_to_token,
        last_split_point=split_points.last_split_point if can_split else lambda text: 0,
        file=path,
        warnings=warnings,
    )
    return tokenizer, ids


def _group_texts(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields lists of about PIECE_CHARS characters: larger batches would need much memory."""
    group: list[str] = []
    for text in texts:
        group.append(text)
        if sum(map(len, group)) >= PIECE_CHARS:
            yield group
            group = []
    yield group


def _token_bytes(ids: dict[str, int], tokenizer_json: dict) -> np.ndarray:
    """Returns the number of text bytes of each token (V,).

    Exact for byte-level vocabularies, and for vocabularies with a byte fallback.
    """
    is_special = {token["content"]: token["special"] for token in tokenizer_json["added_tokens"]}
    steps = split_points.steps(tokenizer_json, "pre_tokenizer", "decoder")
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    prefix = tokenizer_json["model"].get("continuing_subword_prefix") or ""
    sizes_V = np.zeros(max(ids.values()) + 1, np.int32)
    for token, number in ids.items():
        if token in is_special:
            size = 0 if is_special[token] else len(token.encode())
        elif is_byte_level:
            size = len(token)  # such a vocabulary spells each byte as one character
        else:
            size = _piece_bytes(token.removeprefix(prefix))
        sizes_V[number] = size
    return sizes_V


def _piece_bytes(piece: str) -> int:
    """Returns the number of text bytes of a vocabulary entry.

    It is 1 for an entry such as <0x0A>, and for the character that stands for a space.
    """
    if re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return 1
    return len(piece.replace("\u2581", " ").encode())


# ---- SentencePiece ----


def _sentencepiece(path: Path) -> tuple[Tokenizer, dict[str, int]]:
    """Returns the tokenizer in a SentencePiece model, and the id of each token."""
    sentencepiece = errors.import_optional("sentencepiece")
    with reporting_faults(path, "is not a SentencePiece model"):
        content = foreign.read_bytes(path, max_bytes=MAX_FILE_BYTES)
        model = sentencepiece.SentencePieceProcessor(model_proto=content)
    size = model.get_piece_size()
    ids = {model.id_to_piece(number): number for number in range(size)}

    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        with reporting_faults(path, "fails"):
            return [np.array(model.encode(text), np.int32) for text in texts]

    def decode(tokens: Iterable[int | np.integer]) -> str:
        with reporting_faults(path, "fails"):
            return model.decode([int(token) for token in tokens])

    def token_bytes() -> np.ndarray:
        sizes = []
        for piece, number in ids.items():
            if model.is_control(number) or model.is_unknown(number) or model.is_unused(number):
                sizes.append(0)
            else:
                sizes.append(_piece_bytes(piece))
        return np.array(sizes, np.int32)

    tokenizer = Tokenizer(
        "sentencepiece",
        vocab_size=size,
        eos=model.eos_id() if model.eos_id() >= 0 else None,
        bos=model.bos_id() if model.bos_id() >= 0 else None,
        encode_batch=encode_batch,
        decode=decode,
        token_bytes=token_bytes,
        spelling=model.id_to_piece,
        last_split_point=lambda text: 0,
        file=path,
    )
    return tokenizer, ids
