"""Step time of a model on a layout in closed form: what devices compute, what they wait for."""

import math
from dataclasses import dataclass, field

from meshtrain.config import schema
from meshtrain.ops.losses import MIB
from meshtrain.parallel import grad_sync
from meshtrain.parallel.grad_sync import BITS, Wire
from meshtrain.tools.plan.layout import Layout
from meshtrain.tools.plan.machine import LAUNCH, Machine
from meshtrain.tools.plan.sizes import BYTES, ModelWork

# Parts of a step's cost that each axis causes.
COST_OF_AXIS = {
    "pipeline": ("bubble", "sends"),
    "data": ("gradients",),
    "fsdp": ("fsdp",),
    "expert": ("expert",),
    "context": ("context",),
    "tensor": ("tensor",),
}

# Tokens of the busiest device over the mean, if `expert` shards the experts and they are balanced
# by training.
IMBALANCE = 1.1

# Bytes that a device reads and writes of each element that `parallel.grad_sync` adds: buckets are
# filled and emptied; what is written in another format is read, written, read back, and subtracted.
BUCKETED, ENCODED = 16, 24


@dataclass(frozen=True)
class OverlapModel:
    """What frameworks do differently: above all, how much communication computation hides."""

    fused_attention: bool = True
    # Time of attention of a part of a sequence, for which there is no fused kernel; 1: as fast as
    # fused.
    context_attention: float = 2.0
    # Parts of communication that computation hides: over `tensor`, between stages; part of a
    # backward pass that hides the sum of gradients, and of a layer that hides the collectives over
    # `fsdp`.
    tensor_hidden: float = 0.0
    sends_hidden: float = 0.7
    data_hidden: float = 0.9
    gathers_hidden: float = 0.8
    grad_bytes: int = 4
    head_on_all_stages: bool = True
    # `data` shards the optimizer state, as ZeRO-1 of Megatron does.
    data_holds_moments: bool = False

    def optimizer_shards(self, layout: Layout) -> int:
        return layout.data if self.data_holds_moments and layout.zero_stage else 1


@dataclass
class Cost:
    """Seconds of a step, by what they are spent on."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    def times(self, factor: float) -> "Cost":
        return Cost({name: factor * seconds for name, seconds in self.parts.items()})


# In the formulas: w the model's work, p the layout; `tokens` of a micro-batch on a device.


def step_cost(
    work: ModelWork,
    layout: Layout,
    machine: Machine,
    seq_len: int,
    overlap: OverlapModel | None = None,
) -> Cost:
    """Returns the predicted cost of a step."""
    w, p = work, layout
    overlap = overlap or OverlapModel()
    tokens = p.rows * seq_len / p.context
    num_layers = w.num_layers / p.pipeline  # of a stage

    # The seconds of one layer and one micro-batch.
    forward, backward, again = _layer(w, p, machine, tokens, seq_len, overlap)
    compute = forward + backward + again
    tensor = _tensor(w, p, machine, tokens) * (1 - overlap.tensor_hidden)
    tensor *= 1 + 0.5 * (again > 0.5 * forward)
    context = _context(w, p, machine, tokens, compute)
    experts = _experts(w, p, machine, tokens)
    gathers = _gathers(w, p, machine, compute + tensor + context + experts, overlap)

    turns = p.num_microbatches
    cost = Cost()
    cost.parts["products and attention"] = turns * num_layers * compute
    cost.parts["head"] = turns * _head(w, p, machine, tokens, seq_len, overlap)
    cost.parts["tensor"] = turns * num_layers * tensor
    cost.parts["context"] = turns * num_layers * context
    cost.parts["expert"] = turns * num_layers * experts
    cost.parts["fsdp"] = turns * num_layers * gathers
    if p.pipeline > 1:
        stage = num_layers * (compute + tensor + context + experts + gathers)
        cost.parts["bubble"] = p.idle_turns * stage
        num_bytes = BYTES * tokens * w.d_model / p.tensor
        num_sends = 2 * (turns * p.num_chunks + p.pipeline - 1)
        send = machine.send(num_bytes, p.stride("pipeline"))
        cost.parts["sends"] = num_sends * send * (1 - overlap.sends_hidden)
    cost.parts["gradients"] = _gradients(w, p, machine, num_layers * backward, overlap)
    cost.parts["optimizer"] = machine.memory(28 * _held(w, p, overlap))
    return cost


def launches(work: ModelWork, layout: Layout, machine: Machine) -> float:
    """Returns the seconds of a step in which operations are only started.

    Small models have little else.
    """
    per_layer = 3 * (len(work.products) + 8) * LAUNCH[machine.kind]
    return layout.num_microbatches * work.num_layers / layout.pipeline * per_layer


# ---- computation ----


def _product(machine: Machine, m: float, n: float, k: float) -> float:
    flops = 2 * m * n * k
    return machine.products(flops, BYTES * (m * k + k * n + m * n)) + LAUNCH[machine.kind]


def _layer(
    w: ModelWork, p: Layout, machine: Machine, tokens: float, seq_len: int, overlap: OverlapModel
) -> tuple[float, float, float]:
    """Returns the seconds of a layer's forward pass, backward pass and recomputation.

    They are those of one micro-batch.
    """
    D, K, T = w.d_model, w.head_dim, p.tensor
    # `tensor` shards the columns of one product and the rows of the next.
    products = sum(_product(machine, tokens, n / T, k) for n, k in w.products)
    if p.expert > 1:  # all wait for the device whose experts have the most tokens
        products *= IMBALANCE
    width = w.width / T
    seen = seq_len * w.window
    if overlap.fused_attention:  # blocks above the diagonal are skipped
        flops = 2 * tokens * seen * w.heads / T * K
        attention = machine.attention(flops, backward=False)
        attention_back = machine.attention(2.5 * flops, backward=True)
    else:
        # Scores and probabilities are arrays: products, mask, softmax and dropout read and write
        # them.
        flops = 4 * tokens * seen * w.heads / T * K
        scores = BYTES * tokens * seen * w.heads / T
        attention = machine.products(flops, 6 * scores)
        attention_back = machine.products(2 * flops, 8 * scores)
    if p.context > 1 and w.heads % (p.context * T):  # else "ulysses": whole sequences of some heads
        attention *= overlap.context_attention
        attention_back *= overlap.context_attention
    # Norms and residuals are sharded over `tensor` like the sequence.
    moved = 10 * D / T + 3 * width + 4 * w.heads / T * K
    elementwise = machine.memory(tokens * BYTES * moved)
    elementwise += 8 * LAUNCH[machine.kind]
    forward = products + attention + elementwise
    backward = 2 * products + attention_back + 1.6 * elementwise
    if p.remat == "full":
        again = forward
    else:
        again = 0.0 if p.remat == "none" else attention + elementwise
    # The chunk runs once more, whatever its layers recompute then.
    if p.pipeline > 1 and p.keep == "inputs":
        again += forward
    return forward, backward, again


def _head(
    w: ModelWork, p: Layout, machine: Machine, tokens: float, seq_len: int, overlap: OverlapModel
) -> float:
    """Returns the seconds of the output head and the loss, forward and backward."""
    stages = p.pipeline if overlap.head_on_all_stages else 1
    vocab = w.vocab_size / p.tensor
    product = 3 * _product(machine, tokens / stages, vocab, w.d_model)
    chunks = 1
    if p.loss_chunk_mib:
        chunks = math.ceil(p.logits_bytes(w.vocab_size, seq_len) / (p.loss_chunk_mib * MIB))
    # Each chunk but the only one adds the gradient of the head to a float32 sum.
    sums = 8 * vocab * w.d_model * chunks if chunks > 1 else 0
    return product + machine.memory(5 * BYTES * tokens / stages * vocab + sums)


def _held(w: ModelWork, p: Layout, overlap: OverlapModel) -> float:
    """Returns the number of parameters whose optimizer state a device updates."""
    num = w.num_layers / p.pipeline * w.layer / p.expert + w.others
    shards = p.zero_shards if p.zero_stage else 1
    return num / p.tensor / shards / overlap.optimizer_shards(p)


# ---- communication of a layer ----


def _tensor(w: ModelWork, p: Layout, machine: Machine, tokens: float) -> float:
    """Returns the seconds of a layer's collectives over `tensor`.

    In each direction there are two gathers and two scatters.
    """
    if p.tensor == 1:
        return 0.0
    size = BYTES * tokens * w.d_model
    return 8 * machine.collective(size, p.tensor, p.stride("tensor"))


def _context(w: ModelWork, p: Layout, machine: Machine, tokens: float, compute: float) -> float:
    """Returns the exposed seconds of a layer's exchange of keys and values.

    Those that computation does not hide.
    """
    if p.context == 1:
        return 0.0
    size = 2 * BYTES * tokens * p.context * max(w.kv_heads / p.tensor, 1) * w.head_dim
    total = 3 * machine.collective(size, p.context, p.stride("context"))
    return max(total - 0.3 * compute, 0.1 * total)


def _experts(w: ModelWork, p: Layout, machine: Machine, tokens: float) -> float:
    """Returns the seconds of a layer's collectives over `expert`.

    Tokens are gathered, and results scattered.
    """
    size = BYTES * tokens * p.expert * w.d_model
    return 4 * machine.collective(size, p.expert, p.stride("expert"))


def _gathers(
    w: ModelWork, p: Layout, machine: Machine, hidden_by: float, overlap: OverlapModel
) -> float:
    """Returns the seconds of a layer's collectives over `fsdp` that computation does not hide.

    Only ZeRO stage 3 has them.
    """
    if p.zero_shards == 1 or p.zero_stage < 3:
        return 0.0
    size = w.layer / p.tensor / p.expert
    gather = machine.collective(BYTES * size, p.zero_shards, p.zero_stride)
    scatter = machine.collective(overlap.grad_bytes * size, p.zero_shards, p.zero_stride)
    total = 2 * gather + scatter
    return max(total - overlap.gathers_hidden * hidden_by, 0.08 * total)


# ---- the sum of gradients ----


def _gradients(
    w: ModelWork, p: Layout, machine: Machine, backward: float, overlap: OverlapModel
) -> float:
    """Returns the seconds of the sum of gradients that the last backward pass does not hide."""
    size = (w.num_layers / p.pipeline * w.layer / p.expert + w.others) / p.tensor
    num, stride = p.data, p.stride("data")
    if p.zero_stage == 3:
        size /= p.zero_shards
    elif p.zero_shards > 1:
        num, stride = p.data * p.zero_shards, p.zero_stride
    by_sync = 0.0
    levels = levels_of(p, machine)
    if levels:
        by_sync = _synchronise(size, levels, p, machine)
        num //= p.members[0]
    gathered_bytes = overlap.grad_bytes if not p.zero_stage else BYTES
    total = machine.collective(overlap.grad_bytes * size, num, stride)
    total += machine.collective(gathered_bytes * size, num, stride)
    return by_sync + max(total - overlap.data_hidden * backward, 0.1 * total)


def levels_of(p: Layout, machine: Machine) -> tuple[grad_sync.Level, ...]:
    """Returns the levels in which `parallel.grad_sync` adds the gradients; () if XLA does."""
    (num, stride), pattern = p.members, p.sync.pattern
    networks = num // machine.parts_inside(num, stride)
    stays_inside = pattern == "hierarchical" and networks == 1
    if num == 1 or stays_inside or not schema.changed_sync_key(p.sync):
        return ()
    return grad_sync.levels_of(pattern, num, networks)


def _synchronise(
    size: float, levels: tuple[grad_sync.Level, ...], p: Layout, machine: Machine
) -> float:
    """Returns the seconds in which `grad_sync.all_reduce` adds `size` elements.

    They come after the backward pass, which hides none of them. The bytes are those of
    `grad_sync.bytes_sent`, each level over its own link.
    """
    wire, (_, stride) = p.sync.dtype, p.members
    total, part = machine.memory(BUCKETED * size), size
    for level in levels:
        element_bytes = 4
        # Only the last level, that of the slowest links, sends another format.
        if wire != "float32" and level is levels[-1]:
            element_bytes = Wire(BITS[wire], p.sync.block_size).bytes_per_element
            total += machine.memory(ENCODED * part)
        total += 2 * machine.exchange(
            element_bytes * part, level.size, stride * level.stride, is_ring=level.is_ring
        )
        part /= level.size
    return total
