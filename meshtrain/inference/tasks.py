"""Evaluates a model on tasks and on texts: `meshtrain evaluate --tasks=...` and `--files=...`.

A training run evaluates the tasks of `eval.tasks` with the same code.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from meshtrain import console, foreign, state
from meshtrain.checkpoint import find, run_tokenizer
from meshtrain.config.build import RunParts, optimizer_builder
from meshtrain.config.schema import TASK_PREFIX, Config
from meshtrain.data import chat_template
from meshtrain.data import tokenizer as tokenizers
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.data.tokenizer import Tokenizer
from meshtrain.errors import ConfigError, minimum_faults
from meshtrain.inference import generate, generation_config, sampling, suite
from meshtrain.inference.answers import Answers
from meshtrain.inference.generation_config import Defaults
from meshtrain.inference.restore import restore_params
from meshtrain.inference.sampling import Sampling
from meshtrain.inference.scores import Interrupted, Scorer
from meshtrain.inference.suite import Suite, Value
from meshtrain.inference.task_model import TaskModel
from meshtrain.inference.task_text import TaskText
from meshtrain.models.base import Params
from meshtrain.program import Program, assemble
from meshtrain.state import TrainState, evaluation_params

MAX_TEXT_BYTES = 1 << 30  # of a file


@dataclass(frozen=True)
class Settings:
    """What `meshtrain evaluate` is asked for, besides the model."""

    tasks: Sequence[str] = ()
    include_paths: Sequence[Path] = ()
    num_fewshot: int | None = None
    limit: float | None = None
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = True
    files: Sequence[Path] = ()
    stride: int | None = None  # of the windows of files; None: `context`
    context: int | None = None  # tokens that the model sees; None: as many as it can
    batch: int | None = None  # None: train.global_batch
    tokenizer_path: str | None = None
    bos: bool | None = None  # see TaskText
    cache: Path | None = None  # file of answers
    output: Path | None = None  # file of results
    trust_code: bool = False


def run(cfg: Config, path: Path, settings: Settings) -> int:
    """Prints the results of tasks, and the bits per byte of text files; returns the exit code.

    `path` is the workdir of the run, or one of its checkpoints.
    """
    stride = settings.stride
    faults = minimum_faults(
        1,
        {
            "--batch": 1 if settings.batch is None else settings.batch,
            "--stride": 1 if stride is None else stride,
        },
    )
    for flag, file in (("--output", settings.output), ("--cache", settings.cache)):
        if file is not None and file.is_dir():
            faults.append(f"{flag}={file}: is a folder; use a file, such as {file / 'a.json'}")
    if faults:
        raise ConfigError(*faults)
    workdir = find.workdir_of(path)
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    tokenizer = generate.load_tokenizer(settings.tokenizer_path, folders, workdir, cfg)
    reader = open_reader(cfg, tokenizer, workdir, context=settings.context, bos=settings.bos)
    if stride is not None and stride > reader.context:
        raise ConfigError(
            f"--stride={stride}: is more than the {reader.context} tokens that the model sees, so "
            f"tokens between the windows would not count; use at most {reader.context}"
        )
    texts = [_read_text(file) for file in settings.files]
    opened = None
    if settings.tasks:
        with console.progress("loading tasks", 0):
            opened = _open_suite(settings)
        if settings.apply_chat_template:
            reader.template()  # a fault in it is reported before anything is compiled
        _say_notes(reader, opened)
    if settings.output is not None:
        _touch(settings.output)

    # Last, since it takes the most time: a fault of a flag is reported before.
    program, params = restore_params(cfg, path, tokenizer=tokenizers.digest(tokenizer))
    identity = _identity(cfg, program, params) if settings.cache else ""
    answers = Answers(settings.cache, identity=identity)
    evaluator = Evaluator(cfg, program, reader, batch=settings.batch)
    model = evaluator.model(params, answers)
    results: dict[str, Any] = {}
    lines: list[str] = []
    if texts:
        found = _evaluate_texts(model, settings.files, texts, stride or reader.context)
        results["files"] = found
        lines += _lines_of_files(found)
    if opened is not None:
        found = opened.evaluate(model, bootstrap_iters=suite.BOOTSTRAP_ITERS)
        results |= json.loads(json.dumps(found, default=str))
        lines += table(suite.values_of(found))
    if jax.process_index() == 0:
        console.say(*lines)
        if settings.output is not None:
            settings.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _open_suite(settings: Settings) -> Suite:
    return suite.open_suite(
        settings.tasks,
        settings.include_paths,
        num_fewshot=settings.num_fewshot,
        limit=settings.limit,
        apply_chat_template=settings.apply_chat_template,
        fewshot_as_multiturn=settings.fewshot_as_multiturn,
        trust_code=settings.trust_code,
    )


# ---- the model ----


@dataclass(frozen=True)
class Reader:
    """What a model reads and writes: its tokens, how many it sees, and which end a text."""

    tokenizer: Tokenizer
    text: TaskText
    context: int
    stop: frozenset[int]
    defaults: Defaults  # what generation_config.json says
    template: Callable[[], ChatTemplate]  # raises ConfigError if there is none


def open_reader(
    cfg: Config,
    tokenizer: Tokenizer,
    workdir: Path,
    *,
    context: int | None = None,
    bos: bool | None = None,
) -> Reader:
    """Returns the reader of a run with this tokenizer; `workdir` need not exist yet.

    `context` None is what the model can see; `bos` is that of TaskText. Raises ConfigError if the
    model cannot see as many tokens.
    """
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    is_imported = run_tokenizer.imported_config(workdir, cfg.to_dict()) is not None
    own_context = generate.longest_context(cfg, is_imported=is_imported)
    context = generate.check_lengths(cfg, 1, own_context if context is None else context)
    ends = {tokenizer.eos, *generate.listed_end_tokens(folders, tokenizer)}

    @functools.cache
    def template() -> ChatTemplate:
        if tokenizer.file is None or tokenizer.kind != "huggingface":
            raise ConfigError(
                f"--apply_chat_template: a {tokenizer.kind} tokenizer has no chat template; use a "
                f"chat model"
            )
        return chat_template.load(tokenizer.file.parent)

    return Reader(
        tokenizer=tokenizer,
        text=TaskText(tokenizer, bos=bos),
        context=context,
        stop=frozenset(token for token in ends if token is not None),
        defaults=generation_config.read(folders),
        template=template,
    )


def _say_notes(reader: Reader, opened: Suite) -> None:
    """Prints what generation_config.json says about the texts of tasks besides how to sample."""
    if not opened.generates or jax.process_index() != 0:
        return
    defaults = reader.defaults
    notes = defaults.notes()
    if defaults.length is not None:
        notes.append(
            f"{defaults.file}: max_new_tokens={defaults.length}: replaces max_gen_toks of tasks, "
            f"as in transformers"
        )
    for note in notes:
        console.say(note, stream="stderr")


class Evaluator:
    """Makes the TaskModel of given parameters. Its programs are compiled once, when first used."""

    def __init__(
        self,
        cfg: Config,
        program: Program,
        reader: Reader,
        *,
        batch: int | None = None,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        self._cfg = cfg
        self._program = program
        self._reader = reader
        self._batch = batch or cfg.train.global_batch
        self._stop_requested = stop_requested
        self._decodes: dict[Sampling, sampling.Decode] = {}
        self._scorer = Scorer(
            cfg,
            program,
            context=reader.context,
            batch=self._batch,
            stop_requested=stop_requested,
        )

    def model(self, params: Params, answers: Answers | None = None) -> TaskModel:
        """Returns the model with these parameters; `answers` keeps what it answers."""
        reader = self._reader

        @functools.cache
        def generator(given: Sampling) -> sampling.Generate:
            program, placed = self._without_stages(params)
            if reader.tokenizer.kind != "huggingface":
                # The embedding may have more rows than the tokenizer has tokens. As in transformers
                # a tokenizer.json reads these as no text.
                given = dataclasses.replace(given, vocab_size=reader.tokenizer.vocab_size)
            if given not in self._decodes:
                self._decodes[given] = sampling.make_decode(program, given)
            return sampling.generator(
                program,
                placed,
                context=reader.context,
                dtype=self._cfg.train.dtype,
                sampling=given,
                few_shapes=True,
                decode=self._decodes[given],
            )

        return TaskModel(
            text=reader.text,
            score=functools.partial(self._scorer.score, params),
            generator=generator,
            context=reader.context,
            batch=self._batch,
            stop=reader.stop,
            sampling=reader.defaults.sampling,
            length=reader.defaults.length,
            template=reader.template,
            answers=answers or Answers(),
            stop_requested=self._stop_requested,
        )

    def _without_stages(self, params: Params) -> tuple[Program, Params]:
        """Returns the program that generates, and the parameters with its shardings."""
        if self._cfg.mesh.pipeline == 1:
            return self._program, params
        program = self._generation_program
        return program, jax.device_put(params, state.shardings_of(program.abstract_state.params))

    @functools.cached_property
    def _generation_program(self) -> Program:
        cfg = generate.without_stages(self._cfg)
        model = self._program.model
        return assemble(cfg, RunParts(model, optimizer_builder(cfg, model)))


def _identity(cfg: Config, program: Program, params: Params) -> str:
    """Returns a text that differs between models, and is the same on every mesh."""

    def sums(params: Params) -> list[jax.Array]:
        found = []
        for leaf in jax.tree.leaves(params):
            width = min(leaf.dtype.itemsize, 4)
            words = jax.lax.bitcast_convert_type(leaf, f"uint{8 * width}").astype(jnp.uint32)
            found.append(jnp.stack([words.sum(dtype=jnp.uint32), (words * words).sum()]))
        return found

    replicated = jax.NamedSharding(program.mesh, jax.P())
    with program.active():
        found = jax.device_get(jax.jit(sums, out_shardings=replicated)(params))
    of_params = [pair.tolist() for pair in found]
    return json.dumps([of_params, dict(cfg.model.options), cfg.train.dtype], default=str)


# ---- texts ----


def _read_text(file: Path) -> str:
    try:
        content = foreign.read_bytes(file, max_bytes=MAX_TEXT_BYTES)
        text = content.decode("utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--files={file}: cannot be read as UTF-8 text: {reason}") from None
    if not text:
        raise ConfigError(f"--files={file}: is empty")
    return text


def _evaluate_texts(
    model: TaskModel, files: Sequence[Path], texts: Sequence[str], stride: int
) -> list[dict[str, Any]]:
    """Returns for each file its name, its bytes, its tokens and their log-likelihood."""
    tokens = [model.text.encode(text, special=False) for text in texts]
    sums = model.rolling_log_likelihoods(tokens, stride, "scoring files")
    found = []
    for file, text, ids, logprob in zip(files, texts, tokens, sums, strict=True):
        found.append(
            {
                "file": str(file),
                "bytes": len(text.encode()),
                "tokens": len(ids),
                "loglikelihood": logprob,
                "bits_per_byte": -logprob / math.log(2) / len(text.encode()),
            }
        )
    return found


def _lines_of_files(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a line for each file, and one for all if there are several."""
    rows = list(found)
    if len(rows) > 1:
        total = {key: sum(row[key] for row in rows) for key in ("bytes", "tokens", "loglikelihood")}
        bits = -total["loglikelihood"] / math.log(2) / total["bytes"]
        rows.append({"file": "all", **total, "bits_per_byte": bits})
    width = max(len(row["file"]) for row in rows)
    lines = []
    for row in rows:
        loss = -row["loglikelihood"] / row["tokens"]
        lines.append(
            f"{row['file']:{width}}  {row['bits_per_byte']:.6f} bits per byte over "
            f"{row['bytes']:,} bytes; perplexity {math.exp(min(loss, 700)):.4f} over "
            f"{row['tokens']:,} tokens"
        )
    return lines


# ---- results ----


def table(values: Sequence[Value]) -> list[str]:
    """Returns the lines of a table of results."""
    rows = [("task", "metric", "value", "stderr", "questions")]
    for one in values:
        rows.append(
            (
                one.task,
                one.metric,
                _number(one.value),
                "" if one.stderr is None else _number(one.stderr),
                "" if one.num_samples is None else f"{one.num_samples:,}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for task, metric, *numbers in rows:
        cells = [f"{task:{widths[0]}}", f"{metric:{widths[1]}}"]
        cells += [f"{number:>{width}}" for number, width in zip(numbers, widths[2:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines


def _number(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e6 else f"{value:.4g}"


def _touch(file: Path) -> None:
    """Raises ConfigError if results cannot be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    except OSError as error:
        raise ConfigError(f"--output={file}: {error.strerror}; use another file") from None


# ---- during training ----

TaskMetrics = Callable[[TrainState], dict[str, float | None] | None]


def make_task_metrics(
    cfg: Config,
    program: Program,
    folder: Path | None,
    *,
    stop_requested: Callable[[], bool] = lambda: False,
    trust_code: bool = False,
) -> TaskMetrics | None:
    """Returns the function state -> metrics of the tasks in `eval.tasks`; None without tasks.

    `folder` is the workdir. The function returns None instead of metrics if the run is asked to
    stop. Raises ConfigError for tasks that cannot be loaded, or a run without tokenizer.
    """
    if not cfg.eval.tasks:
        return None
    settings = Settings(
        tasks=cfg.eval.tasks.split(","),
        include_paths=[Path(cfg.eval.tasks_path)] if cfg.eval.tasks_path else [],
        num_fewshot=None if cfg.eval.tasks_fewshot < 0 else cfg.eval.tasks_fewshot,
        limit=cfg.eval.tasks_limit or None,
        apply_chat_template=cfg.eval.tasks_chat_template,
        trust_code=trust_code,
    )
    workdir = folder or Path()
    folders = run_tokenizer.folders(workdir, cfg.to_dict())
    try:
        tokenizer = generate.load_tokenizer(None, folders, workdir, cfg)
        reader = open_reader(cfg, tokenizer, workdir)
        opened = _open_suite(settings)
        if settings.apply_chat_template:
            reader.template()
    except ConfigError as error:
        names = {
            "--tasks": "eval.tasks",
            "--include_path": "eval.tasks_path",
            "--limit": "eval.tasks_limit",
            "--num_fewshot": "eval.tasks_fewshot",
            "--apply_chat_template": "eval.tasks_chat_template",
        }
        faults = []
        for fault in error.faults:
            for flag, key in names.items():
                fault = fault.replace(flag, key)
            faults.append(fault if fault.startswith("eval.") else f"eval.tasks: {fault}")
        raise ConfigError(*faults) from error
    _say_notes(reader, opened)
    evaluator = Evaluator(cfg, program, reader, stop_requested=stop_requested)

    def evaluate(state: TrainState) -> dict[str, float | None] | None:
        try:
            found = opened.evaluate(evaluator.model(evaluation_params(state)))
        except Interrupted:
            return None
        metrics: dict[str, float | None] = {}
        for one in suite.values_of(found):
            value = one.value if math.isfinite(one.value) else None
            metrics[f"{TASK_PREFIX}{one.task}/{one.metric}"] = value
        return metrics

    return evaluate
