"""Tokenize text once, into shards on disk that training maps into memory (data.path).

meshtrain prepare INPUT... --output=DIR                   bytes, without a tokenizer
meshtrain prepare INPUT... --output=DIR --tokenizer=PATH  tokenizer.json, or SentencePiece's .model
meshtrain prepare INPUT... --output=DIR --tokenizer=HUB_NAME --download
meshtrain prepare INPUT... --output=DIR --train_bpe=8192  a tokenizer trained on the text
meshtrain prepare INPUT... --output=DIR --part=I/N        a part, on each of N machines
meshtrain prepare --verify DIR                            check every token

INPUT is text, JSON (lines or an array), CSV, Parquet, Arrow or ArrayRecord, a folder of such files,
or one that the library datasets wrote; also at s3:// or gs://. Text, JSON and CSV may be compressed
(.gz, .zst, .xz, .bz2). Blank lines are ignored. If the command is killed or stopped, run it again
to resume. The output is the same, byte for byte, for any number of workers.
"""

import argparse
import os
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from pathlib import Path
from typing import Any

from meshtrain import console, object_store, storage
from meshtrain.cli.verbs import Verb
from meshtrain.data import hub, template, tokenizer
from meshtrain.data.prepare import (
    folder,
    inputs,
    merge,
    on_ray,
    outputs,
    parts,
    shards,
    tokenize,
    validate,
)
from meshtrain.data.prepare.records import ReadOptions
from meshtrain.errors import EXIT_FAILED, EXIT_PREEMPTED, ConfigError, minimum_faults


def run(args: argparse.Namespace) -> int:
    """Prepares or verifies a folder; returns the exit code."""
    try:
        return _prepare_or_verify(args)
    except KeyboardInterrupt:
        line = "stopped; the same command resumes after the last finished shard"
        console.say(line, stream="stderr")
        return EXIT_PREEMPTED
    except BrokenProcessPool:
        console.say(
            "a worker was killed, perhaps because memory ran out; the same command resumes; "
            "if memory ran out, use fewer --num_workers",
            stream="stderr",
        )
        return EXIT_FAILED
    except OSError as error:
        # An error while a file is written, such as a full disk, has no name.
        place = error.filename or f"--output={args.output}"
        raise ConfigError(f"{place}: {error.strerror}; make room, or repair it") from error


def _prepare_or_verify(args: argparse.Namespace) -> int:
    if args.verify:
        console.say(*validate.validate(args.verify))
        return 0
    _check_flags(args)
    output = outputs.open_output(args.output)
    options = ReadOptions(args.field or "text", args.separator, "", args.template)
    files, notes = inputs.find_files(
        args.inputs,
        args.pattern,
        output.folder,
        split=args.split,
        skip_bad=args.skip_bad,
    )
    if args.template:
        inputs.check_template(files)
    eos, bos = args.eos, bool(args.bos)
    # The texts of tokens that were not chosen by their spelling, as in folders of older versions.
    named = {}
    if args.train_bpe:
        tokenizer_digest = f"bpe {args.train_bpe}"
    else:
        if args.download:
            downloaded = hub.download(args.tokenizer, hub.TOKENIZER, required="tokenizer.*")
            args.tokenizer = str(downloaded)
        loaded = tokenizer.load(args.tokenizer)
        notes += loaded.warnings
        tokenizer_digest = tokenizer.digest(loaded)
        named = loaded.configured
        if args.bos is None and loaded.adds_bos:
            bos = True
            notes.append(
                f"--tokenizer={args.tokenizer}: each document begins with its token {loaded.bos}, "
                f"as the tokenizer's files say; --no-bos leaves it out"
            )
    # All that the output depends on: a folder is resumed only with the same settings.
    settings = {
        "inputs": inputs.fingerprint(files),
        "tokenizer": tokenizer_digest,
        "eos": eos or named.get("eos_token", ""),
        "bos": bos and named.get("bos_token", True),
        "field": options.field,
        "separator": args.separator,
        "shard_tokens": args.shard_tokens,
    }
    if args.template:  # absent in folders of older versions
        settings["template"] = args.template
    for note in notes:
        console.say(note)
    if args.ray:
        return _run_on_ray(args, output, settings, len(files))
    part = parts.parse(args.part) if args.part else None
    if part:
        if merge.is_finished(output, settings):
            merge.clean(output)
            console.say(f"{output.name} is already prepared")
            return 0
        merge.begin(output, settings, part.count)
    written = output.subfolder(part.folder) if part else output
    own_settings = {**settings, "part": args.part} if part else settings
    with closing(shards.Journal(written, own_settings)) as journal:
        if part and merge.is_finished(output, settings):
            # Another process has finished all parts since, and removed them.
            merge.clean(output)
            return 0
        if journal.is_done:
            console.say(f"{written.name} is already prepared")
        else:
            if args.separator and not journal.shards:
                inputs.check_separator(files, args.separator)
            folder.write_folder(
                written,
                files,
                journal,
                part=part,
                tokenizer_path=args.tokenizer,
                train_bpe=args.train_bpe,
                eos=eos,
                bos=bos,
                options=options,
                shard_tokens=args.shard_tokens,
                num_workers=args.num_workers or num_cores(),
                skip_bad=args.skip_bad,
            )
            journal.finish()
    if part:
        merge.finish(output, settings, part.count)
    return 0


def _run_on_ray(
    args: argparse.Namespace, output: outputs.Output, settings: dict[str, Any], num_files: int
) -> int:
    """Prepares the parts in a Ray cluster; the last of them finishes the output."""
    if merge.is_finished(output, settings):
        merge.clean(output)
        console.say(f"{output.name} is already prepared")
        return 0
    num_workers = args.num_workers or 1
    ray = on_ray.connect()
    # A run that resumes has as many parts as before, in a cluster of any size.
    count = merge.num_parts(output) or on_ray.num_parts(
        ray, num_files=num_files, num_workers=num_workers
    )
    merge.begin(output, settings, count)
    on_ray.run_parts(
        ray,
        _flags_of_part(args, num_workers),
        count=count,
        num_workers=num_workers,
        folder=os.getcwd(),
    )
    merge.finish(output, settings, count)
    return 0


def _flags_of_part(args: argparse.Namespace, num_workers: int) -> list[str]:
    """Returns the arguments of the same command without --ray."""
    texts = ("output", "tokenizer", "eos", "template", "split", "separator", "pattern")
    flags = [f"--{name}={getattr(args, name)}" for name in texts if getattr(args, name)]
    if args.field is not None:
        flags.append(f"--field={args.field}")
    if args.bos is not None:
        flags.append("--bos" if args.bos else "--no-bos")
    if args.train_bpe:
        flags.append(f"--train_bpe={args.train_bpe}")
    if args.skip_bad:
        flags.append("--skip_bad")
    flags += [f"--shard_tokens={args.shard_tokens}", f"--num_workers={num_workers}"]
    return [*flags, "--", *args.inputs]


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _place_faults(inputs: Sequence[str], output: str | Path | None) -> list[str]:
    """Returns a fault for each URL of a store that is not known."""
    places = [("", name) for name in inputs]
    if output is not None:
        places.append(("--output=", output))
    return [
        storage.url_fault(key, place)
        for key, place in places
        if not object_store.is_url(place) and storage.url_fault(key, place)
    ]


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError with every fault of the flags."""
    faults = minimum_faults(
        1,
        {
            "--num_workers": 1 if args.num_workers is None else args.num_workers,
            "--shard_tokens": args.shard_tokens,
        },
    )
    faults += _place_faults(args.inputs, args.output)
    if not args.inputs:
        faults.append("no input; give files or folders of text, .jsonl, .csv, .parquet or .arrow")
    if args.output is None:
        faults.append("--output is missing; give a new folder")
    if args.template and args.field is not None:
        faults.append(
            f"--template={args.template!r} and --field={args.field}: give one of them; the "
            f"template {{{args.field}}} is that field"
        )
    elif args.template:
        try:
            template.parse(args.template)
        except ConfigError as error:
            faults += error.faults
    if args.train_bpe and args.tokenizer != "bytes":
        faults.append(
            f"--train_bpe={args.train_bpe} and --tokenizer={args.tokenizer}: give one of them"
        )
    if args.part and args.ray:
        faults.append(f"--part={args.part} and --ray: give one of them")
    if args.part:
        try:
            parts.parse(args.part)
        except ConfigError as error:
            faults += error.faults
    if args.download:
        if args.tokenizer == tokenizer.BYTES:
            faults.append("--download: name the tokenizer too, --tokenizer=HUB_NAME")
        else:
            faults += hub.name_faults("--tokenizer=", args.tokenizer)
    if args.train_bpe and args.train_bpe < tokenize.MIN_VOCAB_SIZE:
        faults.append(
            f"--train_bpe={args.train_bpe}: use {tokenize.MIN_VOCAB_SIZE} or more, all bytes and "
            f"{tokenize.BPE_EOS}"
        )
    if faults:
        raise ConfigError(*faults)


def add_flags(flags: argparse.ArgumentParser) -> None:
    add = flags.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="files or folders of text")
    add("--output", metavar="DIR", help="a new folder, or one to resume; also s3:// or gs://")
    add(
        "--tokenizer",
        default="bytes",
        metavar="PATH",
        help='a tokenizer file, a folder with one, or "bytes" (default)',
    )
    add(
        "--download",
        action="store_true",
        help="--tokenizer is the name of a model on the Hugging Face hub: download its tokenizer "
        "to the hub's cache (needs the extra hub)",
    )
    add("--train_bpe", type=int, default=0, metavar="N", help="train a BPE tokenizer of N tokens")
    add(
        "--eos",
        default="",
        metavar="TOKEN",
        help="token that ends each document (default: the eos_token of the tokenizer's "
        "tokenizer_config.json, else detected)",
    )
    add(
        "--bos",
        action=argparse.BooleanOptionalAction,
        help="begin each document with the tokenizer's BOS token (default: add_bos_token of its "
        "tokenizer_config.json)",
    )
    add(
        "--field",
        metavar="NAME",
        help="field (JSON) or column (tables) of the text; a.b is the field b in a (default: text)",
    )
    add(
        "--template",
        default="",
        metavar="TEXT",
        help=r'text of several fields, such as "{question}\n{answer}"; braces are {{ and }}',
    )
    add(
        "--split",
        default="",
        metavar="NAME",
        help="split to read of a folder that the library datasets wrote",
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
        metavar="N",
        help=f"processes (default: {num_cores()}, with --ray 1)",
    )
    add(
        "--part",
        default="",
        metavar="I/N",
        help="tokenize part I of N, from 0, into the same output; the last part finishes it",
    )
    add(
        "--ray",
        action="store_true",
        help="tokenize parts as tasks of the Ray cluster that runs (needs the extra ray)",
    )
    add("--skip_bad", action="store_true", help="skip faulty documents")
    add("--verify", type=Path, metavar="DIR", help="check a prepared folder instead")


VERB = Verb(
    summary="tokenize text, JSON, tables or records",
    help=__doc__,
    add_flags=add_flags,
    run=run,
)
