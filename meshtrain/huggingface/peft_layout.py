"""What PEFT gives one update: a linear layer, or a parameter with the kernels of all experts.

Often it is one kernel of this package. A fused layer, such as Phi-3's qkv_proj, holds several, and
so does the gate_up_proj of experts. Each kernel p has an update A_p B_p of its own here, so the
update of all is their block-diagonal form: the A one after the other, which adds up the ranks, and
each B in the rows of its outputs and the columns of its A.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from meshtrain.huggingface import tensor_rows
from meshtrain.huggingface.families.base import Family
from meshtrain.huggingface.tensor_rows import Row

# E experts, R rank, I inputs, O outputs. A linear layer is one with E = 1.

Factors = tuple[np.ndarray, np.ndarray]  # A and B


@dataclass(frozen=True)
class Target:
    """A linear layer, or a parameter with the kernels of all experts of a layer, in all layers."""

    # In transformers; * stands for the index of the layer.
    name: str
    is_of_experts: bool  # then the last name is that of the parameter
    num_experts: int
    num_outputs: int
    # The kernels of this package that it holds, in the order of their outputs.
    rows: Sequence[Row]
    # The indices of the outputs of each of them.
    outputs: Sequence[np.ndarray]

    @property
    def is_router(self) -> bool:
        """Returns whether it is a router, which is no linear layer in transformers."""
        return self.rows[0].path.endswith("/router/kernel")

    @property
    def names(self) -> list[str]:
        """Returns the name in each layer."""
        if "*" not in self.name:
            return [self.name]
        row = self.rows[0]
        return [self.name.replace("*", str(row.first + n)) for n in range(row.sizes["L"])]


def targets(rows: Iterable[Row], family: Family) -> list[Target]:
    """Returns what PEFT adapts of these kernels, in the order in which transformers has them."""
    order = {name: number for number, name in enumerate(family.names)}

    def position(row: Row) -> int:
        in_stack = tensor_rows.in_stack(row.path)
        return order.get(in_stack, order.get(row.path, 0))

    by_name: dict[str, list[tuple[Row, int, np.ndarray]]] = {}
    for row in sorted(rows, key=position):
        name, num_outputs, outputs = _place_of(row, family)
        by_name.setdefault(name, []).append((row, num_outputs, outputs))
    found = []
    for name, parts in by_name.items():
        parts.sort(key=lambda part: int(part[2][0]))
        row, num_outputs, _ = parts[0]
        found.append(
            Target(
                name,
                is_of_experts=row.is_of_experts,
                num_experts=row.layers_and_experts[1],
                num_outputs=num_outputs,
                rows=[row for row, _, _ in parts],
                outputs=[outputs for _, _, outputs in parts],
            )
        )
    return found


def is_split_by_expert(row: Row) -> bool:
    """Returns whether each expert has a tensor of its own in the files."""
    return row.name.count("*") > 1


def _joined_parts(row: Row, family: Family) -> tuple[str, tuple[str, ...], int] | None:
    """Returns the name in transformers of tensors with other names in files, and which this is.

    Those of experts are joined to one parameter.
    """
    for parameter, parts in family.fused.items():
        for number, part in enumerate(parts):
            if row.name.endswith(f".{part}"):
                return parameter, parts, number
    return None


def _place_of(row: Row, family: Family) -> tuple[str, int, np.ndarray]:
    """Returns the name of a kernel's target, its number of outputs, and which are the kernel's."""
    name = row.name.removesuffix(".weight")
    number, num_parts = 0, 1
    if joined_parts := _joined_parts(row, family):
        parameter, parts, number = joined_parts
        name = (row.name.removesuffix(parts[number]) + parameter).removesuffix(".weight")
        num_parts = len(parts)
    (num_outputs,) = row.outputs.shape
    outputs = row.outputs.parameter_view(np.arange(num_outputs)).reshape(-1)
    # The tensors of an expert that transformers joins have equally many outputs.
    return name, num_parts * num_outputs, number * num_outputs + outputs


def module_of(target: Target, name: str, all_targets: Iterable[Target]) -> str:
    """Returns the module in which PEFT has the factors of `name`, of `target.names`.

    It wraps a module once for each adapted parameter: the last wrapper is outermost, and has the
    name of the module.
    """
    if not target.is_of_experts:
        return name
    end = target.name.rpartition(".")[0]
    of_module = [one.name for one in all_targets if one.name.rpartition(".")[0] == end]
    num_outer = len(of_module) - 1 - of_module.index(target.name)
    return name.rpartition(".")[0] + ".base_layer" * num_outer


def joined(target: Target, factors: Sequence[Factors]) -> Factors:
    """Returns A (E x R, I) and B (O, R x E) of a target in one layer, as PEFT stores them.

    `factors` has A (E, R, I) and B (E, O, R) of each kernel; outputs of other kernels get zeros.
    """
    a_ERI = np.concatenate([a for a, _ in factors], axis=1)
    b_EOR = np.zeros((target.num_experts, target.num_outputs, a_ERI.shape[1]), a_ERI.dtype)
    column = 0
    for outputs, (_, b) in zip(target.outputs, factors, strict=True):
        rank = b.shape[-1]
        b_EOR[:, outputs, column : column + rank] = b
        column += rank
    return (
        a_ERI.reshape(-1, a_ERI.shape[-1]),
        b_EOR.transpose(1, 2, 0).reshape(target.num_outputs, -1),
    )


def split(target: Target, factors: Factors, rank: int) -> list[Factors | None]:
    """Returns A (E, R, I) and B (E, O, R) of each kernel of a target in one layer.

    `factors` are as PEFT stores them, and `rank` is that of an update of one kernel, by which a
    block-diagonal form is recognised: such kernels get the ranks of their own block, and one
    without a block None. Otherwise all get the same A. The product is the same.
    """
    a, b = factors
    a_ERI = a.reshape(target.num_experts, -1, a.shape[-1])
    b_EOR = b.reshape(len(b), -1, target.num_experts).transpose(2, 0, 1)
    of_kernels = [b_EOR[:, outputs] for outputs in target.outputs]
    owners = _owners_of_blocks(of_kernels, rank)
    if owners is None:
        return [(a_ERI, b_of_kernel) for b_of_kernel in of_kernels]
    found: list[Factors | None] = [None] * len(of_kernels)
    for block, kernel in enumerate(owners):
        ranks = slice(block * rank, (block + 1) * rank)
        found[kernel] = a_ERI[:, ranks], of_kernels[kernel][:, :, ranks]
    return found


def _owners_of_blocks(of_kernels: Sequence[np.ndarray], rank: int) -> list[int] | None:
    """Returns the kernel of each block of ranks; None if B is not block-diagonal.

    With a block for each kernel the first belongs to the first, also if it is still zero.
    """
    num_kernels, all_ranks = len(of_kernels), of_kernels[0].shape[-1]
    num_blocks = all_ranks // rank
    if num_kernels == 1 or all_ranks % rank or num_blocks > num_kernels:
        return None
    owners = []
    for block in range(num_blocks):
        ranks = slice(block * rank, (block + 1) * rank)
        users = [n for n, b_EOR in enumerate(of_kernels) if b_EOR[:, :, ranks].any()]
        if num_blocks == num_kernels:
            users = users or [block]
        if len(users) != 1 or users[0] <= max(owners, default=-1):
            return None
        owners += users
    return owners
