"""Runs tasks through lm-evaluation-harness: it makes the requests, and measures the answers."""

import contextlib
import hashlib
import json
import math
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from meshtrain.cluster import distributed
from meshtrain.errors import ConfigError
from meshtrain.inference import task_files
from meshtrain.inference.scores import Interrupted
from meshtrain.inference.task_model import TaskModel, settings_key

FEWSHOT_SEED = 1234  # as the harness has it, so that the examples are the same
BOOTSTRAP_ITERS = 1000  # of standard errors that have no formula
MAX_GEN_TOKS = 256  # as in the harness, of a task that does not say how many


class Value(NamedTuple):
    """A metric of a task or of a group of tasks."""

    task: str
    metric: str  # with the name of its filter, if that is not "none": exact_match,strict
    value: float
    stderr: float | None
    num_samples: int | None  # None: of a group


@dataclass(frozen=True)
class Suite:
    """Tasks that are loaded, and how they are asked."""

    loaded: Mapping[str, Any]  # see `task_files.load`
    limit: float | None  # questions of each task; below 1: their share; None: all
    apply_chat_template: bool
    fewshot_as_multiturn: bool
    trust_code: bool

    @property
    def generates(self) -> bool:
        """Whether a task asks for texts."""
        tasks = self.loaded["tasks"].values()
        return any(task.OUTPUT_TYPE == "generate_until" for task in tasks)

    def evaluate(self, model: TaskModel, *, bootstrap_iters: int = 0) -> dict[str, Any]:
        """Returns the results of the harness.

        All processes must call it: they run the same programs. Raises Interrupted if the run is
        asked to stop, and ConfigError for a fault of a task.
        """
        from lm_eval import evaluator

        for task in self.loaded["tasks"].values():
            task.set_fewshot_seed(seed=FEWSHOT_SEED)
        with _harness_settings(), task_files.sandbox(trust_code=self.trust_code):
            try:
                return evaluator.evaluate(
                    lm=_language_model(model),
                    task_dict=self.loaded,
                    limit=self.limit,
                    bootstrap_iters=bootstrap_iters,
                    log_samples=False,
                    apply_chat_template=self.apply_chat_template,
                    fewshot_as_multiturn=self.fewshot_as_multiturn,
                    confirm_run_unsafe_code=self.trust_code,
                )
            except (ConfigError, Interrupted, MemoryError):
                raise
            except Exception as error:
                # A fault of jax is not one of the tasks.
                if type(error).__module__.startswith(("jax", "jaxlib")):
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split())
                raise ConfigError(f"--tasks: {reason}") from error


def open_suite(
    names: Sequence[str],
    include_paths: Sequence[Path],
    *,
    num_fewshot: int | None,
    limit: float | None,
    apply_chat_template: bool,
    fewshot_as_multiturn: bool,
    trust_code: bool,
) -> Suite:
    """Returns the tasks with these names; raises ConfigError for a fault in them."""
    faults = []
    if num_fewshot is not None and num_fewshot < 0:
        faults.append(f"--num_fewshot={num_fewshot}: use 0 or more")
    if limit is not None and not (limit > 0 and math.isfinite(limit)):
        faults.append(f"--limit={limit:g}: use a number of questions, or a share below 1")
    if limit is not None and limit > 1 and limit != int(limit):
        faults.append(f"--limit={limit:g}: use an integer, or a share below 1")
    if faults:
        raise ConfigError(*faults)
    loaded = task_files.load(names, include_paths, num_fewshot=num_fewshot, trust_code=trust_code)
    return Suite(loaded, limit, apply_chat_template, fewshot_as_multiturn, trust_code)


@contextlib.contextmanager
def _harness_settings() -> Iterator[None]:
    """Keeps the harness from forking processes, and from changing global seeds."""
    variable = os.environ.get("DISABLE_MULTIPROC")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    os.environ["DISABLE_MULTIPROC"] = "1"  # a fork of a process with jax's threads may hang
    random.seed(0)
    np.random.seed(FEWSHOT_SEED)
    try:
        yield
    finally:
        if variable is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = variable
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def values_of(results: Mapping[str, Any]) -> list[Value]:
    """Returns the metrics in the results of the harness."""
    groups = results.get("groups", {})
    counts = results.get("n-samples", {})
    found = []
    for task, metrics in {**results["results"], **groups}.items():
        num_samples = counts[task]["effective"] if task in counts else None
        for key, value in metrics.items():
            metric, _, name = key.partition(",")
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not name or metric.endswith("_stderr") or not is_number:
                continue
            stderr = metrics.get(f"{metric}_stderr,{name}")
            has_stderr = isinstance(stderr, int | float | np.number)
            found.append(
                Value(
                    task=task,
                    metric=metric if name == "none" else f"{metric},{name}",
                    value=float(value),
                    stderr=float(stderr) if has_stderr else None,
                    num_samples=num_samples,
                )
            )
    return found


def _language_model(model: TaskModel) -> Any:
    """Returns the model as an object of the harness."""
    # Defined here: the harness, an optional package, accepts subclasses of its own class only.
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    text = model.text

    class RunModel(TemplateLM):
        """A run's model, which answers requests in tokens."""

        tokenizer_name = ""

        @property
        def eot_token_id(self) -> int:
            return text.prefix if text.end is None else text.end

        @property
        def prefix_token_id(self) -> int:
            return text.prefix

        def tok_encode(
            self, string: str, add_special_tokens: bool | None = None, **options: Any
        ) -> list[int]:
            return text.encode(string, special=add_special_tokens)

        def loglikelihood(self, requests: list, disable_tqdm: bool = True) -> list:
            _check_same([request.args for request in requests])
            return super().loglikelihood(requests, disable_tqdm=True)

        def _loglikelihood_tokens(self, requests: list, **options: Any) -> list:
            pairs = [(before, after) for _, before, after in requests]
            scored = model.log_likelihoods(pairs, "scoring answers")
            return [(one.logprob, one.is_greedy) for one in scored]

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = True) -> list[float]:
            _check_same([request.args for request in requests])
            texts = [text.encode(request.args[0]) for request in requests]
            return model.rolling_log_likelihoods(texts, model.context, "scoring texts")

        def generate_until(self, requests: list, disable_tqdm: bool = True) -> list[str]:
            _check_same([request.args for request in requests])
            by_settings: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                by_settings.setdefault(settings_key(request.args[1]), []).append(number)
            found: dict[int, str] = {}
            for numbers in by_settings.values():
                settings = normalize_gen_kwargs(requests[numbers[0]].args[1], MAX_GEN_TOKS)
                end = None if text.end is None else text.spelling(text.end)
                stop_texts = handle_stop_sequences(settings.pop("until"), eos=end)
                length = settings.pop("max_gen_toks")
                new = model.generate(
                    [requests[number].args[0] for number in numbers],
                    length=length,
                    stop_texts=stop_texts,
                    settings=settings,
                    name="generating answers",
                )
                found.update(zip(numbers, new, strict=True))
            return [found[number] for number in range(len(requests))]

        def apply_chat_template(
            self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
        ) -> str:
            return model.chat_text(chat_history, add_prompt=add_generation_prompt)

    return RunModel()


def _check_same(requests: Sequence[Any]) -> None:
    """Raises ConfigError if the processes have other requests: they would wait for each other."""
    content = json.dumps(requests, sort_keys=True, default=str)
    digests = distributed.gather(hashlib.sha256(content.encode()).hexdigest())
    if len(set(digests)) > 1:
        raise ConfigError(
            "--tasks: the processes have different questions; give all hosts the same task files "
            "and data"
        )
