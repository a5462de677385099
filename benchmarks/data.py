"""Speed of the data pipeline: each kind of source, compared with grain and with what 8 GPUs need;
`meshtrain prepare` compared with its tokenizer; memory with many documents.

  python benchmarks/data.py [--seconds=2] [--rounds=5] [--megabytes=30] [--documents=100000000]
      [--parts sources prepare loader memory] [--output=PATH]

The text is the .py files of Python's standard library; the tokenizer has 8192 tokens and is trained
on it. Files are in the page cache, all checks are on.

`sources` reads batches of 64 x 1,024 tokens from documents of about 3,000 characters. Sources that
tokenize use one process per core. A round measures each once; results are medians, and medians of
ratios within a round. `grain` reads the ArrayRecord file, tokenizes, packs (concat and split) and
batches with grain alone. The need is that of GPT-2 124M on 8 H200 (511,300 tokens/s each, see
README.md).
`memory` is that of a process which reads windows of a corpus with many documents, whose index is a
mapped file: private memory, and with mapped pages.
"""

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import numpy as np

from benchmarks.lib import record
from meshtrain.cli import app
from meshtrain.data import chat, index_cache, row_index, rows, tokens
from meshtrain.data.corpus import Corpus
from meshtrain.data.loader import Loader
from meshtrain.data.source import Source
from meshtrain.data.tokenizer import load
from meshtrain.parallel import mesh

RULES = (("batch", ("data", "fsdp")),)
NEED = 8 * 511_300  # tokens per second of GPT-2 124M on 8 H200
SEQ_LEN, ROWS = 1024, 64  # of a batch of `sources`
DOCUMENT_CHARS = 3000
VOCAB_SIZE = 8192
PARTS = ("sources", "prepare", "loader", "memory")
RANDOM_ACCESS = {  # what reading any one document costs
    "prepared folder, raw tokens": "its tokens",
    "Arrow, uncompressed": "its text",
    "ArrayRecord": "its group of records",
    "Parquet": "its group of rows",
    "JSON lines of conversations": "its tokens, which the first run keeps in files",
    "gzip, zstd, CSV, JSON lines of text": "all before it: tokenize them with `meshtrain prepare`",
}
SIZES = [(1024, 8), (1024, 64), (4096, 8), (4096, 64)]  # tokens per row, rows per batch


def standard_library(megabytes: int) -> list[str]:
    """Returns the texts of files of the standard library, about this many MB in total."""
    root, texts, left = Path(sysconfig.get_paths()["stdlib"]), [], megabytes * 10**6
    for path in sorted(root.rglob("*.py")):
        if left > 0 and not {"site-packages", "dist-packages"} & set(path.parts):
            with contextlib.suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
                left -= path.stat().st_size
    return [text for text in texts if text]


def prepare_speeds(folder: Path, texts: list[str]) -> dict[str, float]:
    """Returns MB of text per second, of the tokenizer alone and of `meshtrain prepare`.

    `prepare` runs with one and with two workers.
    """
    source = folder / "text.jsonl"
    source.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    command = [sys.executable, "-m", "meshtrain", "prepare", str(source)]
    tokenizer_folder = folder / "bpe"
    small = folder / "small.jsonl"
    small.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts[::10]), encoding="utf-8"
    )
    flags = [f"--output={tokenizer_folder}", "--train_bpe=8192", "--num_workers=1"]
    app.main("prepare", [str(small), *flags])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load(tokenizer_folder)
    began = time.perf_counter()
    for start in range(0, len(texts), 64):
        tokenizer.encode_batch(texts[start : start + 64])
    speeds = {"tokenizer alone, one thread": megabytes / (time.perf_counter() - began)}
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for workers in (1, 2):
        out = folder / f"out{workers}"
        began = time.perf_counter()
        flags = [f"--output={out}", f"--tokenizer={tokenizer_folder}", f"--num_workers={workers}"]
        subprocess.run([*command, *flags], check=True, env=environment, capture_output=True)
        name = f"prepare, {workers} workers, including start"
        speeds[name] = megabytes / (time.perf_counter() - began)
    return speeds


def read_speeds(path: Path, seconds: float, **settings) -> dict[str, float]:
    """Returns tokens per second of a source alone, and of the loader onto the devices."""
    rows = settings.pop("rows")
    source = tokens.build(
        **{"path": str(path), "dtype": "", "pattern": "", "exclude": (), "separator": -1},
        **{"vocab_size": 8192, "heldout": 0.0, "seed": 0, "split": "train", **settings},
    )
    one_device = mesh.make_mesh(data=1)
    with contextlib.closing(Loader(source, one_device, RULES, global_batch=rows)) as loader:
        return {
            "read": tokens_per_second(lambda i: source.read(i * rows + np.arange(rows)), seconds),
            "loader": tokens_per_second(lambda i: jax.block_until_ready(next(loader)), seconds),
        }


def tokens_per_second(batch, seconds: float) -> float:
    """Returns the rate of batch(0), batch(1), ..., without the first five."""
    for i in range(5):
        size = batch(i).tokens.size
    began, number = time.perf_counter(), 5
    while time.perf_counter() < began + seconds:
        batch(number)
        number += 1
    return size * (number - 5) / (time.perf_counter() - began)


# ---- sources ----


def documents_of(texts: list[str]) -> list[str]:
    """Returns the texts, split into documents of about DOCUMENT_CHARS."""
    found = []
    for text in texts:
        lines: list[str] = []
        size = 0
        for line in text.splitlines(keepends=True):
            lines.append(line)
            size += len(line)
            if size >= DOCUMENT_CHARS:
                found.append("".join(lines))
                lines, size = [], 0
        if "".join(lines).strip():
            found.append("".join(lines))
    return found


def write_files(folder: Path, documents: list[str]) -> None:
    """Writes the documents in each format."""
    import pyarrow
    import pyarrow.parquet
    from array_record.python import array_record_module

    table = pyarrow.table({"text": documents})
    pyarrow.parquet.write_table(table, folder / "rows.parquet", row_group_size=100)
    with pyarrow.OSFile(str(folder / "rows.arrow"), "wb") as file:
        with pyarrow.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table, 1000)
    writer = array_record_module.ArrayRecordWriter(
        str(folder / "rows.array_record"), "group_size:1"
    )
    for document in documents:
        writer.write(document.encode())
    writer.close()
    with open(folder / "chat.jsonl", "w", encoding="utf-8") as file:
        for document in documents:
            line = {"prompt": document[:200], "completion": document[200:] or "nothing"}
            file.write(json.dumps(line) + "\n")


def prepare_sources(folder: Path, documents: list[str]) -> None:
    """Writes a tokenizer with a chat template, a prepared folder and a file of raw tokens."""
    write_files(folder, documents)
    source, prepared = str(folder / "rows.parquet"), folder / "prepared"
    flags = [f"--output={prepared}", f"--train_bpe={VOCAB_SIZE}", "--num_workers=2"]
    app.main("prepare", [source, *flags])
    template = "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    template += "{% if add_generation_prompt %}assistant\n{% endif %}"
    (folder / "tokenizer").mkdir()
    for path, content in [
        ("tokenizer.json", (prepared / "tokenizer.json").read_text(encoding="utf-8")),
        ("chat_template.jinja", template),
        ("tokenizer_config.json", json.dumps({"eos_token": "<|endoftext|>"})),
    ]:
        (folder / "tokenizer" / path).write_text(content, encoding="utf-8")
    (shard,) = prepared.glob("*.bin")
    np.save(folder / "raw.npy", np.fromfile(shard, np.uint16))


def open_sources(folder: Path) -> dict[str, Source]:
    """Returns each kind of source; files that are computed once are computed here."""
    settings = dict(seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, heldout=0.0, seed=0, split="train")
    files = dict(dtype="", pattern="", exclude=(), separator=-1)
    tokenizer = dict(tokenizer_path=str(folder / "tokenizer"), num_workers=len(cores()))
    sources = {}
    for packing in tokens.PACKINGS:
        sources[f"prepared, {packing}"] = tokens.build(
            path=str(folder / "prepared"), packing=packing, **files, **settings
        )
    sources["raw tokens"] = tokens.build(path=str(folder / "raw.npy"), **files, **settings)
    for name, packing in [
        ("arrow", "windows"),
        ("arrow", "best_fit"),
        ("array_record", "best_fit"),
        ("parquet", "best_fit"),
    ]:
        sources[f"rows of {name}, {packing}"] = rows.build(
            path=str(folder / f"rows.{name}"), packing=packing, **tokenizer, **settings
        )
    sources["conversations"] = chat.build(
        path=str(folder / "chat.jsonl"), packing="best_fit", **tokenizer, **settings
    )
    return sources


def cores() -> set[int]:
    return os.sched_getaffinity(0)


class Tokenize:
    """Tokenizes a record, in a worker process of grain."""

    def __init__(self, folder: str):
        self.folder = folder
        self.tokenizer = None  # loaded in the process: it cannot be pickled

    def __call__(self, record: bytes) -> dict[str, np.ndarray]:
        if self.tokenizer is None:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
            self.tokenizer = load(self.folder)
        ids = self.tokenizer.encode(record.decode())
        return {"tokens": np.append(ids, self.tokenizer.eos).astype(np.int32)}


def grain_batches(folder: Path):
    """Yields batches of a pipeline of grain alone, with a process per core."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # grain reads some, and this script has others
    records = grain.sources.ArrayRecordDataSource(str(folder / "rows.array_record"))
    dataset = grain.MapDataset.source(records).seed(0).shuffle().repeat()
    dataset = dataset.map(Tokenize(str(folder / "tokenizer"))).to_iter_dataset()
    dataset = grain.experimental.ConcatThenSplitIterDataset(
        dataset, length_struct={"tokens": SEQ_LEN}
    )
    dataset = dataset.batch(ROWS)
    options = grain.multiprocessing.MultiprocessingOptions(num_workers=len(cores()))
    return iter(dataset.mp_prefetch(options))


def source_speeds(folder: Path, seconds: float, num_rounds: int) -> list[dict[str, float]]:
    """Returns the tokens per second of each source, in each round."""
    # The text is small, and would soon be in the cache of tokenized rows.
    row_index.CACHED_TOKENS = 0
    readers = {}
    for name, source in open_sources(folder).items():
        readers[name] = functools.partial(read_batch, source)
    batches = grain_batches(folder)
    readers["grain"] = lambda number: next(batches)["tokens"]
    for read in readers.values():
        for number in range(3):
            read(number)
    found = []
    for round_number in range(num_rounds):
        speeds = {}
        for name, read in readers.items():
            began, number = time.perf_counter(), 3 + 10_000 * round_number
            first = number
            while time.perf_counter() < began + seconds:
                read(number)
                number += 1
            elapsed = time.perf_counter() - began
            speeds[name] = (number - first) * ROWS * SEQ_LEN / elapsed
        found.append(speeds)
    return found


def read_batch(source: Source, number: int):
    return source.read(ROWS * number + np.arange(ROWS))


def show_sources(rounds: list[dict[str, float]]) -> None:
    def median(value) -> float:
        return statistics.median(map(value, rounds))

    table = []
    for name in rounds[0]:
        row = {
            "source": name,
            "M tokens/s": median(lambda speeds, name=name: speeds[name]) / 1e6,
            "x grain": median(lambda speeds, name=name: speeds[name] / speeds["grain"]),
            "x need": median(lambda speeds, name=name: speeds[name] / NEED),
        }
        table.append(row)
    record.show(table)
    print()
    record.show(
        [{"format": name, "one document costs": cost} for name, cost in RANDOM_ACCESS.items()]
    )


# ---- memory ----


def memory_of_index(folder: Path, num_documents: int) -> dict[str, float]:
    """Returns MB of a process that reads windows of a corpus with this many documents.

    It is a process of its own: this one has read other data.
    """
    lengths = np.random.default_rng(0).integers(1, 1000, num_documents, np.int32)
    total = index_cache.write_starts(lengths, folder / "starts.npy")
    with open(folder / "tokens", "wb") as file:
        file.truncate(2 * total)  # a file with a hole: it takes no space
    command = [sys.executable, __file__, f"--read={folder}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def read_index(folder: Path) -> None:
    """Reads 100 batches of windows, and prints the memory of this process before and after."""
    before = memory_mb()
    stream = np.asarray(np.memmap(folder / "tokens", np.uint16, mode="r"))
    corpus = Corpus(
        "synthetic",
        files=["synthetic"],
        file_tokens=[stream],
        file_offsets=np.array([0, len(stream)]),
        document_starts=np.asarray(np.load(folder / "starts.npy", mmap_mode="r")),
    )
    split = tokens.Split(corpus, 0, len(stream), "all")
    source = tokens.split_source(
        split,
        "windows",
        separator=-1,
        seq_len=SEQ_LEN,
        vocab_size=VOCAB_SIZE,
        seed=0,
        baseline=0.0,
    )
    for number in range(100):
        read_batch(source, number)
    after = memory_mb()
    print(json.dumps({f"{kind} MB": after[kind] - before[kind] for kind in after}))


def memory_mb() -> dict[str, float]:
    """Returns the private memory of this process, and all of its resident pages."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    fields = dict(line.split(":", 1) for line in status.splitlines())
    kinds = {"private": "RssAnon", "resident": "VmRSS"}
    return {kind: int(fields[name].split()[0]) / 1024 for kind, name in kinds.items()}


def main() -> None:
    flags = record.parser(__doc__)
    flags.add_argument("--seconds", type=float, default=2.0, help="duration of each measurement")
    flags.add_argument("--rounds", type=int, default=5, help="measurements of each source")
    flags.add_argument("--megabytes", type=int, default=30, help="size of the text")
    flags.add_argument("--documents", type=int, default=10**8, help="of the index of `memory`")
    flags.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    flags.add_argument("--read", type=Path, help="only read the index in this folder (`memory`)")
    args = flags.parse_args()
    jax.config.update("jax_platforms", "cpu")
    if args.read:
        read_index(args.read)
        return
    results = record.about(args)
    texts = standard_library(args.megabytes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "sources" in args.parts:
            prepare_sources(folder, documents_of(texts))
            results["tokens per second of sources"] = rounds = source_speeds(
                folder, args.seconds, args.rounds
            )
            show_sources(rounds)
        if "memory" in args.parts:
            results["memory"] = memory = memory_of_index(folder, args.documents)
            print()
            record.show([{"documents": f"{args.documents:,}", **memory}])
        if {"prepare", "loader"} & {*args.parts}:
            measure_prepared(folder, texts, args, results)
    record.save(args.output, results, model="data-bpe-8192")


def measure_prepared(folder: Path, texts: list[str], args, results: dict) -> None:
    """Measures `meshtrain prepare`, and reading and loading what it has written."""
    speeds = results["MB per second"] = prepare_speeds(folder, texts)
    print()
    record.show([{"": name, "MB/s": speed} for name, speed in speeds.items()])
    if "loader" not in args.parts:
        return
    table = results["tokens per second"] = {}
    for packing in tokens.PACKINGS:
        for seq_len, num_rows in SIZES:
            settings = dict(seq_len=seq_len, rows=num_rows, packing=packing)
            speeds = read_speeds(folder / "out1", args.seconds, **settings)
            table[f"{packing} {num_rows} x {seq_len}"] = speeds
    print()
    record.show(
        [
            {"M tokens/s": case, **{kind: speed / 1e6 for kind, speed in speeds.items()}}
            for case, speeds in table.items()
        ]
    )


if __name__ == "__main__":
    main()
