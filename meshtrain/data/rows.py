"""Rows of Arrow, Parquet and ArrayRecord files, tokenized when a sample needs them.

Which tokens a sample holds follows from the lengths of all rows. They are measured once, and cached
in a file; see row_index.py.
"""

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.data import files, index_cache, row_files, row_index, tokens
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.corpus import Corpus
from meshtrain.data.remote import CACHE_GB
from meshtrain.data.row_files import TextOf
from meshtrain.data.row_index import LazyTokens
from meshtrain.data.row_tokenizer import Job, RowTokenizer
from meshtrain.data.source import Source
from meshtrain.data.workers import Workers
from meshtrain.errors import ConfigError, minimum_faults

FORMAT = 2  # of the index, and of the texts of rows
MAX_EXTRA = 4.0  # tokens that are tokenized for each token of a sample, without a warning
MAX_PATHS = 32  # whose worker processes are shared by the splits
MAX_GROUP_BYTES = 8 << 20  # of a group of rows, without a warning


def build(
    *,
    path: str,
    tokenizer_path: str,
    seq_len: int,
    vocab_size: int,
    heldout: float,
    packing: str = "windows",
    heldout_path: str = "",
    field: str = "text",
    template: str = "",
    num_workers: int = 2,
    index_path: str = "",
    dtype: str = "",  # of files of tokens, as pattern, exclude and cache_gb
    pattern: str = "",
    exclude: tuple = (),
    cache_gb: float = CACHE_GB,
    learned: str = "replies",  # for chat:build
    **settings: Any,
) -> Source:
    """Returns the "train" or "heldout" split of the rows in `path`.

    `path` is a file, a folder, also one that `datasets` saved, or a pattern. The text of a row is
    its `field`, or what `template` makes of several; a row is a document. `tokenizer_path` is
    "bytes", a tokenizer's file or a folder with one. `num_workers` processes for each path read and
    tokenize, 0: this one. `index_path` is the folder for the lengths of the rows; "": next to the
    data. Held-out part, mixtures, phases, packing, order and filling in the middle are those of
    tokens.py, which describes the other `settings`: samples are those of the folders that
    `meshtrain prepare` makes of the same files. Raises ConfigError if the data is unusable.
    """
    faults = minimum_faults(0, {"data.num_workers": num_workers})
    if not tokenizer_path:
        faults.append("data.tokenizer_path is empty: give a tokenizer's folder or file, or bytes")
    if template and field != "text":
        faults.append(f"data.template={template} and data.field={field}: give one of them")
    if not template and not field:
        faults.append("data.field is empty: give the column with the text, or data.template")
    faults += tokens.learned_faults(learned)
    faults += tokens.unread_faults("meshtrain.data.rows:build", {"cache_gb": cache_gb})
    if template and not faults:
        _check_template(template)

    def open_split(one: str, *, is_heldout: bool) -> tokens.Split:
        if not one:
            raise ConfigError(f"data.path is empty: give files of {row_files.NAMES}")
        rows = load(
            one,
            tokenizer_path,
            TextOf(field, template),
            vocab_size=vocab_size,
            num_workers=num_workers,
            index_path=index_path,
        )
        warnings = [*rows.warnings, *_cost_warnings(rows, packing, seq_len)]
        share, key = heldout, f"data.heldout={heldout}"
        if heldout_path:
            share, key = float(is_heldout), f"data.heldout_path={heldout_path}"
        split = tokens.split_of(
            rows.corpus._replace(warnings=warnings), share, key, is_heldout=is_heldout
        )
        return split._replace(documents="rows", baseline=tokens.entropy(rows.counts))

    return tokens.assemble(
        open_split,
        faults,
        path=path,
        seq_len=seq_len,
        vocab_size=vocab_size,
        heldout=heldout,
        packing=packing,
        heldout_path=heldout_path,
        **settings,
    )


def _check_template(template: str) -> None:
    try:
        TextOf("", template).fields  # noqa: B018
    except ConfigError as error:
        raise ConfigError(*(f"data.{fault}" for fault in error.faults)) from None


class Rows(NamedTuple):
    """All rows as one stream of tokens, which are made when they are read."""

    corpus: Corpus
    counts: np.ndarray  # (V,) int64: how often each token occurs
    bytes_per_read: int  # the most that are decompressed for one row
    warnings: list[str]


def load(
    path: str,
    tokenizer_path: str,
    wanted: TextOf,
    *,
    vocab_size: int,
    num_workers: int,
    index_path: str,
) -> Rows:
    """Returns the rows that `path` names, after measuring their lengths if no index has them."""
    with files.report_errors(f"data.path={path}"):
        paths = row_files.find(path)
        root = Path(os.path.commonpath([file.absolute().parent for file in paths]))
        tokenizer = tokenizers.load(tokenizer_path)
        # Before all rows are measured.
        faults = tokens.vocabulary_faults(path, tokenizer.vocab_size, vocab_size)
        if faults:
            raise ConfigError(*faults)
        # Both splits need the same rows, and the processes that read them.
        return _load(
            path,
            tuple(paths),
            root=root,
            fingerprint=json.dumps(index_cache.fingerprint(paths, root)),
            tokenizer_path=tokenizer_path,
            tokenizer_digest=tokenizers.digest(tokenizer),
            wanted=wanted,
            num_workers=num_workers,
            index_path=index_path,
        )


@functools.lru_cache(maxsize=MAX_PATHS)
def _load(
    path: str,
    paths: tuple[Path, ...],
    *,
    root: Path,
    fingerprint: str,
    tokenizer_path: str,
    tokenizer_digest: str,
    wanted: TextOf,
    num_workers: int,
    index_path: str,
) -> Rows:
    """Returns the rows of files; fingerprint and digest tell changed files from cached ones."""
    tokenizer = tokenizers.load(tokenizer_path)
    if tokenizer.eos is None:
        raise ConfigError(
            f"data.tokenizer_path={tokenizer_path}: none of its special tokens is known to end a "
            f"document; name one as eos_token in a tokenizer_config.json next to it"
        )
    opened = [row_files.open_file(file, wanted) for file in paths]
    sizes = [file.num_rows for file in opened]
    first_rows = np.cumsum([0, *sizes], dtype=np.int64)
    if not first_rows[-1]:
        raise ConfigError(f"data.path={path}: holds no rows")
    units = [file.units[:-1] + first for file, first in zip(opened, first_rows, strict=False)]
    bytes_per_read = max(file.bytes_per_read for file in opened)
    del opened
    job = Job(
        paths=paths,
        rows=first_rows,
        wanted=wanted,
        tokenizer=str(tokenizer.file or tokenizers.BYTES),
        eos=tokenizer.eos,
        bos=tokenizer.bos if tokenizer.adds_bos else None,
    )
    what = [FORMAT, fingerprint, tokenizer_digest, job.eos, job.bos, wanted.field, wanted.template]
    workers = Workers(RowTokenizer, job.settings(), num_workers)
    index = row_index.open_index(
        job,
        tokenizer,
        workers,
        units=np.unique(np.concatenate([*units, first_rows[-1:]])),
        folder=index_cache.folder_for(root, index_path, f"rows-{index_cache.key_of(what)}"),
    )
    corpus = Corpus(
        path,
        files=[path],
        file_tokens=[LazyTokens(workers, index, job)],
        file_offsets=np.array([0, int(index.starts[-1])]),
        document_starts=index.starts,
        digest=_digest(index.digest, tokenizer_digest),
        tokenizer=tokenizer_digest,
        tokenizer_path=tokenizer.file,
        vocab_size=tokenizer.vocab_size,
        token_bytes=tokenizer.token_bytes(),
        cache_prefix=str(index.folder / "all"),
    )
    return Rows(
        corpus,
        index.counts,
        bytes_per_read=bytes_per_read,
        warnings=[*tokenizer.warnings],
    )


def _digest(*digests: str) -> str:
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _cost_warnings(rows: Rows, packing: str, seq_len: int) -> list[str]:
    """Returns lines about rows of which a sample needs a small part."""
    warnings = []
    path = rows.corpus.path
    extra = _tokenized_per_token(rows.corpus.document_starts, packing, seq_len)
    if extra > MAX_EXTRA:
        warnings.append(
            f"data.path={path}: rows are long, and a sample of data.seq_len={seq_len} tokenizes "
            f"all of each row that it has a part of: {extra:.0f} times what it needs; `meshtrain "
            f"prepare` tokenizes each row once"
        )
    if rows.bytes_per_read > MAX_GROUP_BYTES:
        warnings.append(
            f"data.path={path}: Parquet decompresses a group of rows, here up to "
            f"{rows.bytes_per_read / 1e6:,.0f} MB, for a row in it; write groups of fewer rows, "
            f"or Arrow files, or use `meshtrain prepare`"
        )
    return warnings


def _tokenized_per_token(starts: np.ndarray, packing: str, seq_len: int) -> float:
    """Returns how many tokens are tokenized for a token of a sample, about.

    A row of l tokens lies in (l + S) / S windows of S tokens on average; packed, in ceil(l / S)
    pieces. All of it is tokenized for each.
    """
    tokenized = 0.0
    for first in range(0, len(starts) - 1, index_cache.CHUNK):
        lengths = np.diff(starts[first : first + index_cache.CHUNK + 1]).astype(np.float64)
        if packing == "best_fit":
            num_samples = np.ceil(lengths / seq_len)
        else:
            num_samples = (lengths + seq_len) / seq_len
        tokenized += float(lengths @ num_samples)
    return tokenized / float(starts[-1])
