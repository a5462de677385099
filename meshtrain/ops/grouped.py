"""Grouped matrix products: each group of rows times a matrix of its own, in one kernel.

Rows are sorted by group, and the sizes of groups are known only when the program runs. A batch of
products would need equal groups. XLA does not partition hand-written kernels, so each device calls
them on its own rows, by grouped_kernel.py.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from meshtrain import hardware
from meshtrain.parallel import accelerator, sharding

# R rows, G groups; K, N the dims of a group's matrix

TILE = 128  # rows of a tile: other numbers of rows are padded
HOPPER = "9.0"  # compute capability
GPU_DEPTH = 64  # of a step of a product on GPUs

# Name of these products in compiled programs, followed by the rows that they have if all groups
# are used equally. The audit counts FLOPs by it: a kernel skips tiles without rows.
SCOPE = "grouped_dot_of_"


def why_not(dtype: jax.typing.DTypeLike, *dims: int) -> str:
    """Returns why the kernels do not support matrices with these dims; "" if they do.

    On CPUs they are interpreted, and their plain twin computes float64.
    """
    dtype, platform = jnp.dtype(dtype), accelerator.platform()
    if platform == "gpu":
        kind = accelerator.device_kind()
        if _capability(kind) != HOPPER:
            return f"its kernels run on Hopper GPUs and on TPUs, and this is {kind}"
        if dtype not in (jnp.bfloat16, jnp.float16):
            return f"its kernels compute in 16 bits on GPUs, and train.dtype is {dtype}"
        for dim in dims:
            if dim % GPU_DEPTH:
                return (
                    f"its kernels need multiples of {GPU_DEPTH}, and an expert has a dim of {dim}"
                )
        return ""
    if platform not in ("tpu", "cpu"):
        return f"its kernels run on Hopper GPUs and on TPUs, and this is {platform}"
    dtypes = [jnp.bfloat16, jnp.float32]
    if platform == "cpu":
        dtypes.append(jnp.float64)
    if dtype not in dtypes:
        return f"its kernels compute in bfloat16 or float32, and train.dtype is {dtype}"
    return ""


def _capability(kind: str) -> str:
    row = hardware.device_of(kind)
    if row and row.chip:
        return row.chip.capability
    return getattr(jax.local_devices()[0], "compute_capability", "")


def grouped_dot(
    rows_RK: jax.Array,
    weights_GKN: jax.Array,
    sizes_G: jax.Array,
    *,
    expected_rows: int | None = None,
) -> jax.Array:
    """Returns each row times the matrix of its group: (R, N).

    The first `sizes[0]` rows are the first group, and so on. Rows beyond all groups, and their
    gradients, are not written: memory that may hold NaN, which a product with 0 would pass on. Give
    any values there; the gradient of the matrices ignores them. `expected_rows` are the rows of all
    groups if they are used equally, by default R.
    """
    num_rows = len(rows_RK)
    padding = -num_rows % TILE
    rows_RK = jnp.pad(rows_RK, [(0, padding), (0, 0)])
    expected = num_rows if expected_rows is None else expected_rows
    return _grouped_dot(expected, rows_RK, weights_GKN, sizes_G.astype(jnp.int32))[:num_rows]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_dot(expected: int, rows_RK, weights_GKN, sizes_G) -> jax.Array:
    return _product(expected, rows_RK, weights_GKN, sizes_G, transposed=False)


def _forward(expected: int, rows_RK, weights_GKN, sizes_G):
    out_RN = _grouped_dot(expected, rows_RK, weights_GKN, sizes_G)
    return out_RN, (rows_RK, weights_GKN, sizes_G)


def _backward(expected: int, kept, grad_RN):
    from meshtrain.ops import grouped_kernel

    rows_RK, weights_GKN, sizes_G = kept
    grad_RN = grad_RN.astype(rows_RK.dtype)
    grad_rows_RK = _product(expected, grad_RN, weights_GKN, sizes_G, transposed=True)
    grad_weights = _on_each_device(
        expected, grouped_kernel.product_of_rows, rows_RK, grad_RN, sizes_G
    )
    return grad_rows_RK, grad_weights.astype(weights_GKN.dtype), None


_grouped_dot.defvjp(_forward, _backward)


def _product(expected: int, rows_RK, weights_GKN, sizes_G, *, transposed: bool) -> jax.Array:
    from meshtrain.ops import grouped_kernel  # Pallas takes 0.2 s to import

    compute = partial(grouped_kernel.product, transposed=transposed)
    return _on_each_device(expected, compute, rows_RK, weights_GKN, sizes_G)


def _on_each_device(expected: int, compute, *arrays: jax.Array) -> jax.Array:
    """Returns `compute(*arrays)` of the arrays of one device, in the scope that the audit reads.

    Every axis that shards rows or matrices is mapped outside: along the others they are replicated.
    """
    run = sharding.per_device(
        compute,
        in_specs=(PartitionSpec(),) * len(arrays),
        out_specs=PartitionSpec(),
    )
    # Otherwise jax splits the call where layers are a loop, and what depends on the sizes alone
    # gets a sharding that cannot be mapped over stages. Nothing is computed twice.
    in_one_piece = jax.checkpoint(
        run,
        policy=jax.checkpoint_policies.nothing_saveable,
        prevent_cse=False,
    )
    with jax.named_scope(f"{SCOPE}{expected}"):
        return in_one_piece(*arrays)
