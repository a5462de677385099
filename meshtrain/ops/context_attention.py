"""Attention of sharded sequences, in blocks of chunks: keys and values travel, or are gathered.

Where a fused kernel fits, context_fused.py replaces it. See parallel/context.py for the methods and
the order. In auto sharding: a device is only an index of a dim of size c.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.ops import blockwise, implementations
from meshtrain.ops.blockwise import Dropout, Visibility
from meshtrain.parallel import sharding

# B batch, S sequence, H heads = G key/value heads x R, K head dim, n blocks of a chunk, b tokens of
# a block, c devices, each with an early and a late chunk of a sequence

C = 2  # the dim of the devices in blocks (n, B, c, ...)
NO_SEGMENT = np.iinfo(np.int32).min  # of the padding of keys: no query is in it


class Options(NamedTuple):
    scale: float
    softcap: float
    num_devices: int
    length: int  # tokens of a chunk
    block: int
    gathers: bool  # whether keys and values are gathered, or travel


class Pair(NamedTuple):
    """A chunk of queries and a chunk of keys on each device."""

    queries_early: jax.Array  # (c,) bool, whether the queries are those of the early chunk
    keys_early: jax.Array  # (c,) bool
    distance: jax.Array  # (c,) int32, chunks between the starts of queries and keys
    # (), of all devices; computed from the distances, each would be an all-reduce.
    smallest: jax.Array
    largest: jax.Array


def attention(
    q_BSHK: jax.Array,
    k_BSGK: jax.Array,
    v_BSGK: jax.Array,
    segments_BS: jax.Array | None,
    *,
    method: str,
    scale: float,
    softcap: float,
    window: jax.Array | int | None,
    implementation: str,
    dropout: Dropout | None,
    sinks_H: jax.Array | None,
) -> jax.Array:
    """Returns the attention (B, S, H, K) of sequences in zigzag order, by "ring" or "gather"."""
    S = q_BSHK.shape[1]
    num_devices = sharding.num_shards("seq", S)
    length = S // (2 * num_devices)
    block = block_size(implementation, length)
    options = Options(
        scale=scale,
        softcap=softcap,
        num_devices=num_devices,
        length=length,
        block=block,
        gathers=method == "gather",
    )
    segments = jnp.zeros((1, S), jnp.int32) if segments_BS is None else segments_BS
    window = jnp.int32(S if window is None else window)
    return _attention(options, q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(options, q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H):
    return _forward(options, q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H)[0]


def _forward(options, q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H):
    """Keeps residuals that are not in blocks: they share memory with those of the layer."""
    queries, keys = _queries_and_keys(options, q_BSHK, k_BSGK, v_BSGK, segments)
    softmaxes = tuple(
        blockwise.no_keys(q, v_BSGK.shape[-1], _sinks_of(options, sinks_H, q)) for q, _ in queries
    )
    visit = partial(_visit, options, window, dropout, queries)
    softmaxes = _rounds(options, visit, softmaxes, keys)
    dtype = q_BSHK.dtype
    out, log_z = zip(*(blockwise.finish(half, dtype) for half in softmaxes), strict=True)
    out_BSHK = _join(options, out, dtype)
    inputs = q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H
    return out_BSHK, (inputs, out_BSHK, log_z)


def _backward(options, residuals, grad_BSHK):
    # Without a barrier XLA would keep what the forward pass fetched, instead of fetching it again.
    residuals, grad_BSHK = jax.lax.optimization_barrier((residuals, grad_BSHK))
    inputs, out_BSHK, log_z = residuals
    q_BSHK, k_BSGK, v_BSGK, segments, window, dropout, sinks_H = inputs
    queries, keys = _queries_and_keys(options, q_BSHK, k_BSGK, v_BSGK, segments)
    G, dtype = k_BSGK.shape[2], log_z[0].dtype
    # Not in blocks: the output would be kept a second time, in blocks.
    row_dots_BSH1 = blockwise.row_dot(out_BSHK, grad_BSHK, dtype)[..., None]
    row_dots, grad_out = (_halves(options, x, G) for x in (row_dots_BSH1, grad_BSHK))
    seen = tuple(zip(log_z, (x[..., 0] for x in row_dots), grad_out, strict=True))
    zeros = tuple(jnp.zeros(q.shape, dtype) for q, _ in queries)
    sums, collect, finish = _collected(options, keys, dtype)

    def visit(grads, keys, number):
        grad_q, sums = grads
        grad_q, new = _visit_back(options, window, dropout, queries, seen, grad_q, keys, number)
        return grad_q, collect(sums, new, number)

    grad_q, sums = _rounds(options, visit, (zeros, sums), keys)
    grads = grad_q, *zip(*finish(sums), strict=True)
    joined = (
        _join(options, grad, x.dtype)
        for grad, x in zip(grads, (q_BSHK, k_BSGK, v_BSGK), strict=True)
    )
    return *joined, None, None, None, _gradient_of_sinks(options, sinks_H, log_z, row_dots)


def _sinks_of(options: Options, sinks_H: jax.Array | None, q: jax.Array) -> jax.Array | None:
    """Returns the sink of each query (n, B, c, G, R b, K), or None."""
    return None if sinks_H is None else blockwise.sinks_of_queries(sinks_H, q, options.block)


def _gradient_of_sinks(options: Options, sinks_H, log_z, row_dots) -> jax.Array | None:
    """Returns the gradient (H,) of the sinks, from both halves of `log_z` and `row_dots`."""
    if sinks_H is None:
        return None
    sums = []
    for half, row_dots_of_half in zip(log_z, row_dots, strict=True):
        sinks = blockwise.sinks_of_queries(sinks_H, half[..., None], options.block)
        grads = blockwise.gradient_of_sinks(sinks, half, row_dots_of_half[..., 0])
        grads = grads.reshape(*half.shape[:4], -1, options.block)
        sums.append(grads.astype(half.dtype).sum((0, 1, 2, 5)).reshape(-1))
    return jnp.add(*sums).astype(sinks_H.dtype)


_attention.defvjp(_forward, _backward)


# ---- rounds: the keys of one other device at a time ----


def _rounds(options: Options, visit: Callable, carry: Any, keys: Any) -> Any:
    """Returns `carry` after c visits: in round r a device has the keys of the r-th before it.

    Keys are fetched before a visit that does not need them, so that they can arrive while it
    computes.
    """
    c = options.num_devices
    if options.gathers:
        keys_of_all, device = _pin(keys, replicated=True), jnp.arange(c)

        def with_gathered(carry, number):
            home = (device - number) % c
            keys = jax.tree.map(lambda x: jnp.take(x, home, axis=C, mode="clip"), keys_of_all)
            return visit(carry, _pin(keys), number), None

        return jax.lax.scan(with_gathered, visit(carry, keys, 0), jnp.arange(1, c))[0]

    def with_travelling(carry, number):
        results, keys = carry
        following = _to_next_device(keys)
        return (visit(results, keys, number), following), None

    (carry, keys), _ = jax.lax.scan(with_travelling, (carry, keys), jnp.arange(c - 1))
    return visit(carry, keys, c - 1)


def _to_next_device(tree: Any) -> Any:
    return _pin(jax.tree.map(lambda x: jnp.roll(x, 1, axis=C), tree))  # collective-permutes


def _collected(options: Options, keys, dtype) -> tuple[Any, Callable, Callable]:
    """Returns the sums of gradients of keys and values before the first round, `add` and `finish`.

    `add(sums, gradients of a round, round) -> sums`, and `finish(sums) -> gradients` on the device
    of the keys. In a ring the sums travel with the keys, and once more. With gathered keys, the
    gradients from each device are kept apart, and are sent and added once.
    """
    zeros = _no_gradients(keys, dtype)
    if not options.gathers:

        def travel(sums, new, _):
            return _to_next_device(jax.tree.map(jnp.add, sums, new))

        return _pin(zeros), travel, lambda sums: sums

    def keep(sums, new, number):
        return jax.tree.map(lambda kept, x: kept.at[number].set(x), sums, new)

    def send(kept):
        return sum(_pin(jnp.roll(kept[n], -n, axis=C)) for n in range(len(kept)))

    sums = jax.tree.map(lambda x: jnp.zeros((options.num_devices, *x.shape), dtype), zeros)
    return sums, keep, lambda sums: jax.tree.map(send, sums)


def _no_gradients(keys, dtype: jax.typing.DTypeLike):
    """Returns zeros for the gradients of k and v, of the early and of the late chunks."""
    return tuple(tuple(jnp.zeros(x.shape, dtype) for x in half[:2]) for half in keys)


# ---- a visit: queries meet the keys of one round ----


def _visit(options: Options, window, dropout, queries, softmaxes, keys, number):
    """Returns the softmaxes of the early and the late queries with these keys added.

    `queries` is a pair of (q, segments), `keys` of (k, v, segments).
    """

    def add(softmaxes, pair):
        q, segments_s = _choose(pair.queries_early, queries)
        k, v, segments_t = _choose(pair.keys_early, keys)
        visibility = _visibility(options, window, dropout, pair, segments_s, segments_t)
        softmax = _choose(pair.queries_early, softmaxes)
        new = blockwise.add_keys(options.scale, options.softcap, softmax, q, k, v, visibility)
        return _replace(pair.queries_early, softmaxes, new)

    return loop_over_pairs(options.num_devices, number, add, softmaxes)


def _visit_back(options: Options, window, dropout, queries, seen, grad_q, keys, number):
    """Returns `grad_q` plus the gradients of queries from these keys, and those of the keys."""

    def add(grads, pair):
        grad_q, sums = grads
        q, segments_s = _choose(pair.queries_early, queries)
        k, v, segments_t = _choose(pair.keys_early, keys)
        visibility = _visibility(options, window, dropout, pair, segments_s, segments_t)
        of_pair = _choose(pair.queries_early, seen), _choose(pair.keys_early, sums)
        new, *new_sums = blockwise.gradients(
            options.scale, options.softcap, q, k, v, visibility, *of_pair
        )
        new = _choose(pair.queries_early, grad_q) + new
        grad_q = _replace(pair.queries_early, grad_q, new)
        return grad_q, _replace(pair.keys_early, sums, (*new_sums,))

    dtype = grad_q[0].dtype
    sums = _no_gradients(keys, dtype)
    return loop_over_pairs(options.num_devices, number, add, (grad_q, sums))


def _visibility(options: Options, window, dropout, pair: Pair, queries, keys) -> Visibility:
    start_range = pair.smallest * options.length, pair.largest * options.length
    device = jnp.arange(options.num_devices)
    chunk = jnp.where(pair.queries_early, device, 2 * options.num_devices - 1 - device)
    return Visibility(
        start=pair.distance * options.length,
        start_range=start_range,
        window=window,
        segments_s=queries,
        segments_t=keys,
        dropout=dropout,
        query_start=chunk * options.length,
    )


def _choose(is_early: jax.Array, halves: Any) -> Any:
    """Returns, of each pair (early, late), the array that a device computes with (n, B, c, ...)."""

    def pick(a, b):
        shape = [1] * a.ndim
        shape[C] = -1
        return jnp.where(is_early.reshape(shape), a, b)

    return jax.tree.map(pick, *halves)


def _replace(is_early: jax.Array, halves: Any, new: Any) -> Any:
    """Returns the pair (early, late) with the half that `_choose` returns replaced."""
    early, late = halves
    return _choose(is_early, (new, early)), _choose(is_early, (late, new))


# ---- the pairs of chunks that meet in a round ----


def loop_over_pairs(
    num_devices: int, number: jax.Array | int, add: Callable[[Any, Pair], Any], carry: Any
) -> Any:
    """Returns `carry` after `add(carry, pair)` for each pair of round `number`.

    In round r each device has the keys of the r-th device before it. All devices compute two pairs,
    in round 0 three.
    """
    rows = zip(*_pairs_of_chunks(num_devices, number), strict=True)
    columns = [jnp.stack([jnp.asarray(value) for value in column]) for column in rows]

    def add_one(at, carry):
        return add(carry, Pair(*(column[at] for column in columns)))

    return jax.lax.fori_loop(0, 2 + (number == 0), add_one, carry)


def _pairs_of_chunks(num_devices: int, number: jax.Array | int) -> list[Pair]:
    """Returns the two pairs of a round, and the third of round 0.

    The late chunk sees the early chunk of any device. Of the other pairs, early sees early if the
    keys are of a device before, else late sees late; at home, in round 0, both do. So no chunk
    meets keys that none of its tokens sees.
    """
    c, r, device = num_devices, number, jnp.arange(num_devices)
    no, yes = jnp.zeros(c, bool), jnp.ones(c, bool)
    is_after, nearest = device >= r, jnp.minimum(r, c - r)
    crossed = 2 * c - 1 - device - (device - r) % c
    crossed_range = jnp.minimum(1 + r, c + 1 - r), jnp.maximum(2 * c - 1 - r, c - 1 + r)
    straight = jnp.where(is_after, r, c - r)
    return [
        Pair(no, yes, crossed, *crossed_range),
        Pair(is_after, is_after, straight, nearest, jnp.where(r == 0, 0, c - nearest)),
        Pair(no, no, 0 * device, jnp.int32(0), jnp.int32(0)),
    ]


# ---- chunks and blocks ----


def block_size(implementation: str, length: int) -> int:
    """Returns the tokens of a block of a chunk of `length`; "blockwise:N" asks for N."""
    name, block = implementations.split(implementation)
    return min(block if name == "blockwise" and block else blockwise.BLOCK, length)


def _queries_and_keys(options: Options, q_BSHK, k_BSGK, v_BSGK, segments):
    """Returns (q, segments) and (k, v, segments), each of the early and the late chunks."""
    G = k_BSGK.shape[2]
    q, k, v = (_halves(options, x, G) for x in (q_BSHK, k_BSGK, v_BSGK))
    query_segments = _split(options, segments, "bcnt->nbct", padding=0)
    key_segments = _split(options, segments, "bcnt->nbct", padding=NO_SEGMENT)
    return tuple(zip(q, query_segments, strict=True)), tuple(zip(k, v, key_segments, strict=True))


def _halves(options: Options, x_BSHK: jax.Array, num_groups: int) -> list[jax.Array]:
    """Returns the early and the late chunks in blocks, (n, B, c, G, R b, K); of keys R is 1."""
    B, S, _, K = x_BSHK.shape
    x = x_BSHK.reshape(B, S, num_groups, -1, K)
    halves = _split(options, x, "bcntgrk->nbcgrtk")
    return [half.reshape(*half.shape[:4], -1, K) for half in halves]


def _split(options: Options, x: jax.Array, order: str, padding: int = 0) -> list[jax.Array]:
    """Returns the early and the late chunks of x (B, S, ...), in blocks by the einsum `order`."""
    chunks = x.reshape(x.shape[0], options.num_devices, 2, -1, *x.shape[2:])
    widths = [(0, 0), (0, 0), (0, -options.length % options.block), *[(0, 0)] * (x.ndim - 2)]
    halves = []
    for half in range(2):
        chunk = jnp.pad(chunks[:, :, half], widths, constant_values=padding)
        chunk = chunk.reshape(*chunk.shape[:2], -1, options.block, *chunk.shape[3:])
        halves.append(_pin(jnp.einsum(order, chunk)))
    return halves


def _join(options: Options, halves, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns (B, S, H, K) in `dtype`: the inverse of `_halves`."""

    def join(half):
        n, B, c, G, _, K = half.shape
        x = half.astype(dtype).reshape(n, B, c, G, -1, options.block, K)
        x = jnp.einsum("nbcgrtk->bcntgrk", x).reshape(B, c, n * options.block, -1, K)
        return x[:, :, : options.length]

    x = jnp.stack([join(half) for half in halves], axis=2)
    return x.reshape(x.shape[0], -1, *x.shape[4:])


def _pin(tree, *, replicated: bool = False):
    """Shards the dim C of each array by the rule for "seq", or not at all; other dims are free."""
    return jax.tree.map(lambda x: sharding.pin(x, C, None if replicated else "seq"), tree)
