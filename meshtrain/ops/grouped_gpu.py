"""Grouped matrix products on Hopper GPUs (Pallas, Mosaic GPU): tiles by TMA, products by wgmma.

They follow jax's examples, `jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` and
`transposed_ragged_dot_mgpu` (Apache License 2.0), with three changes. Which rows a tile has is
computed before the kernel and read by it, where the examples search all groups in each tile. Tiles
without rows are skipped, where `ragged_dot_mgpu` computes them. And the number of cores is that of
the device that is compiled for, where `transposed_ragged_dot_mgpu` asks the host's.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# R rows, sorted by group; G groups; K, N the dims of a group's matrix; t tiles of rows

ROWS = 128  # of a tile
COLUMNS = (128, 64)  # of a tile; the first that divides both dims
DEPTH = 64  # of a step of a product: 128 bytes, as wide as a swizzle
STEPS = 4  # that are loaded ahead of the one that is computed


class Tiles(NamedTuple):
    """For each tile, the rows that it computes. A tile with rows of two groups occurs twice."""

    group_t: jax.Array
    block_t: jax.Array  # of ROWS rows
    start_t: jax.Array  # first row of the block that belongs to the group
    size_t: jax.Array  # how many do; 0: the tile is skipped


def tiles_of(sizes_G: jax.Array, num_rows: int, rows: int) -> Tiles:
    """Returns the tiles of `rows` rows for groups of these sizes, int32."""
    sizes_G = sizes_G.astype(jnp.int32)
    end_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    start_G = end_G - sizes_G
    num_tiles_G = jnp.where(sizes_G > 0, -(-end_G // rows) - start_G // rows, 0)
    last_tile_G = jnp.cumsum(num_tiles_G, dtype=jnp.int32)
    num_groups = len(sizes_G)
    number_t = jnp.arange(-(-num_rows // rows) + num_groups - 1, dtype=jnp.int32)
    group_t = jnp.searchsorted(last_tile_G, number_t, side="right").astype(jnp.int32)
    is_used_t = group_t < num_groups
    group_t = jnp.minimum(group_t, num_groups - 1)
    before_t = number_t - (last_tile_G - num_tiles_G)[group_t]
    block_t = jnp.where(is_used_t, start_G[group_t] // rows + before_t, 0)
    first_t = jnp.maximum(start_G[group_t], block_t * rows)
    last_t = jnp.minimum(end_G[group_t], (block_t + 1) * rows)
    return Tiles(
        group_t=group_t,
        block_t=block_t,
        start_t=first_t - block_t * rows,
        size_t=jnp.where(is_used_t, last_t - first_t, 0),
    )


def product(
    rows_RK: jax.Array,
    weights_GKN: jax.Array,
    sizes_G: jax.Array,
    *,
    transposed: bool,
    num_cores: int,
    interpret: object = None,
) -> jax.Array:
    """Returns each row times its group's matrix, (R, N). Rows of no group are not written.

    `transposed`: the matrices are (G, N, K). K and N are multiples of DEPTH.
    """
    R, K = rows_RK.shape
    N = weights_GKN.shape[1 if transposed else 2]
    columns = _columns(N)
    tiles = tiles_of(sizes_G, R, ROWS)
    grid = len(tiles.group_t), pl.cdiv(N, columns)
    weights_block = (columns, DEPTH) if transposed else (DEPTH, columns)

    def kernel(group_ref, block_ref, start_ref, size_ref, rows_ref, weights_ref, out_ref):
        @plgpu.nd_loop((grid[0] * grid[1],), collective_axes="core")
        def _(loop):
            tile, column = plgpu.planar_snake(loop.index[0], grid, 1, 1)
            size = size_ref[tile]

            @pl.when(size > 0)
            def _():
                group, block = group_ref[tile], block_ref[tile]

                def accumulate(sum_ref):
                    def add(_, rows_smem, weights_smem):
                        right = _transposed(weights_smem) if transposed else weights_smem
                        plgpu.wgmma(sum_ref, rows_smem, right)

                    def weights_index(step):
                        return (column, step) if transposed else (step, column)

                    plgpu.emit_pipeline(
                        add,
                        grid=(K // DEPTH,),
                        in_specs=[
                            plgpu.BlockSpec(
                                (ROWS, DEPTH), lambda step: (block, step), delay_release=1
                            ),
                            plgpu.BlockSpec(weights_block, weights_index, delay_release=1),
                        ],
                        max_concurrent_steps=STEPS,
                    )(rows_ref, weights_ref.at[group])
                    return sum_ref[...]

                total = pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns)))

                @partial(pl.run_scoped, out_smem=plgpu.SMEM((ROWS, columns), out_ref.dtype))
                def _(out_smem):
                    out_smem[...] = total.astype(out_smem.dtype)
                    plgpu.commit_smem()
                    _store_rows(
                        out_smem,
                        out_ref.at[:, pl.ds(column * columns, columns)],
                        first=start_ref[tile],
                        size=size,
                        offset=block * ROWS,
                    )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    call = _kernel(
        kernel,
        jax.ShapeDtypeStruct((R, N), rows_RK.dtype),
        num_cores=num_cores,
        interpret=interpret,
        name="grouped_dot",
    )
    return call(*tiles, rows_RK, weights_GKN)


def _store_rows(out_smem, out_ref, *, first, size, offset) -> None:
    """Stores `size` rows of a tile, from `first` on; the tile's rows start at `offset`.

    The size of a copy is static. So there is one copy for each power of two, and those are run that
    add up to `size`.
    """
    num_rows = ROWS
    while num_rows:

        @pl.when(size & num_rows != 0)
        def _(first=first, num_rows=num_rows):
            source = out_smem.at[pl.ds(first, num_rows)]
            plgpu.copy_smem_to_gmem(source, out_ref.at[pl.ds(offset + first, num_rows)])

        first += size & num_rows
        num_rows //= 2


def product_of_rows(
    rows_RK: jax.Array,
    grads_RN: jax.Array,
    sizes_G: jax.Array,
    *,
    num_cores: int,
    interpret: object = None,
) -> jax.Array:
    """Returns the sum over a group's rows of row^T gradient, (G, K, N); 0 for an empty group.

    K and N are multiples of DEPTH.
    """
    R, K = rows_RK.shape
    N, G = grads_RN.shape[1], len(sizes_G)
    lines, columns = _columns(K), _columns(N)
    grid = pl.cdiv(K, lines), pl.cdiv(N, columns)
    sizes_G = sizes_G.astype(jnp.int32)
    end_G = jnp.cumsum(sizes_G, dtype=jnp.int32)
    start_G = end_G - sizes_G
    first_G = start_G // DEPTH * DEPTH
    num_steps_G = -(-end_G // DEPTH) - start_G // DEPTH

    def kernel(sizes_ref, start_ref, end_ref, steps_ref, first_ref, rows_ref, grads_ref, out_ref):
        @plgpu.nd_loop((G, grid[0] * grid[1]), collective_axes="core")
        def _(loop):
            group = loop.index[0]
            line, column = plgpu.planar_snake(loop.index[1], grid, 1, 1)
            # It may end beyond the last row; no step reads that part.
            part = pl.ds(pl.multiple_of(first_ref[group], DEPTH), R)

            def accumulate(sum_ref):
                def add(index, rows_smem, grads_smem):
                    (step,) = index

                    @pl.when(step == 0)
                    def _():
                        before = jax.lax.rem(start_ref[group], DEPTH)
                        _keep(rows_smem, lambda row: row >= before)
                        _keep(grads_smem, lambda row: row >= before)

                    @pl.when(step == steps_ref[group] - 1)
                    def _():
                        last = jax.lax.rem(end_ref[group] - 1, DEPTH)
                        _keep(rows_smem, lambda row: row <= last)
                        _keep(grads_smem, lambda row: row <= last)

                    plgpu.wgmma(sum_ref, _transposed(rows_smem), grads_smem)

                @pl.when(sizes_ref[group] > 0)
                def _():
                    plgpu.emit_pipeline(
                        add,
                        grid=(steps_ref[group],),
                        in_specs=[
                            plgpu.BlockSpec(
                                (DEPTH, lines),
                                lambda step: (step, line),
                                delay_release=1,
                                transforms=_swizzled(rows_ref.dtype),
                            ),
                            plgpu.BlockSpec(
                                (DEPTH, columns),
                                lambda step: (step, column),
                                delay_release=1,
                                transforms=_swizzled(grads_ref.dtype),
                            ),
                        ],
                        max_concurrent_steps=STEPS,
                    )(rows_ref.at[part, :], grads_ref.at[part, :])

                return sum_ref[...]

            total = pl.run_scoped(accumulate, plgpu.ACC((lines, columns)))

            out_type = plgpu.SMEM(
                (lines, columns), out_ref.dtype, transforms=_swizzled(out_ref.dtype)
            )

            @partial(pl.run_scoped, out_smem=out_type)
            def _(out_smem):
                out_smem[...] = total.astype(out_smem.dtype)
                plgpu.commit_smem()
                place = pl.ds(line * lines, lines), pl.ds(column * columns, columns)
                plgpu.copy_smem_to_gmem(out_smem, out_ref.at[(group, *place)])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    call = _kernel(
        kernel,
        jax.ShapeDtypeStruct((G, K, N), rows_RK.dtype),
        num_cores=num_cores,
        interpret=interpret,
        name="grouped_dot_of_rows",
    )
    return call(sizes_G, start_G, end_G, num_steps_G, first_G, rows_RK, grads_RN)


def _keep(rows_smem, is_kept) -> None:
    """Sets the rows of other groups to 0, also those that hold NaN."""
    row = jax.lax.broadcasted_iota(jnp.int32, rows_smem.shape, 0)
    row = plgpu.layout_cast(row, plgpu.Layout.WGMMA)
    rows = rows_smem[...]
    rows_smem[...] = jnp.where(is_kept(row), rows, jnp.zeros_like(rows))
    plgpu.commit_smem()


def _columns(size: int) -> int:
    return next(columns for columns in COLUMNS if size % columns == 0)


def _transposed(ref):
    """Returns a view of a block (DEPTH, ...) with its two dims exchanged."""
    return ref.transpose((1, 0))


def _swizzled(dtype: jax.typing.DTypeLike) -> tuple:
    """Returns the layout in shared memory that wgmma reads without conflicts of banks."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(8 * DEPTH * itemsize)
    return plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)


def _kernel(body, out_type, *, num_cores: int, interpret: object, name: str):
    """Returns the kernel with one program on each core, which computes tile after tile."""
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_cores,),
        grid_names=("core",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
        kernel_name=name,
    )
