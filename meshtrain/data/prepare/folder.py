"""Writes a prepared folder: the tokenizer, the missing shards, and last the manifest."""

import argparse
import dataclasses
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from meshtrain import console
from meshtrain.data import indexed, prepared, tokenizer
from meshtrain.data.prepare import inputs, shards, tokenize
from meshtrain.data.prepare.inputs import ReadOptions
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError

LOG_EVERY = 10.0  # seconds between progress lines when stderr is not a terminal

MAX_FAULTS_SHOWN = 5


def write_folder(
    args: argparse.Namespace, files: list[Path], settings: dict, journal: shards.Journal
) -> None:
    """Write the tokenizer, the missing shards, and last the manifest."""
    loaded = _store_tokenizer(args, files)
    dtype = indexed.smallest_dtype(loaded.vocab_size)
    forbidden = "\0" if loaded.kind == "bytes" else ""
    options = ReadOptions(field=args.field, separator=args.separator, forbidden=forbidden)
    job = tokenize.Job(
        tokenizer=str(loaded.file or "bytes"),
        sha256=tokenizer.digest(loaded),
        eos=loaded.eos,
        bos=loaded.bos if args.bos else None,
        dtype=dtype.str,
        options=options,
    )
    start = journal.next_position
    records = inputs.read_records(files, options, loaded.last_split_point, start)
    function = functools.partial(tokenize.tokenize_unit, job)
    tokenized = tokenize.map_in_order(function, tokenize.work_units(records), args.num_workers)
    writer = shards.ShardWriter(args.output, journal, dtype=dtype, shard_tokens=args.shard_tokens)
    began = time.monotonic()
    try:
        with closing(tokenized), _progress(files, start) as show:
            for tokens, results in tokenized:
                _write_unit(writer, tokens, results, files, args.skip_bad)
                show(results[-1])
        writer.finish(inputs.Position(len(files)))
    finally:
        writer.close()
    summary = shards.summary(journal.shards)
    if not summary["documents"]:
        raise ConfigError(f"--output={args.output}: the inputs contain no document; give others")
    name = loaded.file.name if loaded.file else None
    entry = {"kind": loaded.kind, "file": name, "sha256": job.sha256}
    entry |= {"vocab_size": loaded.vocab_size, "eos": loaded.eos, "bos": job.bos}
    header = {"version": prepared.VERSION, "tokenizer": entry, "settings": settings}
    manifest = header | {"dtype": dtype.name} | summary
    prepared.write_durably(args.output / prepared.MANIFEST, json.dumps(manifest, indent=1) + "\n")
    _print_summary(args.output, manifest, time.monotonic() - began)


def _store_tokenizer(args: argparse.Namespace, files: list[Path]) -> Tokenizer:
    """Returns the tokenizer after copying it into the output; trains it first if requested."""
    if args.train_bpe:
        file = args.output / "tokenizer.json"
        if not file.exists():
            tokenize.train_bpe(
                files, ReadOptions(args.field, args.separator, ""), args.train_bpe, file
            )
        loaded = tokenizer.load(file, args.eos)
    else:
        loaded = tokenizer.load(args.tokenizer, args.eos)
        if loaded.file:
            name = "tokenizer.json" if loaded.kind == "huggingface" else "tokenizer.model"
            shutil.copyfile(loaded.file, args.output / name)
            loaded = dataclasses.replace(loaded, file=args.output / name)
    if loaded.eos is None:
        raise ConfigError(
            f"--tokenizer={args.tokenizer}: none of its special tokens is known to end a document; "
            f"name one with --eos=TEXT"
        )
    if args.bos and loaded.bos is None:
        raise ConfigError(
            f"--bos: --tokenizer={args.tokenizer} has no token that begins a document"
        )
    with open(args.output / prepared.TOKEN_BYTES, "wb") as file:
        np.save(file, loaded.token_bytes())
    return loaded


def _write_unit(
    writer: shards.ShardWriter, tokens: np.ndarray, results, files: list[Path], skip_bad: bool
) -> None:
    """Write the documents of a work unit; raises ConfigError for faulty ones unless `skip_bad`."""
    faults, start = [], 0
    for result in results:
        if result.fault:
            path, number = files[result.next_position.file], result.next_position.number
            faults.append(f"{path}:{number}: {result.fault}")
            writer.add_fault(faults[-1])
            continue
        if not faults or skip_bad:
            writer.write(tokens[start : start + result.num_tokens], result.text_bytes)
            if result.ends_document:
                writer.end_document(result.next_position)
        start += result.num_tokens
    if faults and not skip_bad:
        num_more = len(faults) - MAX_FAULTS_SHOWN
        more = [f"and at least {num_more} more"] if num_more > 0 else []
        shown = faults[:MAX_FAULTS_SHOWN]
        raise ConfigError(*shown, *more, "repair them, or skip them with --skip_bad")
    for fault in faults:
        print(f"skipped {fault}", file=sys.stderr)


@contextmanager
def _progress(
    files: list[Path], start: inputs.Position
) -> Iterator[Callable[[tokenize.RecordResult], None]]:
    """Yields a function that shows the progress: a bar on a terminal, else a line every LOG_EVERY."""
    sizes = [path.stat().st_size for path in files]
    offsets, total = np.cumsum([0, *sizes]), sum(sizes)
    began, last_line = time.monotonic(), time.monotonic()
    first = int(offsets[min(start.file, len(files))])
    bar = console.Bar(total)

    def show(result: tokenize.RecordResult) -> None:
        nonlocal last_line
        done = int(offsets[result.next_position.file]) + result.bytes_read
        now = time.monotonic()
        speed = (done - first) / max(now - began, 1e-3)
        line = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {speed / 1e6:.1f} MB/s"
        bar.show(done, line, f"{console.duration((total - done) / max(speed, 1))} left")
        if not bar.is_shown and now > last_line + LOG_EVERY:
            last_line = now
            print(f"prepare: {done / max(1, total):.0%} · {line}", file=sys.stderr, flush=True)

    with closing(bar):
        yield show


def _print_summary(output: Path, manifest: dict, seconds: float) -> None:
    bytes_per_token = manifest["text_bytes"] / manifest["tokens"]
    print(
        f"{output}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens, "
        f"{bytes_per_token:.2f} bytes of text per token, {len(manifest['shards'])} shards, {seconds:.1f} s"
    )
    if skipped := manifest["skipped"]["count"]:
        print(
            f"skipped: {skipped:,} documents; the first are listed in {output / prepared.MANIFEST}"
        )
    vocab_size = manifest["tokenizer"]["vocab_size"]
    print(f"train with --config.data.path={output} --config.model.vocab_size={vocab_size}")
