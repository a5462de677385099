"""Step time of a model on a layout in closed form: what devices compute, what they wait for."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from meshtrain.config import schema
from meshtrain.ops.losses import MIB
from meshtrain.parallel import grad_sync
from meshtrain.parallel.grad_sync import BITS, Wire
from meshtrain.parallel.remat import ATTENTION, MLP_GATE, MLP_UP
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
    # Parts of the peak that an older kernel of fused attention reaches, forward and backward, see
    # `Machine.attention`; None: the best one's.
    attention: tuple[float, float] | None = None
    # Time of attention of a part of a sequence, for which there is no fused kernel; 1: as fast as
    # fused.
    context_attention: float = 2.0
    # Norms and residuals are sharded over `tensor`, along the sequence.
    shards_residuals: bool = False
    # Parts of communication that computation hides: over `tensor`, between stages; part of a
    # backward pass that hides the sum of gradients, and of a pass that hides the collectives over
    # `fsdp`.
    tensor_hidden: float = 0.0
    sends_hidden: float = 0.7
    data_hidden: float = 0.9
    gathers_hidden: float = 0.8
    grad_bytes: int = 4  # of an element of the sum over `data`
    scatter_bytes: int = BYTES  # and of that over `fsdp`
    # The backward pass gathers a layer only once the one before it is done.
    gathers_late: bool = False
    # Remat "full" computes also the last product of a layer again, which no gradient needs. A
    # compiler leaves it out.
    recomputes_last: bool = False
    # Parts of a layer's products that remat computes again, and of its attention, by remat.
    recomputed: Mapping[str, tuple[tuple[float, ...], float]] = field(default_factory=dict)
    head_on_all_stages: bool = True
    # `data` shards the optimizer state, as ZeRO-1 of Megatron does.
    data_holds_moments: bool = False

    def optimizer_shards(self, layout: Layout) -> int:
        return layout.data if self.data_holds_moments and layout.zero_stage else 1


# What XLA makes of meshtrain's programs, and of MaxText's. On GPUs the sum of gradients over `data`
# comes after the loop over the layers, in which it could have been hidden.
PROGRAMS = {"gpu": OverlapModel(data_hidden=0.0), "tpu": OverlapModel()}
PROGRAMS["measured"] = OverlapModel()


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
    overlap = overlap or PROGRAMS[machine.kind]
    tokens = p.rows * seq_len / p.context
    num_layers = w.num_layers / p.pipeline  # of a stage

    # The seconds of one layer and one micro-batch.
    forward, backward, again = _layer(w, p, machine, tokens, seq_len, overlap)
    compute = forward + backward + again
    tensor = _tensor(w, p, machine, tokens) * (1 - overlap.tensor_hidden)
    tensor *= 1 + 0.5 * (again > 0.5 * forward)
    context = _context(w, p, machine, tokens, compute)
    # What "full" computes again gathers its tokens again.
    experts = _experts(w, p, machine, tokens) * (1 + 0.25 * (again > 0.5 * forward))
    head = _head(w, p, machine, tokens, seq_len, overlap)

    turns = p.num_microbatches
    cost = Cost()
    cost.parts["products and attention"] = turns * num_layers * compute
    cost.parts["head"] = turns * head
    cost.parts["tensor"] = turns * num_layers * tensor
    cost.parts["context"] = turns * num_layers * context
    cost.parts["expert"] = turns * num_layers * experts
    hiding = (num_layers * forward, num_layers * (backward + again) + 2 / 3 * head)
    cost.parts["fsdp"] = _gathers(w, p, machine, hiding, seq_len, overlap)
    if p.pipeline > 1:
        stage = num_layers * (compute + tensor + context + experts)
        cost.parts["bubble"] = p.idle_turns * stage
        num_bytes = BYTES * tokens * w.d_model / p.tensor
        num_sends = 2 * (turns * p.num_chunks + p.pipeline - 1)
        send = machine.send(num_bytes, p.stride("pipeline"))
        cost.parts["sends"] = num_sends * send * (1 - overlap.sends_hidden)
    cost.parts["gradients"] = _gradients(w, p, machine, num_layers * backward, overlap)
    cost.parts["optimizer"] = machine.memory(w.update_bytes * _held(w, p, overlap))
    return cost


def launches(work: ModelWork, layout: Layout, machine: Machine) -> float:
    """Returns the seconds of a step in which operations are only started.

    Small models have little else.
    """
    per_layer = 3 * (len(work.products) + 8) * LAUNCH[machine.kind]
    return layout.num_microbatches * work.num_layers / layout.pipeline * per_layer


# ---- computation ----


def _product(machine: Machine, m: float, n: float, k: float) -> float:
    return machine.product(m, n, k, BYTES) + LAUNCH[machine.kind]


def _layer(
    w: ModelWork, p: Layout, machine: Machine, tokens: float, seq_len: int, overlap: OverlapModel
) -> tuple[float, float, float]:
    """Returns the seconds of a layer's forward pass, backward pass and recomputation.

    They are those of one micro-batch.
    """
    D, K, T = w.d_model, w.head_dim, p.tensor
    # `tensor` shards the columns of one product and the rows of the next.
    products = [_product(machine, tokens, n / T, k) for n, k in w.products]
    if p.expert > 1:  # all wait for the device whose experts have the most tokens
        products = [IMBALANCE * one for one in products]
    width = w.width / T
    seen = seq_len * w.window
    if overlap.fused_attention:  # blocks above the diagonal are skipped
        flops = 2 * tokens * seen * w.heads / T * K
        kernel = dict(seq_len=seq_len, head_dim=K, shares=overlap.attention)
        attention = machine.attention(flops, **kernel, backward=False)
        attention_back = machine.attention(2.5 * flops, **kernel, backward=True)
    else:
        # Scores and probabilities are arrays: products, mask, softmax and dropout read and write
        # them.
        flops = 4 * tokens * seen * w.heads / T * K
        scores = BYTES * tokens * seen * w.heads / T
        attention = machine.batched_products(flops, 6 * scores)
        attention_back = machine.batched_products(2 * flops, 8 * scores)
    if p.context > 1 and w.heads % (p.context * T):  # else "ulysses": whole sequences of some heads
        attention *= overlap.context_attention
        attention_back *= overlap.context_attention
    # What compiled programs read and write in norms, residuals, rotations and activations.
    residual = D / (T if overlap.shards_residuals else 1)
    attended = w.heads / T * K
    moved = 10 * residual + 4 * attended + (3 if w.is_gated else 1) * width
    moved_back = 16 * residual + 6 * attended + (6 if w.is_gated else 3) * width
    elementwise = machine.memory(tokens * BYTES * moved) + 8 * LAUNCH[machine.kind]
    elementwise_back = machine.memory(tokens * BYTES * moved_back) + 13 * LAUNCH[machine.kind]
    elementwise_back += machine.memory(tokens * _stacked(w, p))
    forward = sum(products) + attention + elementwise
    backward = 2 * sum(products) + attention_back + elementwise_back
    again = 0.0
    if p.remat != "none":
        parts, of_attention = recomputed_parts(w, p.remat, overlap)
        again = elementwise + of_attention * attention
        again += sum(part * one for part, one in zip(parts, products, strict=True))
    # The chunk runs once more, whatever its layers recompute then.
    if p.pipeline > 1 and p.keep == "inputs":
        again += forward
    return forward, backward, again


def has_loop(w: ModelWork, p: Layout) -> bool:
    """Returns whether the compiled step runs its layers in a loop; of stages, over the ticks."""
    return p.remat != "none" or p.pipeline > 1 or w.num_layers > w.unroll


def _stacked(w: ModelWork, p: Layout) -> float:
    """Returns the bytes that a loop over the layers moves for each token of a layer.

    What a layer keeps for its backward pass is copied into an array of all layers, and from it.
    """
    if not (w.kept and has_loop(w, p)):
        return 0.0
    wide, other = w.kept_bytes(p.remat)
    return 4 * (wide + other / p.tensor)


def recomputed_parts(
    w: ModelWork, remat: str, overlap: OverlapModel
) -> tuple[tuple[float, ...], float]:
    """Returns which parts of a layer's products remat computes again, and of its attention."""
    if remat == "offload":
        remat = "full"  # only where the layer's input is kept differs
    if remat in overlap.recomputed:
        return overlap.recomputed[remat]
    none = (0.0,) * len(w.products)
    if remat == "dots":
        if not w.num_experts:
            return none, 1.0
        # Products of experts have a batch dim, which "dots" does not keep; no gradient needs the
        # result of the last one.
        return (*none[:-2], 1.0, 0.0), 1.0
    names = schema.remat_names(remat)
    last = 1.0 if remat == "full" and overlap.recomputes_last else 0.0
    parts = [*(1.0 for _ in none[:-1]), last]
    if MLP_UP in names and MLP_GATE in names:
        parts[-2] = 0.0
    return tuple(parts), 0.0 if ATTENTION in names else 1.0


def _head(
    w: ModelWork, p: Layout, machine: Machine, tokens: float, seq_len: int, overlap: OverlapModel
) -> float:
    """Returns the seconds of the output head and the loss, forward and backward."""
    stages = p.pipeline if overlap.head_on_all_stages else 1
    vocab = w.vocab_size / p.tensor
    product = 3 * _product(machine, tokens / stages, vocab, w.d_model)
    chunks, _ = loss_chunks(w, p, seq_len)
    # Each chunk but the only one adds the gradient of the head to a float32 sum.
    sums = 8 * vocab * w.d_model * chunks if chunks > 1 else 0
    return product + machine.memory(5 * BYTES * tokens / stages * vocab + sums)


def loss_chunks(w: ModelWork, p: Layout, seq_len: int) -> tuple[int, float]:
    """Returns the number of chunks of the loss, and the bytes of the float32 logits of one."""
    logits = p.logits_bytes(w.vocab_size, seq_len)
    number = max(1, math.ceil(logits / (p.loss_chunk_mib * MIB))) if p.loss_chunk_mib else 1
    return number, logits / number


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
    w: ModelWork,
    p: Layout,
    machine: Machine,
    hiding: tuple[float, float],
    seq_len: int,
    overlap: OverlapModel,
) -> float:
    """Returns the seconds of a step's collectives over `fsdp` that computation does not hide.

    Only ZeRO stage 3 has them. `hiding` is what a micro-batch computes forward, and backward with
    its recomputation. A pass hides collectives while it computes; but the embedding is gathered
    before anything can be computed, and its gradient, like that of the first layer, is the last
    one that is. Matrices outside of the layers are gathered once in a step.
    """
    if p.zero_shards == 1 or p.zero_stage < 3:
        return 0.0

    def gather(size: float) -> float:
        return machine.collective(BYTES * size, p.zero_shards, p.zero_stride)

    def scatter(size: float, num_bytes: int) -> float:
        return machine.collective(num_bytes * size, p.zero_shards, p.zero_stride)

    num_layers = w.num_layers / p.pipeline
    layer = w.layer / p.tensor / p.expert
    head, others = w.vocab_size * w.d_model / p.tensor, w.others / p.tensor
    # Chunks of the loss add the gradient of the head in float32.
    chunks, _ = loss_chunks(w, p, seq_len)
    head_bytes = 4 if chunks > 1 else overlap.scatter_bytes
    # One matrix that is tied is gathered for the embedding, and is there for the head.
    embedding = others if w.is_tied else others - head
    last = scatter(embedding, head_bytes if w.is_tied else overlap.scatter_bytes)
    start = gather(embedding)
    forward = num_layers * gather(layer)
    backward = num_layers * scatter(layer, overlap.scatter_bytes)
    if not w.is_tied:
        backward += scatter(head, head_bytes)
        if p.num_microbatches == 1:
            forward += gather(head)
        else:
            start += gather(head)
    late = num_layers * gather(layer)
    if not overlap.gathers_late:
        backward, late = backward + late, 0
    of_forward, of_backward = (overlap.gathers_hidden * seconds for seconds in hiding)
    exposed = max(forward - of_forward, 0) + max(backward - of_backward, 0) + late
    exposed += scatter(layer, overlap.scatter_bytes)
    turns = p.num_microbatches
    # Stages run the embedding and the head of all micro-batches at once.
    return start + turns * exposed + (last if p.pipeline > 1 else turns * last)


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
    # ZeRO stages 1 and 2 gather the new parameters instead of the sums.
    gathers_params = p.zero_stage < 3 and p.zero_shards > 1 or overlap.data_holds_moments
    gathered_bytes = BYTES if p.zero_stage and gathers_params else overlap.grad_bytes
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
