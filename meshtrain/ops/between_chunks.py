"""Attention of sharded sequences, computed between chunks: keys and values travel, or are gathered.

See parallel/context.py for the methods and the order. In auto sharding: a device is only an index of a dim of size c.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meshtrain.ops import blockwise, implementations
from meshtrain.ops.blockwise import Visibility
from meshtrain.parallel import sharding

# B batch, S sequence, H heads = G key/value heads x R, K head dim, c devices, n blocks of a chunk, b tokens of a block

C = 2  # the dim of the devices in blocks (n, B, c, ...)
NO_SEGMENT = np.iinfo(np.int32).min  # of the padding of keys: no query is in it


class Options(NamedTuple):
    scale: float
    softcap: float
    length: int  # tokens of a chunk
    gathers: bool  # whether keys and values are gathered, or travel


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
) -> jax.Array:
    """Returns the attention (B, S, H, K) of sequences in zigzag order, by the method "ring" or "gather"."""
    B, S, H, K = q_BSHK.shape
    G, num_devices = k_BSGK.shape[2], sharding.num_shards("seq", S)
    length = S // (2 * num_devices)
    b = block_size(implementation, length)
    segments = jnp.zeros((1, S), jnp.int32) if segments_BS is None else segments_BS
    split = partial(_halves, num_devices=num_devices, block=b)
    k, v = (split(x, order="bcntgk->nbcgtk") for x in (k_BSGK, v_BSGK))
    q = split(q_BSHK.reshape(B, S, G, H // G, K), order="bcntgrk->nbcgrtk")
    q = [x.reshape(*x.shape[:4], -1, K) for x in q]
    of_queries, of_keys = (
        split(segments, order="bcnt->nbct", padding=one) for one in (0, NO_SEGMENT)
    )
    queries, keys = zip(q, of_queries, strict=True), zip(k, v, of_keys, strict=True)
    options = Options(scale, softcap, length, method == "gather")
    window = jnp.int32(S if window is None else window)

    def join(x):
        x = jnp.einsum("nbcgrtk->bcntgrk", x.reshape(*x.shape[:4], H // G, b, K))
        return x.reshape(B, num_devices, -1, H, K)[:, :, :length]

    out = _attend(options, tuple(queries), tuple(keys), window)
    return jnp.stack([join(x) for x in out], axis=2).reshape(B, S, H, K)


def block_size(implementation: str, length: int) -> int:
    """Returns the tokens of a block of a chunk of `length`; "blockwise:N" asks for N."""
    name, block = implementations.split(implementation)
    return min(block if name == "blockwise" and block else blockwise.BLOCK, length)


def _halves(
    x: jax.Array, *, num_devices: int, block: int, order: str, padding: int = 0
) -> list[jax.Array]:
    """Returns the early and the late chunks of x (B, S, ...), each in blocks by the einsum `order`."""
    chunks = x.reshape(x.shape[0], num_devices, 2, -1, *x.shape[2:])
    widths = [(0, 0), (0, 0), (0, -chunks.shape[3] % block), *[(0, 0)] * (x.ndim - 2)]
    found = []
    for half in range(2):
        chunk = jnp.pad(chunks[:, :, half], widths, constant_values=padding)
        chunk = chunk.reshape(*chunk.shape[:2], -1, block, *chunk.shape[3:])
        found.append(_pin(jnp.einsum(order, chunk)))
    return found


def _pin(tree, *, whole: bool = False):
    """Shards the dim C of each array by the rule for "seq", or not at all; all other dims are free."""
    return jax.tree.map(lambda x: sharding.pin(x, C, None if whole else "seq"), tree)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options, queries, keys, window):
    """Returns the attention of the early and of the late chunks, (n, B, c, G, R b, K).

    `queries` is a pair, for the early and the late chunks, of (q, segments); `keys` of (k, v, segments).
    """
    return _forward(options, queries, keys, window)[0]


def _forward(options, queries, keys, window):
    softmaxes = tuple(blockwise.no_keys(q) for q, _ in queries)
    visit = partial(_visit, options, window, queries)
    softmaxes = _rounds(visit, _fetcher(options, keys), softmaxes, keys)
    dtype = queries[0][0].dtype
    out, log_z = zip(*(blockwise.finish(one, dtype) for one in softmaxes), strict=True)
    return out, (queries, keys, window, out, log_z)


def _backward(options, residuals, grad_out):
    queries, keys, window, out, log_z = residuals
    dtype = log_z[0].dtype
    row_dots = (blockwise.row_dot(*pair, dtype) for pair in zip(out, grad_out, strict=True))
    seen = tuple(zip(log_z, row_dots, grad_out, strict=True))
    collect, finish = _collectors(options)

    def visit(grads, keys, number):
        grad_q, sums = grads
        grad_q, new = _visit_back(options, window, queries, seen, grad_q, keys, number)
        return grad_q, collect(sums, new, number)

    zeros = tuple(jnp.zeros(q.shape, dtype) for q, _ in queries), None
    grad_q, sums = _rounds(visit, _fetcher(options, keys), zeros, keys)
    grad_queries = tuple(
        (grad.astype(q.dtype), None) for grad, (q, _) in zip(grad_q, queries, strict=True)
    )
    grad_keys = tuple(
        (grad_k.astype(k.dtype), grad_v.astype(v.dtype), None)
        for (grad_k, grad_v), (k, v, _) in zip(finish(sums), keys, strict=True)
    )
    return grad_queries, grad_keys, None


_attend.defvjp(_forward, _backward)


def _rounds(visit: Callable, fetch: Callable, carry: Any, keys: Any) -> Any:
    """Returns `carry` after c visits: in round r each device computes with the keys of the r-th device before it.

    The keys of the next round are fetched before the visit, so that they can arrive while it computes.
    """
    num_devices = keys[0][0].shape[C]
    following = fetch(keys, 1)
    carry = visit(carry, keys, 0)
    if num_devices > 2:

        def one_round(carry, number):
            results, keys = carry
            following = fetch(keys, number + 1)
            return (visit(results, keys, number), following), None

        rounds = jnp.arange(1, num_devices - 1)
        (carry, following), _ = jax.lax.scan(one_round, (carry, following), rounds)
    return visit(carry, following, num_devices - 1)


def _fetcher(options: Options, keys) -> Callable:
    """Returns the function (keys of a round, number of the next) -> keys of the next round."""
    if not options.gathers:
        return lambda keys, _: _pin(jax.tree.map(_to_next_device, keys))
    whole = _pin(keys, whole=True)

    def pick(_, number):
        device = jnp.arange(whole[0][0].shape[C])
        home = (device - number) % len(device)
        return _pin(jax.tree.map(lambda x: jnp.take(x, home, axis=C, mode="clip"), whole))

    return pick


def _to_next_device(x: jax.Array) -> jax.Array:
    return jnp.roll(x, 1, axis=C)  # a collective-permute


def _collectors(options: Options) -> tuple[Callable, Callable]:
    """Returns how the gradients of the keys of a round are collected, and how they return to their device.

    The first is (sums, new, round) -> sums, the second sums -> gradients. In a ring the sums travel with the keys,
    and once more. Gathered, those of each device are kept apart, and are sent and added once.
    """
    if not options.gathers:

        def travel(sums, new, _):
            if sums is None:
                return _pin(new)
            return _pin(jax.tree.map(lambda x, y: _to_next_device(x) + y, sums, new))

        return travel, lambda sums: _pin(jax.tree.map(_to_next_device, sums))

    def keep(sums, new, number):
        if sums is None:
            sums = jax.tree.map(lambda x: jnp.zeros((x.shape[C], *x.shape), x.dtype), new)
        return jax.tree.map(lambda kept, x: kept.at[number].set(x), sums, new)

    def send(kept):
        return sum(_pin(jnp.roll(kept[n], -n, axis=C)) for n in range(len(kept)))

    return keep, lambda sums: jax.tree.map(send, sums)


class Pairs(NamedTuple):
    """The pairs of chunks that the devices compute in a round, one after the other: p pairs of c devices.

    All devices compute two pairs, in round 0 three. A chunk never meets keys that none of its tokens sees.
    """

    queries_early: jax.Array  # (p, c) bool, whether the queries are those of the early chunk
    keys_early: jax.Array  # (p, c) bool
    distance: jax.Array  # (p, c) int32, chunks between the starts of queries and keys
    # (p,) int32, of all devices; computed from the distances, each would be an all-reduce.
    smallest: jax.Array
    largest: jax.Array


def pairs_of(num_devices: int, number: jax.Array | int) -> Pairs:
    """Returns the pairs of round `number`, in which each device has the keys of the `number`-th device before.

    The late chunk sees the early chunk of any device. Of the other pairs, early sees early if the keys are of a device
    before, else late sees late; at home, in round 0, both do.
    """
    c, r, device = num_devices, number, jnp.arange(num_devices)
    crossed = 2 * c - 1 - device - (device - r) % c
    if isinstance(r, int) and r == 0:
        rows = [
            (False, True, crossed, 1, 2 * c - 1),
            (True, True, 0, 0, 0),
            (False, False, 0, 0, 0),
        ]
    else:
        is_after, nearest = device >= r, jnp.minimum(r, c - r)
        crossed_range = jnp.minimum(1 + r, c + 1 - r), jnp.maximum(2 * c - 1 - r, c - 1 + r)
        rows = [
            (False, True, crossed, *crossed_range),
            (is_after, is_after, jnp.where(is_after, r, c - r), nearest, c - nearest),
        ]
    columns = zip(*rows, strict=True)
    per_device = [jnp.stack([jnp.broadcast_to(x, c) for x in next(columns)]) for _ in range(3)]
    return Pairs(*per_device, *(jnp.stack([jnp.int32(x) for x in column]) for column in columns))


def _choose(is_early: jax.Array, halves: Any) -> Any:
    """Returns of each pair (early, late) the array that each device computes with, (n, B, c, ...)."""

    def pick(a, b):
        shape = [1] * a.ndim
        shape[C] = -1
        return jnp.where(is_early.reshape(shape), a, b)

    return jax.tree.map(pick, *halves)


def _replace(is_early: jax.Array, halves: Any, new: Any) -> Any:
    """Returns the pair (early, late) with the half that `_choose` returns replaced."""
    early, late = halves
    return _choose(is_early, (new, early)), _choose(is_early, (late, new))


def _visibility(options: Options, window, pair: Pairs, queries, keys) -> Visibility:
    start_range = pair.smallest * options.length, pair.largest * options.length
    return Visibility(pair.distance * options.length, start_range, window, queries, keys)


def _visit(options: Options, window, queries, softmaxes, keys, number):
    """Returns the softmaxes of the early and the late queries once what they see of these keys is added.

    `queries` is a pair of (q, segments), `keys` of (k, v, segments).
    """

    def add(softmaxes, pair):
        q, segments_s = _choose(pair.queries_early, queries)
        k, v, segments_t = _choose(pair.keys_early, keys)
        visibility = _visibility(options, window, pair, segments_s, segments_t)
        softmax = _choose(pair.queries_early, softmaxes)
        new = blockwise.add_keys(options.scale, options.softcap, softmax, q, k, v, visibility)
        return _replace(pair.queries_early, softmaxes, new), None

    return jax.lax.scan(add, softmaxes, pairs_of(queries[0][0].shape[C], number))[0]


def _visit_back(options: Options, window, queries, seen, grad_q, keys, number):
    """Returns `grad_q` plus the gradients of the queries from these keys, and the gradients of the keys."""

    def add(grads, pair):
        grad_q, sums = grads
        q, segments_s = _choose(pair.queries_early, queries)
        k, v, segments_t = _choose(pair.keys_early, keys)
        visibility = _visibility(options, window, pair, segments_s, segments_t)
        of_pair = _choose(pair.queries_early, seen), _choose(pair.keys_early, sums)
        new, *new_sums = blockwise.gradients(
            options.scale, options.softcap, q, k, v, visibility, *of_pair
        )
        new = _choose(pair.queries_early, grad_q) + new
        grad_q = _replace(pair.queries_early, grad_q, new)
        return (grad_q, _replace(pair.keys_early, sums, (*new_sums,))), None

    dtype = grad_q[0].dtype
    sums = tuple(tuple(jnp.zeros(x.shape, dtype) for x in half[:2]) for half in keys)
    pairs = pairs_of(queries[0][0].shape[C], number)
    return jax.lax.scan(add, (grad_q, sums), pairs)[0]
