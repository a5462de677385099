"""Bytes that a step needs on each device, in closed form; those of the state are exact."""

from meshtrain.config import schema
from meshtrain.tools.plan.cost import has_loop, loss_chunks
from meshtrain.tools.plan.layout import Layout, StateBytes
from meshtrain.tools.plan.sizes import BYTES, ModelWork


def parts(work: ModelWork, layout: Layout, state: StateBytes, seq_len: int) -> dict[str, float]:
    """Returns the predicted bytes at the peak, by what they hold.

    `state` has the bytes of the state as this layout shards it.
    """
    w, p = work, layout
    tokens = p.rows * seq_len / p.context
    wide, other = w.kept_bytes(p.remat)
    # The residual stream is sharded over `tensor` by the rule residual_seq alone; counted as if it
    # was not.
    layer = tokens * (wide + other / p.tensor)
    residual = tokens * BYTES * w.d_model
    all_wide, all_other = w.kept_bytes("none")
    one_layer = tokens * (all_wide + all_other / p.tensor)
    layers_per_stage = w.num_layers / p.pipeline

    # What the forward pass keeps, and what the backward pass holds while it recomputes.
    if p.pipeline == 1:
        kept = layers_per_stage * layer
        recomputed = one_layer if p.remat != "none" else 0.0
    else:
        layers_per_chunk = layers_per_stage / p.num_chunks
        chunk = layers_per_chunk * layer
        kept = p.table.num_slots * (residual if p.keep == "inputs" else chunk)
        # Compiled programs hold what the backward pass of a chunk recomputes twice.
        recomputed = (2 * chunk if p.keep == "inputs" else 0.0) + one_layer
    if p.num_microbatches == 1 and not has_loop(w, p):
        # A loop over the layers has the gradients of all from its start. Without one, those of a
        # layer come when what the layer kept is gone.
        of_layers = layers_per_stage * w.layer / p.expert / p.tensor
        of_layers *= state.gradients / ((of_layers + w.others / p.tensor) or 1)
        kept = max(kept - of_layers, one_layer)

    is_gathered = p.zero_stage == 3 and p.zero_shards > 1
    if w.num_experts and p.remat == "none" and is_gathered:
        # Of experts, the backward pass uses what the forward pass gathered.
        kept += layers_per_stage * BYTES * w.layer / p.tensor / p.expert

    num_chunks, logits = loss_chunks(w, p, seq_len)
    head = w.vocab_size * w.d_model / p.tensor
    gathered = 0.0
    if is_gathered:
        # A layer, the next one, and float32 gradients; the output head and its gradients, which
        # chunks of the loss add in float32.
        gathered = w.layer / p.tensor / p.expert * (2 * BYTES + 4)
        gathered += head * (BYTES + (4 if num_chunks > 1 else BYTES))
        if p.num_microbatches > 1 and p.pipeline == 1:
            gathered += BYTES * max(w.others / p.tensor - head, 0)  # once for all micro-batches
        elif w.is_tied:
            gathered += BYTES * head  # the embedding, which the head reads transposed

    has_residual = p.members[0] > 1 and schema.has_sync_feedback(p.sync)
    return {
        "parameters": state.params,
        "optimizer state": state.opt_state,
        "gradients": state.gradients,
        # Those of one micro-batch, beside the sums; stages add theirs in place.
        "own gradients": state.gradients if p.num_microbatches > 1 == p.pipeline else 0,
        # Of compressed gradients, what the last step lost: as large as the gradients.
        "residual": state.gradients if has_residual else 0,
        "activations": kept,
        "temporaries": recomputed + gathered + logits,
    }
