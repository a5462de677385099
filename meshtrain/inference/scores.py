"""Log-probabilities of given tokens, on any mesh, in rows of few lengths: few programs compile.

The model runs as in the evaluation of a training run, also in pipeline stages; only its head is
another one.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain import console
from meshtrain.cluster import distributed
from meshtrain.config.schema import BATCH_AXES, Config
from meshtrain.data.source import Batch
from meshtrain.errors import ConfigError
from meshtrain.metrics import Metrics
from meshtrain.models.base import Model, Params
from meshtrain.ops.losses import MIB
from meshtrain.parallel import context
from meshtrain.parallel.sharding import axes_of, spec_for
from meshtrain.program import Program

# R rows of a batch, B rows of a micro-batch, S sequence, V vocabulary, C choices

SHORTEST = 64  # tokens of the shortest rows; others have twice as many, four times as many, ...
NUM_CHOICES = 8  # last tokens that a row compares at most
DEFAULT_LOGITS_MIB = 2048.0


class Interrupted(Exception):
    """The run is asked to stop before the last row is scored."""


class Row(NamedTuple):
    """Tokens that the model sees, and what is asked about them."""

    tokens: tuple[int, ...]  # one or more
    choices: tuple[int, ...] = ()  # tokens that may follow the last one, at most NUM_CHOICES


class Scores(NamedTuple):
    """What the model says about a row of T tokens and C choices."""

    # In nats, of the tokens after the first, (T - 1,) float64, and whether each is the most likely.
    logprobs: np.ndarray
    is_best: np.ndarray
    choice_logprobs: np.ndarray  # (C,) float64
    choice_is_best: np.ndarray  # (C,)


class Scorer:
    """Scores rows with a program and given parameters. Its programs compile when they are used."""

    def __init__(
        self,
        cfg: Config,
        program: Program,
        *,
        context: int,
        batch: int,
        stop_requested: Callable[[], bool] = lambda: False,
    ):
        """Rows have at most `context` tokens. `batch` rows are scored at a time, fewer long ones.

        `stop_requested` is asked between two batches, on all processes. Raises ConfigError for a
        model without logits.
        """
        if program.model.logits is None:
            raise ConfigError(
                "model: has no logits, which tasks need; see meshtrain/models/base.py"
            )
        self._cfg = cfg
        self._program = program
        self._context = context
        self._batch = batch
        self._stop_requested = stop_requested
        self._compiled: dict[tuple[int, int], jax.stages.Compiled] = {}

    def score(
        self, params: Params, rows: Sequence[Row], *, name: str
    ) -> Iterator[tuple[int, Scores]]:
        """Yields the number of each row and its scores; `name` is that of the progress bar.

        Raises Interrupted if the run is asked to stop.
        """
        by_length: dict[int, list[int]] = {}
        for number, row in enumerate(rows):
            by_length.setdefault(self._length_of(row), []).append(number)
        # The longest first: if memory does not suffice, that is seen at once.
        batches = []
        for length in sorted(by_length, reverse=True):
            numbers = sorted(by_length[length], key=lambda number: -len(rows[number].tokens))
            num_rows, _ = self._shape_of_batch(length)
            for start in range(0, len(numbers), num_rows):
                batches.append((length, numbers[start : start + num_rows]))
        with console.progress(name, len(batches)) as advance:
            for count, (length, numbers) in enumerate(batches):
                # Process 0 decides for all.
                if count and distributed.broadcast(self._stop_requested()):
                    raise Interrupted
                with self._program.active():
                    some = [rows[number] for number in numbers]
                    found = self._score_batch(params, some, length)
                advance()
                yield from zip(numbers, found, strict=True)

    def _length_of(self, row: Row) -> int:
        """Returns the number of tokens to which a row is padded."""
        assert 0 < len(row.tokens) <= self._context and len(row.choices) <= NUM_CHOICES
        length = SHORTEST
        while length < len(row.tokens):
            length *= 2
        chunks = 2 * self._cfg.mesh.context
        return min(length, -(-self._context // chunks) * chunks)

    def _shape_of_batch(self, length: int) -> tuple[int, int]:
        """Returns the numbers of rows and of micro-batches, by what the logits take of memory."""
        cfg = self._cfg
        num_shards = math.prod(getattr(cfg.mesh, axis) for axis in BATCH_AXES)
        options = cfg.model.options
        mib = options.get("loss_chunk_mib") or DEFAULT_LOGITS_MIB
        vocab_size = options.get("vocab_size", 0) / cfg.mesh.tensor
        bytes_of_row = 4.0 * max(1, vocab_size) * length / cfg.mesh.context
        rows_at_once = max(1, int(mib * MIB / bytes_of_row))
        rows_per_shard = max(1, self._batch // num_shards)
        if cfg.mesh.pipeline > 1:
            num_microbatches = cfg.train.num_microbatches
            rows_at_once = min(rows_at_once, max(1, rows_per_shard // num_microbatches))
            return num_shards * num_microbatches * rows_at_once, num_microbatches
        num_microbatches = -(-rows_per_shard // rows_at_once)
        rows_at_once = -(-rows_per_shard // num_microbatches)
        return num_shards * num_microbatches * rows_at_once, num_microbatches

    def _score_batch(self, params: Params, rows: Sequence[Row], length: int) -> list[Scores]:
        num_rows, num_microbatches = self._shape_of_batch(length)
        batch, order = self._to_devices(rows, num_rows, length)
        key = length, num_rows
        if key not in self._compiled:
            head = _make_head(self._program.model, num_rows)
            model = dataclasses.replace(self._program.model, head=head)
            score = self._program.eval_step_of(model, num_microbatches)
            replicated = jax.NamedSharding(self._program.mesh, jax.P())
            jitted = jax.jit(
                lambda params, batch: score(params, batch).extra, out_shardings=replicated
            )
            self._compiled[key] = jitted.lower(params, batch).compile()
            distributed.barrier("scores compiled")
        # One batch at a time: on CPU, processes confuse the messages of two programs in flight.
        found = jax.device_get(self._compiled[key](params, batch))
        in_order = np.argsort(order)
        logprobs_RS = found["logprobs"].astype(np.float64)[:, in_order]
        is_best_RS = found["is_best"][:, in_order] > 0
        scores = []
        for number, row in enumerate(rows):
            num_targets = len(row.tokens) - 1
            num_choices = len(row.choices)
            scores.append(
                Scores(
                    logprobs=logprobs_RS[number, :num_targets],
                    is_best=is_best_RS[number, :num_targets],
                    choice_logprobs=found["choices"][number, :num_choices].astype(np.float64),
                    choice_is_best=found["choice_is_best"][number, :num_choices] > 0,
                )
            )
        return scores

    def _to_devices(
        self, rows: Sequence[Row], num_rows: int, length: int
    ) -> tuple[Batch, np.ndarray]:
        """Returns the rows as a batch on the devices, and the order of the sequences there."""
        tokens_RS = np.zeros((num_rows, length), np.int32)
        targets_RS = np.zeros((num_rows, length), np.int32)
        questions_RC = np.zeros((num_rows, 2 + NUM_CHOICES), np.int32)
        questions_RC[:, 0] = np.arange(num_rows)
        for number, row in enumerate(rows):
            num_tokens = len(row.tokens)
            tokens_RS[number, :num_tokens] = row.tokens
            targets_RS[number, : num_tokens - 1] = row.tokens[1:]
            questions_RC[number, 1] = num_tokens - 1
            questions_RC[number, 2 : 2 + len(row.choices)] = row.choices
        mesh, rules = self._program.mesh, self._program.rules
        (batch_axes,) = spec_for(("batch",), (num_rows,), rules, mesh.shape)
        (seq_axes,) = spec_for(("seq",), (length,), rules, mesh.shape)
        num_chunks = math.prod(mesh.shape[axis] for axis in axes_of(seq_axes))
        order = context.order(length, num_chunks)
        of_rows = jax.NamedSharding(mesh, jax.P(batch_axes))
        of_sequences = jax.NamedSharding(mesh, jax.P(batch_axes, seq_axes))

        def put(array: np.ndarray, sharding: jax.NamedSharding) -> jax.Array:
            return jax.make_array_from_callback(array.shape, sharding, array.__getitem__)

        batch = Batch(
            tokens=put(tokens_RS[:, order], of_sequences),
            targets=put(targets_RS[:, order], of_sequences),
            # Also where there is no target: the scores of padding are dropped.
            weights=put(np.ones((num_rows, length), np.float32), of_sequences),
            questions=put(questions_RC, of_rows),
        )
        return batch, order


def _make_head(model: Model, num_rows: int) -> Callable[[Params, Any, Batch], Metrics]:
    """Returns the head that answers the questions of a batch of R = `num_rows` rows.

    Its sums are arrays with a row for each row of the batch, which is 0 where a micro-batch, or a
    shard of one, does not have that row: so they add up to the answers.
    """

    def head(params: Params, x: Any, batch: Batch) -> Metrics:
        logits_BSV = model.logits(params, x)
        logits_BSV = logits_BSV.astype(jnp.promote_types(logits_BSV.dtype, jnp.float32))
        vocab_V = jnp.arange(logits_BSV.shape[-1], dtype=jnp.int32)
        log_z_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
        best_BS = jnp.argmax(logits_BSV, axis=-1)
        # Compared, not gathered: see losses.cross_entropy.
        is_target_BSV = vocab_V[None, None] == batch.targets[..., None]
        target_BS = jnp.sum(jnp.where(is_target_BSV, logits_BSV, 0), axis=-1)

        # The token after the last one.
        S = logits_BSV.shape[1]
        last_B1 = batch.questions[:, 1:2]
        choices_BC = batch.questions[:, 2:]
        is_last_BS = context.positions(S)[None] == last_B1
        logits_BV = jnp.sum(jnp.where(is_last_BS[..., None], logits_BSV, 0), axis=1)
        log_z_B1 = jnp.sum(jnp.where(is_last_BS, log_z_BS, 0), axis=1, keepdims=True)
        best_B1 = jnp.sum(jnp.where(is_last_BS, best_BS, 0), axis=1, keepdims=True)
        is_choice_BCV = vocab_V[None, None] == choices_BC[..., None]
        choice_BC = jnp.sum(jnp.where(is_choice_BCV, logits_BV[:, None], 0), axis=-1)

        is_row_RB = jnp.arange(num_rows)[:, None] == batch.questions[None, :, 0]

        def to_rows(values_BN: jax.Array) -> jax.Array:
            values_BN = values_BN.astype(log_z_BS.dtype)
            return jnp.sum(jnp.where(is_row_RB[..., None], values_BN[None], 0), axis=1)

        answers = {
            "logprobs": to_rows(target_BS - log_z_BS),
            "is_best": to_rows(best_BS == batch.targets),
            "choices": to_rows(choice_BC - log_z_B1),
            "choice_is_best": to_rows(best_B1 == choices_BC),
        }
        zero = jnp.zeros((), log_z_BS.dtype)
        return Metrics(loss=zero, weight=zero, extra=answers)

    return head
