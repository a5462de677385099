"""Answers the requests of tasks with a run's model, as lm-evaluation-harness defines them.

The conventions are those of its own backend for transformers (`lm_eval.models.huggingface` of
0.4.13), so that a model has the same results there.
"""

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from meshtrain import console
from meshtrain.cluster import distributed
from meshtrain.data.chat_template import ChatTemplate
from meshtrain.errors import ConfigError
from meshtrain.inference.answers import Answers
from meshtrain.inference.sampling import Sampling
from meshtrain.inference.scores import NUM_CHOICES, Interrupted, Row, Scores
from meshtrain.inference.task_text import TaskText

# What a task may say of its generation besides `until` and the number of tokens, and that is read.
SAMPLING_KEYS = tuple(field.name for field in fields(Sampling) if field.name != "vocab_size")
# What says nothing about which tokens are generated, or only with these values.
NEUTRAL = {"do_sample": (True, False), "num_beams": (1,), "use_cache": (True, False)}
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends, as in transformers
LOOKBACK = 8  # tokens that are searched for a stop text, besides as many as it has bytes

Score = Callable[..., Iterator[tuple[int, Scores]]]  # `Scorer.score` with its parameters


class Scored(NamedTuple):
    """What the model says about a continuation."""

    logprob: float  # of the continuation, in nats
    is_greedy: bool  # whether each of its tokens is the most likely one


@dataclass(frozen=True)
class TaskModel:
    """A run's model that answers the requests of tasks."""

    text: TaskText
    score: Score
    # (Sampling) -> the function that generates, `sampling.generator`
    generator: Callable[[Sampling], Callable[..., Iterator[list[int | None]]]]
    context: int  # tokens that the model sees
    batch: int  # texts that are generated at a time
    stop: frozenset[int]  # tokens that end a text
    sampling: Mapping[str, Any]  # what the model's files say; a task replaces it
    template: Callable[[], ChatTemplate]  # raises ConfigError if there is none
    answers: Answers
    stop_requested: Callable[[], bool]
    # Tokens to generate, as the model's files say, whatever a task says; None: as the task says.
    length: int | None = None

    # ---- log-likelihoods ----

    def log_likelihoods(
        self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], name: str
    ) -> list[Scored]:
        """Returns the log-likelihood of the continuation of each (context, continuation).

        Both are tokens; a context has one or more. A context that is too long loses its beginning.
        Raises ConfigError for a continuation that is itself longer than what the model sees.
        """
        found: dict[int, Scored] = {}
        known = self.answers.known([("loglikelihood", *map(list, one)) for one in requests])
        # Requests that differ in the last token alone share a row: the choices of many tasks.
        numbers_of: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for number, (before, after) in enumerate(requests):
            if number in known:
                found[number] = Scored(*known[number])
                continue
            if not after:
                found[number] = Scored(0.0, True)
                continue
            if len(after) > self.context:
                raise ConfigError(
                    f"--tasks: an answer has {len(after)} tokens, and the model sees "
                    f"{self.context}; use --context={len(after)} or more"
                )
            *tokens, last = [*before, *after][-(self.context + 1) :]
            by_last = numbers_of.setdefault(tuple(tokens), {})
            by_last.setdefault(last, []).append(number)
        rows: list[Row] = []
        asked: list[dict[int, list[int]]] = []  # of each row: the requests of each of its choices
        for tokens, by_last in numbers_of.items():
            choices = [*by_last]
            for start in range(0, len(choices), NUM_CHOICES):
                some = choices[start : start + NUM_CHOICES]
                rows.append(Row(tokens, tuple(some)))
                asked.append({last: by_last[last] for last in some})

        for row_number, scores in self.score(rows, name=name):
            for choice, numbers in enumerate(asked[row_number].values()):
                for number in numbers:
                    before, after = requests[number]
                    scored = _of_continuation(scores, choice, len(after))
                    found[number] = scored
                    self.answers.add(("loglikelihood", list(before), list(after)), [*scored])
        self.answers.flush()
        return [found[number] for number in range(len(requests))]

    def rolling_log_likelihoods(
        self, texts: Sequence[Sequence[int]], stride: int, name: str
    ) -> list[float]:
        """Returns the log-likelihood of all tokens of each text, each counted once.

        The first token follows the prefix. Of a text that is longer than what the model sees, each
        window after the first scores at most `stride` further tokens.
        """
        requests: list[tuple[Sequence[int], Sequence[int]]] = []
        text_of: list[int] = []
        for number, tokens in enumerate(texts):
            for window in rolling_windows(tokens, self.text.prefix, self.context, stride):
                requests.append(window)
                text_of.append(number)
        sums = [0.0] * len(texts)
        for number, scored in zip(text_of, self.log_likelihoods(requests, name), strict=True):
            sums[number] += scored.logprob
        return sums

    # ---- generation ----

    def generate(
        self,
        texts: Sequence[str],
        *,
        length: int,
        stop_texts: Sequence[str],
        settings: Mapping[str, Any],
        name: str,
    ) -> list[str]:
        """Returns what the model writes after each text, up to a stop text or `length` tokens.

        `settings` say how to sample. A text loses its beginning so that there is room for `length`
        tokens. As in transformers, max_new_tokens of generation_config.json replaces `length`, but
        not the room. Raises ConfigError if there is none at all, and for settings that are not
        supported.
        """
        room = self.context - length
        if room < 1:
            raise ConfigError(
                f"--tasks: max_gen_toks={length} leaves no room for a prompt in the {self.context} "
                f"tokens that the model sees; lower max_gen_toks of the task, or raise --context"
            )
        length = self.length or length
        sampling = self._sampling(settings)
        prompts = []
        for text in texts:
            prompts.append(self.text.encode(text)[-room:] or [self.text.prefix])
        is_greedy = sampling.temperature == 0
        keys = []
        for prompt in prompts:
            keys.append(("generate", prompt, length, [*stop_texts], dict(settings)))
        known = self.answers.known(keys) if is_greedy else {}
        found: dict[int, str] = {number: text for number, text in known.items()}
        # The same prompt has the same text, unless it is sampled.
        numbers_of: dict[Any, list[int]] = {}
        for number, prompt in enumerate(prompts):
            if number not in found:
                key = tuple(prompt) if is_greedy else number
                numbers_of.setdefault(key, []).append(number)
        groups = sorted(numbers_of.values(), key=lambda numbers: -len(prompts[numbers[0]]))
        run = self.generator(sampling)
        num_batches = -(-len(groups) // self.batch)
        with console.progress(name, num_batches) as advance:
            for start in range(0, len(groups), self.batch):
                if start and distributed.broadcast(self.stop_requested()):
                    raise Interrupted
                batch = groups[start : start + self.batch]
                rows = [prompts[numbers[0]] for numbers in batch]
                # The rows that fill a batch write nothing; so there is one number of rows.
                num_added = self.batch - len(rows)
                rows += [rows[-1]] * num_added
                ended = {*range(len(batch), self.batch)}
                # Batches have other random numbers: a task may ask for many texts of a prompt.
                write = functools.partial(run, rows, length=length, stream=start)
                new = self._generate_batch(write, len(rows), ended, stop_texts)
                for numbers, text in zip(batch, new[: len(batch)], strict=True):
                    for number in numbers:
                        found[number] = text
                        if is_greedy:
                            self.answers.add(keys[number], text)
                self.answers.flush()
                advance()
        return [found[number] for number in range(len(texts))]

    def _generate_batch(
        self,
        write: Callable[..., Iterator[list[int | None]]],
        num_rows: int,
        ended: set[int],
        stop_texts: Sequence[str],
    ) -> list[str]:
        stop_texts = [text for text in stop_texts if text]
        num_looked_at = LOOKBACK + max((len(text.encode()) for text in stop_texts), default=0)
        new: list[list[int]] = [[] for _ in range(num_rows)]
        # Every process runs every step, and finds the same stops.
        for step in write(stop=self.stop, ended=ended):
            for number, token in enumerate(step):
                if token is None or number in ended:
                    continue
                new[number].append(token)
                tail = self.text.decode(new[number][-num_looked_at:])
                if any(text in tail for text in stop_texts):
                    ended.add(number)
        texts = []
        for tokens in new:
            text = self.text.decode(tokens)
            for stop_text in stop_texts:
                text = text.split(stop_text)[0]
            texts.append(text)
        return texts

    def _sampling(self, settings: Mapping[str, Any]) -> Sampling:
        """Returns how to sample; raises ConfigError for a setting that would be ignored."""
        for key, value in settings.items():
            if key in SAMPLING_KEYS or (key in NEUTRAL and value in NEUTRAL[key]):
                continue
            raise ConfigError(
                f"--tasks: generation_kwargs has {key}={value!r}, which is not supported; use "
                f"until, max_gen_toks, do_sample, {', '.join(SAMPLING_KEYS)}"
            )
        own = {key: value for key, value in settings.items() if key in SAMPLING_KEYS}
        if not settings.get("do_sample"):
            own["temperature"] = 0.0
        return Sampling(**{**self.sampling, **own})

    # ---- chats ----

    def chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool) -> str:
        """Returns the text of a conversation, up to where the next reply begins.

        Without `add_prompt` the last message is continued. As in the harness, a template that
        accepts no message of the system gets the others.
        """
        try:
            return self._chat_text(messages, add_prompt=add_prompt)
        except ValueError:
            others = [message for message in messages if message["role"] != "system"]
        try:
            return self._chat_text(others, add_prompt=add_prompt)
        except ValueError as error:
            raise ConfigError(f"--apply_chat_template: {error}") from None

    def _chat_text(self, messages: Sequence[Mapping[str, Any]], *, add_prompt: bool) -> str:
        template = self.template()
        if add_prompt:
            return template.render(messages, add_generation_prompt=True).text
        *others, last = messages
        marked = {**last, "content": last["content"] + CONTINUED}
        text = template.render([*others, marked]).text
        end = text.rfind(CONTINUED.strip())
        if end < 0:
            raise ValueError("the chat template leaves out the message that is to be continued")
        if text[end : end + len(CONTINUED)] == CONTINUED:
            return text[:end]
        return text[:end].rstrip()  # the template strips messages


def _of_continuation(scores: Scores, choice: int, num_tokens: int) -> Scored:
    """Returns the log-likelihood of the last `num_tokens`, of which `choice` is the last."""
    num_before = num_tokens - 1
    first = len(scores.logprobs) - num_before
    logprob = scores.logprobs[first:].sum() + scores.choice_logprobs[choice]
    is_greedy = scores.is_best[first:].all() and scores.choice_is_best[choice]
    return Scored(float(logprob), bool(is_greedy))


def rolling_windows(
    tokens: Sequence[int], prefix: int, context: int, stride: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Yields (context, continuation) of a text: each of its tokens is in one continuation.

    The first window has `context` tokens. Each further one has as many, of which at most `stride`
    are continued; the last one may have fewer to continue, not a shorter context. With stride =
    context these are the windows of `lm_eval.utils.get_rolling_token_windows`.
    """
    first = min(context, len(tokens))
    if first:
        yield [prefix], tokens[:first]
    start = first
    while start < len(tokens):
        end = min(start + stride, len(tokens))
        # One token more than the model sees: the last one is only predicted.
        yield tokens[end - context - 1 : start], tokens[start:end]
        start = end


def settings_key(settings: Mapping[str, Any]) -> str:
    """Returns a text that is the same for the same settings."""
    return json.dumps(settings, sort_keys=True, default=str)
