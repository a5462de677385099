"""Tokenize text once, into shards on disk that training maps into memory (data.path).

  meshtrain prepare INPUT... --output=DIR                        bytes, without a tokenizer
  meshtrain prepare INPUT... --output=DIR --tokenizer=PATH       tokenizer.json, or SentencePiece's .model
  meshtrain prepare INPUT... --output=DIR --train_bpe=8192       a tokenizer trained on the text
  meshtrain prepare --verify DIR                                 check every token

INPUT is a text file, JSON lines (.jsonl) or Parquet, or a folder of them; text and JSON lines may be
compressed (.gz). Blank JSON lines are ignored. If the command is killed or stopped, run it again to
resume. The output is the same, byte for byte, for any number of workers.
"""

import argparse
import dataclasses
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from meshtrain import console
from meshtrain.data import bpe, indexed, inputs, prepared, shards, tokenize, tokenizer, validate
from meshtrain.data.inputs import ReadOptions
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError, minimum_faults

LOG_EVERY = 10.0  # seconds between progress lines when stderr is not a terminal
MAX_FAULTS_SHOWN = 5


def run(args: argparse.Namespace) -> int:
    """Prepares or verifies a folder; returns the exit code."""
    try:
        return _prepare_or_verify(args)
    except KeyboardInterrupt:
        print("stopped; the same command resumes after the last finished shard", file=sys.stderr)
        return EXIT_PREEMPTED
    except BrokenProcessPool:
        print(
            "a worker was killed, perhaps because memory ran out; the same command resumes; "
            "if memory ran out, use fewer --num_workers",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except OSError as error:
        raise ConfigError(f"{error.filename or 'the files'}: {error.strerror}") from error


def _prepare_or_verify(args: argparse.Namespace) -> int:
    if args.verify:
        print(*validate.validate(args.verify), sep="\n")
        return 0
    _check_flags(args)
    files, notes = inputs.find_files(args.inputs, args.pattern, args.output)
    settings = {
        "inputs": inputs.fingerprint(files),
        "tokenizer": f"bpe {args.train_bpe}"
        if args.train_bpe
        else tokenizer.digest(tokenizer.load(args.tokenizer)),
        **{key: getattr(args, key) for key in ("eos", "bos", "field", "separator", "shard_tokens")},
    }
    print(*notes, sep="\n", end="\n" if notes else "")
    with closing(shards.Journal(args.output, settings)) as journal:
        if journal.is_done:
            print(f"{args.output} is already prepared")
            return 0
        _write_folder(args, files, settings, journal)
        journal.finish()
    return 0


def _check_flags(args: argparse.Namespace) -> None:
    faults = minimum_faults(
        1, {"--num_workers": args.num_workers, "--shard_tokens": args.shard_tokens}
    )
    if not args.inputs:
        faults.append("no input; give files or folders of text, .jsonl or .parquet")
    if args.output is None:
        faults.append("--output is missing; give a new folder")
    if args.train_bpe and args.tokenizer != "bytes":
        faults.append(
            f"--train_bpe={args.train_bpe} and --tokenizer={args.tokenizer}: give one of them"
        )
    if args.train_bpe and args.train_bpe < bpe.MIN_VOCAB_SIZE:
        faults.append(
            f"--train_bpe={args.train_bpe}: use {bpe.MIN_VOCAB_SIZE} or more, all bytes and {bpe.EOS}"
        )
    if faults:
        raise ConfigError(*faults)


def _write_folder(
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
            bpe.train(files, ReadOptions(args.field, args.separator, ""), args.train_bpe, file)
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


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="files or folders of text")
    add("--output", type=Path, metavar="DIR", help="a new folder, or one to resume")
    add(
        "--tokenizer",
        default="bytes",
        metavar="PATH",
        help='a tokenizer file, a folder with one, or "bytes" (default)',
    )
    add("--train_bpe", type=int, default=0, metavar="N", help="train a BPE tokenizer of N tokens")
    add(
        "--eos",
        default="",
        metavar="TOKEN",
        help="token that ends each document (default: detected)",
    )
    add("--bos", action="store_true", help="begin each document with the tokenizer's BOS token")
    add(
        "--field",
        default="text",
        metavar="NAME",
        help="field (JSON lines) or column (Parquet) of the text",
    )
    add(
        "--separator",
        default="",
        metavar="TEXT",
        help="text between the documents of a text file (default: one document per file)",
    )
    add("--pattern", default="", metavar="GLOB", help="files to read in folders, such as *.py")
    add(
        "--shard_tokens",
        type=int,
        default=100_000_000,
        metavar="N",
        help="approximate tokens per shard",
    )
    add(
        "--num_workers",
        type=int,
        default=_num_cores(),
        metavar="N",
        help="processes (default: %(default)s)",
    )
    add("--skip_bad", action="store_true", help="skip faulty documents")
    add("--verify", type=Path, metavar="DIR", help="check a prepared folder instead")


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
