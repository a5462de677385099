"""The kernels of grouped matrix products, on the rows of one device.

On TPUs jax's megablox (Pallas, Mosaic), on Hopper GPUs grouped_gpu.py. On CPUs megablox is
interpreted, and float64, in which it cannot compute, has a plain twin.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

from meshtrain import hardware
from meshtrain.ops import grouped_gpu
from meshtrain.parallel import accelerator

# R rows, G groups; K, N the dims of a group's matrix

LANES = 128  # of a vector register of a TPU
ROW_TILES = (512, 256, 128)
# Tiles of all operands, twice each, and a sum in float32 share the 16 MiB of vector memory that a
# kernel has.
MAX_TILE = {2: 1024, 4: 512}  # by bytes of an element


def product(
    rows_RK: jax.Array, weights_GKN: jax.Array, sizes_G: jax.Array, *, transposed: bool
) -> jax.Array:
    """Returns each row times its group's matrix, (R, N). Rows of no group are not defined.

    R is a multiple of 128. `transposed`: the matrices are (G, N, K).
    """
    if rows_RK.dtype == jnp.float64:
        formula = "grk,gnk->rn" if transposed else "grk,gkn->rn"
        out_RN = jnp.einsum(formula, _by_group(rows_RK, sizes_G), weights_GKN)
        # As the kernels, but always: so a test finds out who reads these rows.
        is_row_R1 = (jnp.arange(len(rows_RK)) < sizes_G.sum())[:, None]
        return jnp.where(is_row_R1, out_RN, jnp.nan)
    platform = accelerator.platform()
    if platform == "gpu":
        return grouped_gpu.product(
            rows_RK,
            weights_GKN,
            sizes_G,
            transposed=transposed,
            num_cores=_num_cores(),
        )
    K = rows_RK.shape[1]
    N = weights_GKN.shape[1 if transposed else 2]
    return gmm(
        rows_RK,
        weights_GKN,
        sizes_G,
        rows_RK.dtype,
        tiling=_tiling(rows_RK, K, N),
        transpose_rhs=transposed,
        interpret=platform == "cpu",
    )


def product_of_rows(rows_RK: jax.Array, grads_RN: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns the sum over a group's rows of row^T gradient, (G, K, N); 0 for an empty group."""
    if rows_RK.dtype == jnp.float64:
        is_row_R1 = (jnp.arange(len(rows_RK)) < sizes_G.sum())[:, None]
        grads_RN = jnp.where(is_row_R1, grads_RN, 0)
        return jnp.einsum("grk,rn->gkn", _by_group(rows_RK, sizes_G), grads_RN)
    platform = accelerator.platform()
    if platform == "gpu":
        return grouped_gpu.product_of_rows(rows_RK, grads_RN, sizes_G, num_cores=_num_cores())
    K, N = rows_RK.shape[1], grads_RN.shape[1]
    return tgmm(
        jnp.swapaxes(rows_RK, 0, 1),
        grads_RN,
        sizes_G,
        rows_RK.dtype,
        tiling=_tiling(rows_RK, K, N),
        interpret=platform == "cpu",
    )


def _by_group(rows_RK: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Returns the rows of each group, and 0 in place of the others: (G, R, K)."""
    end_G1 = jnp.cumsum(sizes_G)[:, None]
    row_1R = jnp.arange(len(rows_RK))[None]
    is_own_GR = (row_1R >= end_G1 - sizes_G[:, None]) & (row_1R < end_G1)
    return jnp.where(is_own_GR[..., None], rows_RK[None], 0)


def _num_cores() -> int:
    """Returns the number of streaming multiprocessors of a GPU that is compiled for."""
    row = hardware.device_of(accelerator.device_kind())
    return row.chip.cores if row and row.chip else jax.local_devices()[0].core_count


def _tiling(rows_RK: jax.Array, K: int, N: int) -> tuple[int, int, int]:
    """Returns the sizes of tiles: of rows, of K and of N."""
    num_rows = len(rows_RK)
    rows = next(tile for tile in ROW_TILES if num_rows % tile == 0)
    limit = MAX_TILE[rows_RK.dtype.itemsize]
    return rows, _tile(K, limit), _tile(N, limit)


def _tile(size: int, limit: int) -> int:
    """Returns the tile of a dim: the one that needs least padding, and of these the largest."""
    if size <= limit:
        return size
    tiles = range(limit // 2, limit + 1, LANES)
    return min(tiles, key=lambda tile: (-(-size // tile) * tile, -tile))
