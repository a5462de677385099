"""Text to tokens and back: UTF-8 bytes, a Hugging Face tokenizer.json, or a SentencePiece model."""

import dataclasses
import hashlib
import importlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain.data import prepared as manifest
from meshtrain.data import split_points as cutting
from meshtrain.errors import ConfigError

# V vocabulary

PIECE = 1 << 20  # characters of a long text that are tokenised at a time, where it can be cut
FILES = ("tokenizer.json", "tokenizer.model")  # what a tokenizer is called in a folder
# What ends a document, the first that a tokenizer.json has; --eos names another.
EOS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "<eos>")
BOS = ("<s>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>", "<bos>")


@dataclass(frozen=True)
class Tokenizer:
    """What turns text into ids below `vocab_size`, and back.

    Special tokens that stand in a text are text. `encode_batch` gives an int32 array for each text and
    adds nothing; `decode` leaves special tokens out, and puts U+FFFD where bytes are no UTF-8.
    `token_bytes` (V,) is how many bytes of text each token stands for: 0 for special ones.
    """

    kind: str  # "bytes", "huggingface" or "sentencepiece"
    vocab_size: int
    eos: int | None  # ends a document
    bos: int | None  # begins one, where that is asked for
    encode_batch: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[Iterable[int]], str]
    token_bytes: Callable[[], np.ndarray]
    last_border: Callable[
        [str], int
    ]  # where a text can be cut for certain, the last place; 0: none
    file: Path | None = None

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids (int32) of a text, which may be long."""
        return np.concatenate([np.zeros(0, np.int32), *self.encode_batch(self.pieces(text))])

    def pieces(self, text: str) -> list[str]:
        """Returns the text in parts whose tokens, one after the other, are its own."""
        pieces, start, end = [], 0, PIECE
        while end < len(text):
            border = self.last_border(text[start:end])
            if border:
                pieces.append(text[start : start + border])
                start += border
            # Where nothing can be cut, look twice as far, so that looking takes linear time.
            end = start + PIECE if border else start + 2 * (end - start)
        return [*pieces, text[start:]]


def load(path: str | Path, eos: str = "") -> Tokenizer:
    """Returns the tokenizer "bytes", of a file, or of a folder with one in it (a prepared one, too).

    `eos` is the token that ends documents, where it is not the usual one. Raises ConfigError.
    """
    if str(path) == "bytes":
        return _with_eos(_bytes(), eos, {})
    path, prepared = Path(path), {}
    if path.is_dir():
        prepared = _tokenizer_of(path)
        if prepared.get("kind") == "bytes":
            return _with_eos(_bytes(), eos, {})
        names = [prepared["file"]] if prepared else FILES
        found = [path / name for name in names if (path / name).is_file()]
        if not found:
            raise ConfigError(f"tokenizer {path}: no {' or '.join(names)} in that folder")
        path = found[0]
    try:
        with open(path, "rb") as file:
            is_json = path.suffix == ".json" or file.read(64).lstrip()[:1] == b"{"
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path}: {error.strerror}; use bytes, a tokenizer.json, a SentencePiece .model, "
            f"or a folder with one"
        ) from None
    tokenizer = (_huggingface if is_json else _sentencepiece)(path, eos)
    if prepared and not eos:
        return dataclasses.replace(tokenizer, eos=prepared["eos"])
    return tokenizer


def is_in(folder: Path) -> bool:
    """Whether a folder says what its tokenizer is, by a file of it or a manifest."""
    return any((folder / name).is_file() for name in (*FILES, manifest.NAME))


def begins_documents(folder: Path) -> bool:
    """Whether the documents of a prepared folder begin with `bos`; False for any other folder or file."""
    return folder.is_dir() and _tokenizer_of(folder).get("bos") is not None


def digest_in(folder: Path) -> str:
    """Returns what tells the tokenizer in a folder from others, as manifests have it; "" where there is none."""
    if folder.is_dir() and (found := _tokenizer_of(folder)):
        return found["sha256"]
    files = (folder / name for name in FILES)
    file = next((file for file in files if file.is_file()), None)
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else ""


def _tokenizer_of(folder: Path) -> dict[str, Any]:
    """Returns what the manifest of a prepared folder says of its tokenizer; {} where there is none."""
    try:
        return json.loads((folder / manifest.NAME).read_text())["tokenizer"]
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / manifest.NAME} cannot be read: {error}") from None


# ---- bytes ----


def _bytes() -> Tokenizer:
    def encode_batch(texts: Sequence[str]) -> list[np.ndarray]:
        if any("\0" in text for text in texts):
            raise ConfigError("the text holds a NUL character, which ends documents of bytes")
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(ids: Iterable[int]) -> str:
        return bytes(int(one) for one in ids if one).decode(errors="replace")

    return Tokenizer(
        "bytes",
        vocab_size=256,
        eos=0,
        bos=None,
        encode_batch=encode_batch,
        decode=decode,
        token_bytes=lambda: np.arange(256, dtype=np.int32).clip(max=1),
        last_border=len,
    )


# ---- tokenizer.json ----


def _huggingface(path: Path, eos: str) -> Tokenizer:
    tokenizers = needed("tokenizers")
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
        described = json.loads(model.to_str())
    except Exception as error:  # it raises nothing more precise
        raise ConfigError(f"tokenizer {path} is no tokenizer.json: {error}") from None
    model.no_truncation()
    model.no_padding()
    model.encode_special_tokens = True
    ids = model.get_vocab(with_added_tokens=True)
    special = {one["content"] for one in described["added_tokens"] if one["special"]}
    tokenizer = Tokenizer(
        "huggingface",
        vocab_size=max(ids.values()) + 1,
        eos=next((ids[name] for name in EOS if name in special), None),
        bos=next((ids[name] for name in BOS if name in special), None),
        encode_batch=lambda texts: [
            np.array(one.ids, np.int32)
            for some in _groups(texts)
            for one in model.encode_batch_fast(some, add_special_tokens=False)
        ],
        decode=lambda tokens: model.decode([int(one) for one in tokens], skip_special_tokens=True),
        token_bytes=lambda: _bytes_of(ids, described),
        last_border=cutting.last_newline if cutting.is_cuttable(described) else lambda text: 0,
        file=path,
    )
    return _with_eos(tokenizer, eos, ids)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yields the texts in lists of about PIECE characters: what is made of each takes a lot of memory."""
    group: list[str] = []
    for text in texts:
        group.append(text)
        if sum(map(len, group)) >= PIECE:
            yield group
            group = []
    yield group


def _with_eos(tokenizer: Tokenizer, eos: str, ids: dict[str, int]) -> Tokenizer:
    if not eos:
        return tokenizer
    if eos not in ids:
        raise ConfigError(f"--eos={eos}: tokenizer {tokenizer.file or 'bytes'} has no such token")
    return dataclasses.replace(tokenizer, eos=ids[eos])


def _bytes_of(ids: dict[str, int], described: dict) -> np.ndarray:
    """(V,) bytes of text: exact for byte-level vocabularies, and those with a byte fallback."""
    added = {one["content"]: one["special"] for one in described["added_tokens"]}
    byte_level = any(
        step["type"] == "ByteLevel" for step in cutting.steps(described, "pre_tokenizer", "decoder")
    )
    prefix = described["model"].get("continuing_subword_prefix") or ""
    sizes = np.zeros(max(ids.values()) + 1, np.int32)
    for token, number in ids.items():
        if token in added:
            sizes[number] = 0 if added[token] else len(token.encode())
        else:  # a byte-level vocabulary spells each byte as one character
            sizes[number] = len(token) if byte_level else spelled_bytes(token.removeprefix(prefix))
    return sizes


def spelled_bytes(piece: str) -> int:
    """Returns the bytes that a piece stands for: <0x0A> is one, and so is the marker of a space."""
    return (
        1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())
    )


# ---- SentencePiece ----


def _sentencepiece(path: Path, eos: str) -> Tokenizer:
    sentencepiece = needed("sentencepiece")
    try:
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # it raises nothing more precise
        raise ConfigError(f"tokenizer {path} is no SentencePiece model: {error}") from None
    size = model.get_piece_size()
    ids = {model.id_to_piece(number): number for number in range(size)}

    def token_bytes() -> np.ndarray:
        return np.array(
            [
                0
                if model.is_control(number) or model.is_unknown(number) or model.is_unused(number)
                else spelled_bytes(piece)
                for piece, number in ids.items()
            ],
            np.int32,
        )

    tokenizer = Tokenizer(
        "sentencepiece",
        vocab_size=size,
        eos=model.eos_id() if model.eos_id() >= 0 else None,
        bos=model.bos_id() if model.bos_id() >= 0 else None,
        encode_batch=lambda texts: [np.array(model.encode(text), np.int32) for text in texts],
        decode=lambda tokens: model.decode([int(one) for one in tokens]),
        token_bytes=token_bytes,
        last_border=lambda text: 0,
        file=path,
    )
    return _with_eos(tokenizer, eos, ids)


def needed(package: str, extra: str = "tokenizers") -> Any:
    """Imports an optional package, or says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            f"the package {package} is missing; pip install 'meshtrain[{extra}]'"
        ) from None
