"""Writes a prepared folder: the tokenizer, the missing shards, and last the manifest."""

import dataclasses
import functools
import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from meshtrain import console
from meshtrain.data import indexed, prepared, tokenizer
from meshtrain.data.prepare import inputs, shards, sources, tokenize
from meshtrain.data.prepare.outputs import MAX_OBJECT_BYTES, Output
from meshtrain.data.prepare.parts import Part
from meshtrain.data.prepare.records import Position, ReadOptions
from meshtrain.data.prepare.tokenize import RecordResult
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

LOG_EVERY = 10.0  # seconds between progress lines when stderr is not a terminal
MAX_FAULTS_SHOWN = 5


def write_folder(
    output: Output,
    files: list[Path],
    journal: shards.Journal,
    *,
    part: Part | None = None,
    tokenizer_path: str,
    train_bpe: int,
    eos: str,
    bos: bool,
    options: ReadOptions,
    shard_tokens: int,
    num_workers: int,
    skip_bad: bool,
) -> None:
    """Write the tokenizer, the shards that the journal lacks, and last the manifest.

    `tokenizer_path` is a path or "bytes"; with `train_bpe` above 0 a tokenizer of that many tokens
    is trained instead. `eos` is the token that ends documents; "": the tokenizer's. With `bos` they
    begin with the tokenizer's bos. `options` forbid no character yet. Raises ConfigError for a
    document that cannot be used, unless `skip_bad`, or if there is none.

    Of a `part` only its files are tokenized, and the output is its folder. It may have no document.
    """
    loaded = _store_tokenizer(
        output,
        files,
        tokenizer_path=tokenizer_path,
        train_bpe=train_bpe,
        eos=eos,
        bos=bos,
        options=options,
    )
    dtype = indexed.smallest_dtype(loaded.vocab_size)
    # Twice: its last document may be large too.
    if output.is_stored and 2 * shard_tokens * dtype.itemsize > MAX_OBJECT_BYTES:
        raise ConfigError(
            f"--shard_tokens={shard_tokens}: an object of a store has at most "
            f"{MAX_OBJECT_BYTES >> 30} GiB here; use {MAX_OBJECT_BYTES // 2 // dtype.itemsize} or "
            f"less"
        )
    # Bytes have no token besides the characters, so NUL ends documents.
    forbidden = "\0" if loaded.kind == "bytes" else ""
    job = tokenize.Job(
        tokenizer=str(loaded.file or "bytes"),
        sha256=tokenizer.digest(loaded),
        eos=loaded.eos,
        bos=loaded.bos if bos else None,
        dtype=dtype.str,
        options=dataclasses.replace(options, forbidden=forbidden),
    )

    if part:
        files = part.files(files)

    # Read here, tokenize in `num_workers` processes, write here: in order, so that the output
    # does not depend on their number.
    start = journal.next_position
    records = inputs.read_records(files, job.options, loaded.last_split_point, start)
    tokenized = tokenize.map_in_order(
        functools.partial(tokenize.tokenize_unit, job),
        tokenize.work_units(records),
        num_workers,
    )
    writer = shards.ShardWriter(
        output.folder,
        journal,
        dtype=dtype,
        shard_tokens=shard_tokens,
        keeps_text_bytes=part is not None,
    )
    began = time.monotonic()
    try:
        with closing(tokenized), _progress(files, start) as show:
            for tokens, results in tokenized:
                _write_unit(writer, tokens, results, files, skip_bad)
                show(results[-1])
        writer.finish(Position(len(files)))
    finally:
        writer.close()

    manifest = {
        "version": prepared.VERSION,
        "tokenizer": {
            "kind": loaded.kind,
            "file": loaded.file.name if loaded.file else None,
            "sha256": job.sha256,
            "vocab_size": loaded.vocab_size,
            "eos": loaded.eos,
            "bos": job.bos,
        },
        "settings": journal.settings,
        "dtype": dtype.name,
        **shards.summary(journal.shards),
    }
    if part is None:
        finish(output, manifest, time.monotonic() - began)
    else:
        _write_manifest(output, manifest)


def finish(output: Output, manifest: dict[str, Any], seconds: float) -> None:
    """Write the manifest, after all other files; raises ConfigError if there is no document."""
    if not manifest["documents"]:
        raise ConfigError(f"--output={output.name}: the inputs contain no document; give others")
    _write_manifest(output, manifest)
    _print_summary(output, manifest, seconds)


def _write_manifest(output: Output, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=1) + "\n"
    prepared.write_durably(output.folder / prepared.MANIFEST, text)
    output.publish([prepared.MANIFEST])


def _store_tokenizer(
    output: Output,
    files: list[Path],
    *,
    tokenizer_path: str,
    train_bpe: int,
    eos: str,
    bos: bool,
    options: ReadOptions,
) -> Tokenizer:
    """Returns the tokenizer after copying it into the output; trains it first if requested."""
    folder = output.folder
    if train_bpe:
        file = folder / "tokenizer.json"
        if not file.exists():
            tokenize.train_bpe(files, options, train_bpe, file)
        loaded = tokenizer.load(file, eos)
    else:
        loaded = tokenizer.load(tokenizer_path, eos)
        if loaded.file:
            name = "tokenizer.json" if loaded.kind == "huggingface" else "tokenizer.model"
            shutil.copyfile(loaded.file, folder / name)
            loaded = dataclasses.replace(loaded, file=folder / name)
    if loaded.eos is None:
        raise ConfigError(
            f"--tokenizer={tokenizer_path}: none of its special tokens is known to end a document; "
            f"name one with --eos=TEXT"
        )
    if bos and loaded.bos is None:
        raise ConfigError(
            f"--bos: --tokenizer={tokenizer_path} has no token that begins a document"
        )
    with open(folder / prepared.TOKEN_BYTES, "wb") as file:
        np.save(file, loaded.token_bytes())
    output.publish([prepared.TOKEN_BYTES, *([loaded.file.name] if loaded.file else [])])
    return loaded


def _write_unit(
    writer: shards.ShardWriter,
    tokens: np.ndarray,
    results: list[RecordResult],
    files: list[Path],
    skip_bad: bool,
) -> None:
    """Write the documents of a work unit; raises ConfigError for faulty ones unless `skip_bad`."""
    faults = []
    start = 0
    for result in results:
        position = result.next_position
        if result.fault:
            fault = f"{sources.name_of(files[position.file])}:{position.number}: {result.fault}"
            faults.append(fault)
            writer.add_fault(fault)
            continue
        # After a fault that stops the command nothing more is written, but faults are collected.
        if not faults or skip_bad:
            writer.write(tokens[start : start + result.num_tokens], result.text_bytes)
            if result.ends_document:
                writer.end_document(position)
        start += result.num_tokens
    if faults and not skip_bad:
        shown = faults[:MAX_FAULTS_SHOWN]
        num_more = len(faults) - len(shown)
        if num_more:
            shown.append(f"and at least {num_more} more")
        raise ConfigError(*shown, "repair them, or skip them with --skip_bad")
    for fault in faults:
        console.say(console.line_of(f"skipped {fault}"), stream="stderr")


@contextmanager
def _progress(files: list[Path], start: Position) -> Iterator[Callable[[RecordResult], None]]:
    """Yields a function that shows the progress.

    It draws a bar on a terminal, and prints a line every LOG_EVERY elsewhere.
    """
    sizes = [sources.size_of(path) for path in files]
    offsets = np.cumsum([0, *sizes])
    total = sum(sizes)
    already_done = int(offsets[min(start.file, len(files))])
    began = last_line = time.monotonic()
    bar = console.Bar(total)

    def show(result: RecordResult) -> None:
        nonlocal last_line
        done = int(offsets[result.next_position.file]) + result.bytes_read
        now = time.monotonic()
        speed = (done - already_done) / max(now - began, 1e-3)
        seconds_left = (total - done) / max(speed, 1)
        line = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {speed / 1e6:.1f} MB/s"
        bar.show(done, line, f"{console.duration(seconds_left)} left")
        if not bar.is_shown and now > last_line + LOG_EVERY:
            last_line = now
            console.say(f"prepare: {done / max(1, total):.0%} · {line}", stream="stderr")

    with closing(bar):
        yield show


def _print_summary(output: Output, manifest: dict[str, Any], seconds: float) -> None:
    bytes_per_token = manifest["text_bytes"] / manifest["tokens"]
    console.say(
        f"{output.name}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{bytes_per_token:.2f} bytes of text per token, {len(manifest['shards'])} shards, "
        f"{seconds:.1f} s"
    )
    num_skipped = manifest["skipped"]["count"]
    if num_skipped:
        console.say(
            f"skipped: {num_skipped:,} documents; the first are listed in "
            f"{output.name}/{prepared.MANIFEST}"
        )
    vocab_size = manifest["tokenizer"]["vocab_size"]
    console.say(
        f"train with --config.data.path={output.name} --config.model.vocab_size={vocab_size}"
    )
