"""FLOPs and HBM bytes of the operations of a compiled program.

A kernel reads each operand once and writes each result once: what is between the instructions of a
fusion stays in registers. Of a slice only the part is counted, of an in-place update only what is
written.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from meshtrain.ops.grouped import SCOPE
from meshtrain.parallel.mesh import LINKS, Network
from meshtrain.tools.hlo.collective_ops import KINDS, Collective, Groups
from meshtrain.tools.hlo.hlo import Array, Instruction, Module

# Instructions that move nothing; the bodies of the last ones are counted instead.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier optimization-barrier "
    "partition-id replica-id add-dependency domain while conditional call async-start "
    "async-update".split()
)
PASSING = ("bitcast", "reshape", "transpose", "convert", "copy")  # of each element its own
MESSAGES = ("send", "recv")  # between TPU slices
SLICES = ("dynamic-slice", "slice", "gather")
MATMUL = re.compile(r'custom_call_target="[^"]*(cublas|gemm)')
ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha(\w*)"')
# The kernels of ops/grouped.py, with the rows that they have if all experts are used equally.
GROUPED = re.compile(rf"\b{SCOPE}(\d+)")
KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|mosaic_gpu\w*)"')
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dkv|dq)")  # jax's names of its kernels for TPUs


def executed(module: Module) -> Iterator[tuple[str, float]]:
    """Yields the computations whose instructions are kernels of their own.

    With how often each runs in a step.
    """
    reached, todo = {module.entry}, [module.entry]
    while todo:
        for instruction in module.computations[todo.pop()].values():
            if instruction.opcode in FREE:
                called = {*instruction.called} - reached
                reached |= called
                todo += called
    for name in module.computations:
        if name not in reached:
            continue
        num_runs, _ = module.runs(name)
        if num_runs:
            yield name, num_runs


def hbm_bytes(module: Module, computation: str, instruction: Instruction) -> float:
    """Returns the bytes that one run of an instruction reads and writes.

    Those of collectives are not counted.
    """
    opcode = instruction.opcode
    kind = opcode.removesuffix("-start")
    if opcode in FREE or opcode.endswith("-done") or kind in (*KINDS, *MESSAGES):
        return 0
    if opcode == "fusion":
        return _fusion_bytes(module, instruction)
    body = module.computations[computation]
    operands = [body[name] for name in dict.fromkeys(instruction.operands) if name in body]
    operand_bytes = [_num_bytes(operand.results) for operand in operands]
    if opcode in SLICES:
        return 2 * _num_bytes(instruction.results) + sum(operand_bytes[1:])
    if opcode in ("dynamic-update-slice", "scatter"):
        return _update_bytes(body, instruction) + sum(operand_bytes[1:])
    if opcode == "copy":
        return 2 * _num_bytes(instruction.results)
    if kind == "copy":
        return 2 * operand_bytes[0]
    results = instruction.results
    if opcode == "custom-call" and len(results) > 1:
        # Without its workspace.
        results = tuple(array for array in results if array.dtype not in ("u8", "s8"))
    return _num_bytes(results) + sum(operand_bytes)


def _num_bytes(arrays: tuple[Array, ...]) -> float:
    return sum(array.size * array.itemsize for array in arrays)


def _fusion_bytes(module: Module, fusion: Instruction) -> float:
    """Returns the bytes that a fusion reads and writes; an operand passed twice counts once."""
    inner_name = fusion.called[0]
    inner = module.computations[inner_name]
    parameters = {
        int(parameter.operand_text): parameter
        for parameter in inner.values()
        if parameter.opcode == "parameter"
    }
    read_bytes: dict[str, float] = {}
    for number, name in enumerate(fusion.operands):
        parameter = parameters[number]
        num_elements = _elements_read(module, inner_name, parameter)
        read_bytes[name] = num_elements * parameter.results[0].itemsize
    return sum(read_bytes.values()) + _written(inner)


def _elements_read(module: Module, computation: str, value: Instruction) -> float:
    """Returns how many elements of a value a fusion reads.

    All, unless each use is a slice or in place.
    """
    if value.is_root:
        return value.results[0].size
    total = 0.0
    for user in module.users[computation, value.name]:
        is_first = user.operands[0] == value.name
        if user.opcode in PASSING or (user.opcode in SLICES and is_first):
            total += _elements_read(module, computation, user)
        elif user.opcode == "scatter" and is_first:
            total += module.computations[computation][user.operands[-1]].results[0].size
        elif not (user.opcode == "dynamic-update-slice" and is_first):
            return value.results[0].size
    return min(total, value.results[0].size)


def _written(inner: dict[str, Instruction]) -> float:
    """Returns the bytes that a fusion writes."""
    root = next(instruction for instruction in inner.values() if instruction.is_root)
    outputs = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    total = 0.0
    for output in outputs:
        num_bytes = _num_bytes(output.results)
        update = _through(inner, output)
        if update.opcode in ("dynamic-update-slice", "scatter"):
            buffer = _through(inner, inner[update.operands[0]])
            # In place only if the buffer is one that the fusion was given.
            if buffer.opcode == "parameter":
                num_bytes = min(num_bytes, _update_bytes(inner, update))
        total += num_bytes
    return total


def _through(inner: dict[str, Instruction], value: Instruction) -> Instruction:
    """Returns the instruction whose elements a value passes on."""
    while value.opcode in PASSING:
        value = inner[value.operands[0]]
    return value


def _update_bytes(body: dict[str, Instruction], instruction: Instruction) -> float:
    """Returns the bytes that an update in place writes: of a slice, or of the rows of a scatter."""
    number = 1 if instruction.opcode == "dynamic-update-slice" else -1
    update = body[instruction.operands[number]]
    return update.results[0].size * instruction.results[0].itemsize


@dataclass(frozen=True)
class Product:
    """A matrix product, of (M, K) and (K, N) for each element of its batch dims."""

    flops: float
    itemsize: float  # bytes per element of an operand
    dims: tuple[int, ...]  # M, N, K; () if unknown


def products(module: Module, computation: str, instruction: Instruction) -> list[Product]:
    """Returns the matrix products in an instruction."""
    if instruction.opcode == "fusion":
        inner_name = instruction.called[0]
        found = []
        for inner in module.computations[inner_name].values():
            found += products(module, inner_name, inner)
        return found
    body = module.computations[computation]
    attributes = instruction.attributes
    is_library = instruction.opcode == "custom-call" and MATMUL.search(attributes)
    if instruction.opcode == "dot" or is_library:
        left = body[instruction.operands[0]].results[0]
        num_outputs = instruction.results[0].size
        contracted = _size_of_dims(left, attributes, "lhs_contracting_dim")
        num_batches = _size_of_dims(left, attributes, "lhs_batch_dim")
        num_rows = left.size // max(1, num_batches * contracted)
        num_columns = num_outputs // max(1, num_batches * num_rows)
        return [
            Product(
                flops=2.0 * num_outputs * contracted,
                itemsize=left.itemsize,
                dims=(num_rows, num_columns, contracted),
            )
        ]
    if instruction.opcode == "custom-call" and KERNEL.search(attributes):
        expected = GROUPED.search(attributes)
        return [_grouped_product(body, instruction, int(expected[1]))] if expected else []
    if instruction.opcode == "convolution":
        # TPUs multiply matrices by convolutions.
        image, kernel = (body[name].results[0] for name in instruction.operands[:2])
        return _products_of_convolution(image, kernel, instruction.results[0], attributes)
    return []


def _grouped_product(
    body: dict[str, Instruction], instruction: Instruction, expected_rows: int
) -> Product:
    """Returns the product of a grouped kernel: rows (R, K) with matrices or rows (..., N).

    Its tiles without rows are skipped. No factor of a library's product is valid for it, so its
    dims are unknown.
    """
    arrays = [body[name].results[0] for name in instruction.operands]
    rows = next(array for array in arrays if array.dtype in ("bf16", "f16", "f32"))
    per_row = rows.shape[-1] * instruction.results[0].shape[-1]
    return Product(2.0 * expected_rows * per_row, rows.itemsize, dims=())


def _products_of_convolution(
    image: Array, kernel: Array, output: Array, attributes: str
) -> list[Product]:
    """Returns the product of a convolution, without the taps that read only padding.

    libtpu writes the product of batched matrices as a window as wide as the batch, with padding
    everywhere but at one position.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if not labels:
        return []
    image_labels, kernel_labels, output_labels = labels.groups()
    num_pairs = 1
    for dim in range(len(output_labels) - 2):
        label = str(dim)
        num_pairs *= _num_taps(
            image.shape[image_labels.index(label)],
            kernel.shape[kernel_labels.index(label)],
            output.shape[output_labels.index(label)],
            **_window_of_dim(attributes, dim),
        )
    num_products = (
        output.shape[output_labels.index("b")]
        * output.shape[output_labels.index("f")]
        * kernel.shape[kernel_labels.index("i")]
        * num_pairs
    )
    return [Product(2.0 * num_products, kernel.itemsize, dims=())]


def _window_of_dim(attributes: str, dim: int) -> dict[str, int]:
    """Returns the padding before the input, the stride and the dilations of a spatial dim."""
    window = re.search(r"window=\{([^}]*)\}", attributes)
    values = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}

    def value(key: str, default: str) -> int:
        if key not in values:
            return int(default)
        return int(values[key].split("x")[dim].partition("_")[0])

    return {
        "padding": value("pad", "0"),
        "stride": value("stride", "1"),
        "image_dilation": value("lhs_dilate", "1"),
        "kernel_dilation": value("rhs_dilate", "1"),
    }


def _num_taps(
    image_size: int,
    kernel_size: int,
    output_size: int,
    *,
    padding: int,
    stride: int,
    image_dilation: int,
    kernel_dilation: int,
) -> int:
    """Returns the pairs of an output and a tap, along a spatial dim, that read an input element."""
    starts = np.arange(output_size) * stride - padding
    num_taps = 0
    for tap in range(kernel_size):
        position = starts + tap * kernel_dilation
        # Between the elements of a dilated input are zeros.
        is_inside = (position >= 0) & (position <= (image_size - 1) * image_dilation)
        num_taps += int((is_inside & (position % image_dilation == 0)).sum())
    return num_taps


def _size_of_dims(array: Array, attributes: str, key: str) -> int:
    """Returns the product of an array's dims in `key`s={0,1}, or `key`ensions":["0","1"]."""
    dims = re.search(rf'{key}(?:ension)?s"?[=:][{{\[]([\d,"]*)', attributes)
    if not dims:
        return 1
    return math.prod(array.shape[int(dim)] for dim in re.findall(r"\d+", dims[1]))


def matmul_flops(module: Module, computation: str, instruction: Instruction) -> dict[float, float]:
    """Returns the FLOPs of the matrix products in an instruction, by bytes per operand element."""
    flops: dict[float, float] = {}
    for product in products(module, computation, instruction):
        flops[product.itemsize] = flops.get(product.itemsize, 0) + product.flops
    return flops


@dataclass(frozen=True)
class AttentionCall:
    """A call of a fused attention kernel: cuDNN's, or splash attention."""

    flops: float
    head_dim: int
    is_backward: bool


def attention_call(
    module: Module, computation: str, instruction: Instruction
) -> AttentionCall | None:
    """Returns the call of a fused attention kernel in an instruction; None if there is none."""
    if instruction.opcode != "custom-call":
        return None
    body = module.computations[computation]
    operands = [body[name].results[0] for name in instruction.operands]
    if match := ATTENTION.search(instruction.attributes):
        return _cudnn_call(match[1], operands, instruction.attributes)
    if match := SPLASH.search(instruction.name):
        return _splash_call(match[1], operands, instruction)
    return None


def _cudnn_call(name: str, operands: list[Array], attributes: str) -> AttentionCall:
    """Two products forward, five backward; half of each if it is causal."""
    query_shape, key_shape = operands[0].shape, operands[1].shape  # (B, S, H, K), (B, T, G, K)
    is_backward = "Backward" in name
    num_products = 5 if is_backward else 2
    half = 0.5 if "CAUSAL" in attributes else 1
    flops = 2 * num_products * half * math.prod(query_shape) * key_shape[1]
    return AttentionCall(flops, query_shape[-1], is_backward)


def _splash_call(kernel: str, operands: list[Array], instruction: Instruction) -> AttentionCall:
    """The products of queries and keys, and those with values, of half the scores.

    Or of the blocks that a window leaves in a row, or in a column; the fused backward kernel has
    all of them in its grid, so a window does not count there. The first operands are the numbers of
    these blocks, (1, queries, keys), then queries (..., H, S, K), keys and values.
    """
    query, key, value = [array for array in operands if array.dtype in ("bf16", "f32")][:3]
    length = key.shape[-2]
    if kernel == "fwd":
        num_of_keys, num_of_values = 1, 1
        block, num_visited = "block_kv", operands[0].shape[-1]
    elif kernel == "dq":
        num_of_keys, num_of_values = 2, 1
        block, num_visited = "block_kv_dq", operands[0].shape[-1]
    else:
        # The fused kernel returns a part of the gradient of the queries for each block of keys.
        is_fused = any(len(array.shape) > len(query.shape) for array in instruction.results)
        num_of_keys, num_of_values = (3 if is_fused else 2), 2
        block, num_visited = "block_q_dkv", operands[0].shape[-2]
    seen = 0.5
    block_size = re.search(rf"{block}\W+(\d+)", instruction.attributes)
    if block_size:
        seen = min(seen, num_visited * int(block_size[1]) / length)
    per_score = num_of_keys * query.shape[-1] + num_of_values * value.shape[-1]
    return AttentionCall(
        flops=2 * per_score * seen * math.prod(query.shape[:-1]) * length,
        head_dim=query.shape[-1],
        is_backward=kernel != "fwd",
    )


def attention_flops(module: Module, computation: str, instruction: Instruction) -> float:
    """Returns the FLOPs of a fused attention kernel; 0 if the instruction is none."""
    call = attention_call(module, computation, instruction)
    return call.flops if call else 0


@dataclass(frozen=True)
class LinkBytes:
    """Bytes that a device sends per step over one axis, or several together, by link.

    The mean of all devices.
    """

    axes: str
    host: float
    hosts: float
    slices: float


@dataclass(frozen=True)
class Links:
    by_axes: list[LinkBytes]
    leaving_host: float  # bytes per step, of the host that sends most
    leaving_slice: float
    num_hosts: int
    num_slices: int


def link_traffic(named: Iterable[tuple[str, Collective]], network: Network) -> Links:
    """Returns the bytes of the collectives, each with the name of its axes, by link."""
    hosts, slices = network.hosts.ravel(), network.slices.ravel()
    # A slice within a host is simulated: its devices count as a host of their own.
    islands = np.unique(np.stack([slices, hosts]), axis=1, return_inverse=True)[1].ravel()
    device_bytes = {link: np.zeros(hosts.size) for link in LINKS}
    by_axes: dict[str, Counter] = {}
    routes: dict = {}
    for axes, collective in named:
        # Many collectives have the same groups.
        key = collective.kind, collective.groups
        if key not in routes:
            routes[key] = _routes(collective.kind, collective.groups, islands, slices)
        row = by_axes.setdefault(axes, Counter())
        for link, share in routes[key].items():
            device_bytes[link] += collective.bytes * share
            row[link] += collective.bytes * share.mean()
    between_hosts, between_slices = device_bytes["hosts"], device_bytes["slices"]
    rows = []
    for axes in sorted(by_axes):
        row = by_axes[axes]
        rows.append(LinkBytes(axes, row["host"], row["hosts"], row["slices"]))
    return Links(
        by_axes=rows,
        leaving_host=float(np.bincount(islands, between_hosts + between_slices).max()),
        leaving_slice=float(np.bincount(slices, between_slices).max()),
        num_hosts=len({*islands.tolist()}),
        num_slices=len({*slices.tolist()}),
    )


def _routes(
    kind: str, groups: Groups, hosts: np.ndarray, slices: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns for each link the share of a collective's bytes that each device sends over it."""
    shares = np.zeros((len(LINKS), hosts.size))
    for group in groups:
        members = np.array(group)
        share = 1.0
        if kind == "collective-permute":
            sources, targets = members[:1], members[1:]
        elif "all-to-all" in kind:
            pairs = np.meshgrid(members, members, indexing="ij")
            sources, targets = pairs[0].ravel(), pairs[1].ravel()
            share = 1 / max(1, len(members) - 1)
        else:
            # A ring that enters and leaves each slice, and each host, once.
            sources = members[np.lexsort((members, hosts[members], slices[members]))]
            targets = np.roll(sources, -1)
        is_other_slice = slices[sources] != slices[targets]
        is_other_host = hosts[sources] != hosts[targets]
        link = np.where(is_other_slice, 2, np.where(is_other_host, 1, 0))
        np.add.at(shares, (link, sources), share * (sources != targets))
    return dict(zip(LINKS, shares, strict=True))
