"""Makes tokens of text, once, for data.path: shards that are read as they lie on disk.

  meshtrain prepare INPUT... --output=DIR                        bytes, which need no tokenizer
  meshtrain prepare INPUT... --output=DIR --tokenizer=PATH       tokenizer.json, or SentencePiece's .model
  meshtrain prepare INPUT... --output=DIR --train_bpe=8192       a tokenizer learned from the text
  meshtrain prepare --verify DIR                                 goes through every token

INPUT is text, JSON lines (.jsonl), either with .gz, Parquet, or a folder of them; an empty line among
JSON is passed over. Killed or stopped, the same command goes on, and what comes out is the same, byte for
byte, for any number of workers.
"""

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import rich.console
import rich.progress

from meshtrain.data import bpe, indexed, inputs, shards
from meshtrain.data import prepared as manifest
from meshtrain.data import tokenize as tokenising
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data import validate as checking
from meshtrain.data.inputs import Reading
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError, minimum_faults

EVERY = 10.0  # seconds between lines, where there is no terminal
SHOWN = 5  # faults that are told before it stops


def run(args: argparse.Namespace) -> int:
    """Returns the exit code."""
    try:
        return _run(args)
    except KeyboardInterrupt:
        print("stopped; the same command resumes after the last finished shard", file=sys.stderr)
        return EXIT_PREEMPTED
    except BrokenProcessPool:
        print(
            "a worker was killed, perhaps because memory ran out; the same command resumes, "
            "with fewer --num_workers if that is the reason",
            file=sys.stderr,
        )
        return EXIT_FAILED
    except OSError as error:
        raise ConfigError(f"{error.filename or 'the files'}: {error.strerror}") from error


def _run(args: argparse.Namespace) -> int:
    """Prepares, or verifies, as the flags say."""
    if args.verify:
        print(*checking.check(args.verify), sep="\n")
        return 0
    _check(args)
    files = inputs.find(args.inputs, args.pattern, args.output)
    settings = {
        "inputs": inputs.fingerprint(files),
        "tokenizer": f"bpe {args.train_bpe}"
        if args.train_bpe
        else _digest(tokenizers.load(args.tokenizer)),
        **{key: getattr(args, key) for key in ("eos", "bos", "field", "separator", "shard_tokens")},
    }
    if not args.pattern and (num := inputs.passed_over(args.inputs)):
        kinds = ", ".join(inputs.KNOWN)
        print(f"passed over: {num:,} files that do not end in {kinds}; --pattern takes others")
    with closing(shards.Journal(args.output, settings)) as journal:
        if journal.is_done:
            print(f"{args.output} is prepared already")
            return 0
        _fill(args, files, settings, journal)
        journal.finish()
    return 0


def _check(args: argparse.Namespace) -> None:
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
    if args.train_bpe and args.train_bpe < bpe.SMALLEST:
        faults.append(
            f"--train_bpe={args.train_bpe}: use {bpe.SMALLEST} or more, all bytes and one"
        )
    if faults:
        raise ConfigError(*faults)


def _digest(tokenizer: Tokenizer) -> str:
    """Returns what tells a tokenizer from others: the hash of its file."""
    file = tokenizer.file
    return hashlib.sha256(file.read_bytes()).hexdigest() if file else "bytes"


def _fill(
    args: argparse.Namespace, files: list[Path], settings: dict, journal: shards.Journal
) -> None:
    """Writes all that is missing, the manifest last."""
    tokenizer = _own_tokenizer(args, files)
    dtype = indexed.smallest_dtype(tokenizer.vocab_size)
    how = _reading(args, tokenizer)
    job = tokenising.Job(
        tokenizer=str(tokenizer.file or "bytes"),
        sha256=_digest(tokenizer),
        eos=tokenizer.eos,
        bos=tokenizer.bos if args.bos else None,
        dtype=dtype.str,
        how=how,
    )
    records = inputs.records(files, how, tokenizer.last_border, journal.next)
    work = functools.partial(tokenising.tokenise, job)
    done = tokenising.in_order(work, tokenising.units(records), args.num_workers)
    out = shards.Shards(args.output, journal, dtype=dtype, shard_tokens=args.shard_tokens)
    began = time.monotonic()
    try:
        with closing(done), _shown(files, journal) as show:
            for tokens, told in done:
                _write(out, tokens, told, files, args.skip_bad)
                show(told[-1])
        out.close(inputs.Place(len(files)))
    finally:
        out.abandon()
    found = shards.summary(journal.shards)
    if not found["documents"]:
        raise ConfigError(f"--output={args.output}: the inputs have no document; give more")
    name = tokenizer.file.name if tokenizer.file else None
    about = {"kind": tokenizer.kind, "file": name, "sha256": job.sha256}
    about |= {"vocab_size": tokenizer.vocab_size, "eos": tokenizer.eos, "bos": job.bos}
    head = {"version": manifest.VERSION, "tokenizer": about, "settings": settings}
    whole = head | {"dtype": dtype.name} | found
    manifest.write(args.output / manifest.NAME, json.dumps(whole, indent=1) + "\n")
    _tell_end(args.output, whole, time.monotonic() - began)


def _reading(args: argparse.Namespace, tokenizer: Tokenizer) -> Reading:
    forbidden = "\0" if tokenizer.kind == "bytes" else ""
    return Reading(field=args.field, separator=args.separator, forbidden=forbidden)


def _own_tokenizer(args: argparse.Namespace, files: list[Path]) -> Tokenizer:
    """Returns the tokenizer, as it is kept in the output; makes it where it is not there yet."""
    if args.train_bpe:
        file = args.output / "tokenizer.json"
        if not file.exists():
            bpe.train(files, Reading(args.field, args.separator, ""), args.train_bpe, file)
        tokenizer = tokenizers.load(file, args.eos)
    else:
        tokenizer = tokenizers.load(args.tokenizer, args.eos)
        if tokenizer.file:
            name = "tokenizer.json" if tokenizer.kind == "huggingface" else "tokenizer.model"
            shutil.copyfile(tokenizer.file, args.output / name)
            tokenizer = dataclasses.replace(tokenizer, file=args.output / name)
    if tokenizer.eos is None:
        raise ConfigError(
            f"--tokenizer={args.tokenizer}: none of its special tokens is known to end a document; "
            f"name one, --eos=TEXT"
        )
    if args.bos and tokenizer.bos is None:
        raise ConfigError(
            f"--bos: --tokenizer={args.tokenizer} has no token that begins a document"
        )
    with open(args.output / manifest.TOKEN_BYTES, "wb") as file:
        np.save(file, tokenizer.token_bytes())
    return tokenizer


def _write(out: shards.Shards, tokens, told, files: list[Path], skip_bad: bool) -> None:
    """Gives the documents of a unit to the shards; raises ConfigError for bad ones, if they are not skipped."""
    faults, place = [], 0
    for one in told:
        if one.fault:
            faults.append(f"{files[one.after.file]}:{one.after.number}: {one.fault}")
            out.skip(faults[-1])
            continue
        if not faults or skip_bad:
            out.write(tokens[place : place + one.num_tokens], one.text_bytes)
            if one.ends:
                out.end(one.after)
        place += one.num_tokens
    if faults and not skip_bad:
        more = f"and {len(faults) - SHOWN} more nearby" if len(faults) > SHOWN else ""
        told_more = [more] if more else []
        raise ConfigError(*faults[:SHOWN], *told_more, "repair them, or leave them out: --skip_bad")
    for fault in faults:
        print(f"skipped {fault}", file=sys.stderr)


@contextmanager
def _shown(files: list[Path], journal: shards.Journal) -> Iterator:
    """Gives a function that shows how far it is: a bar on a terminal, a line now and then elsewhere."""
    sizes = [path.stat().st_size for path in files]
    before, total = np.cumsum([0, *sizes]), sum(sizes)
    console = rich.console.Console(stderr=True)
    began, last = time.monotonic(), time.monotonic()
    first = int(before[min(journal.next.file, len(files))])
    columns = (
        rich.progress.BarColumn(20),
        rich.progress.TaskProgressColumn(),
        rich.progress.TextColumn("{task.description}"),
        rich.progress.TimeRemainingColumn(),
    )
    with rich.progress.Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=max(1, total), completed=first)

        def show(told: tokenising.Told) -> None:
            nonlocal last
            done, now = int(before[told.after.file]) + told.read, time.monotonic()
            speed = (done - first) / max(now - began, 1e-3)
            line = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB, {speed / 1e6:.1f} MB/s"
            bar.update(task, completed=done, description=line)
            if not console.is_terminal and now > last + EVERY:
                last = now
                print(f"prepare: {done / max(1, total):.0%} · {line}", file=sys.stderr, flush=True)

        yield show


def _tell_end(output: Path, found: dict, seconds: float) -> None:
    per = found["text_bytes"] / found["tokens"]
    print(
        f"{output}: {found['documents']:,} documents, {found['tokens']:,} tokens, {per:.2f} bytes of text "
        f"each, in {len(found['shards'])} shards, {seconds:.1f} s"
    )
    if skipped := found["skipped"]["count"]:
        print(f"left out: {skipped:,}; the first are named in {output / manifest.NAME}")
    print(
        f"train with --config.data.path={output} --config.model.vocab_size={found['tokenizer']['vocab_size']}"
    )


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("inputs", nargs="*", metavar="INPUT")
    add("--output", type=Path, metavar="DIR", help="a new folder, or one to go on with")
    add("--tokenizer", default="bytes", metavar="PATH", help='of a file or folder, or "bytes"')
    add("--train_bpe", type=int, default=0, metavar="N", help="learn one of N tokens instead")
    add("--eos", default="", metavar="TOKEN", help="closes each document (default: found)")
    add(
        "--bos", action="store_true", help="begin each document with the tokenizer's token for that"
    )
    add("--field", default="text", metavar="NAME", help="of JSON lines and Parquet, with the text")
    add("--separator", default="", metavar="TEXT", help="between documents of a text file")
    add("--pattern", default="", metavar="GLOB", help="of the files in folders, such as *.py")
    add("--shard_tokens", type=int, default=100_000_000, metavar="N", help="of a file, about")
    add("--num_workers", type=int, default=_cores(), metavar="N", help="default: %(default)s")
    add("--skip_bad", action="store_true", help="leave bad documents out, and go on")
    add("--verify", type=Path, metavar="DIR", help="check a prepared folder instead")


def _cores() -> int:
    return len(os.sched_getaffinity(0))
