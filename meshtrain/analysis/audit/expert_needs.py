"""Explains what devices that hold different experts send to each other."""

from meshtrain.analysis.audit.ledger import Explanation, Ledger
from meshtrain.analysis.audit.minimum import RESULTS_OF_EXPERTS, TOKENS_OF_EXPERTS
from meshtrain.analysis.audit.placement import ShardedExperts
from meshtrain.analysis.collective_ops import Collective

ROUTING = "experts of tokens"
LAYER_LOSSES = "losses of the layers"
ROLES = {"all-gather": TOKENS_OF_EXPERTS, "all-to-all": RESULTS_OF_EXPERTS}


def tokens_and_results(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains a gather of the tokens of a group, or of their gradients, and the all-to-all that returns results."""
    placement, experts = ledger.placement, ledger.placement.experts
    size = _size_of_group(ledger, c)
    if experts is None or c.kind not in ROLES or size != placement.d_model:
        return None
    label = ROLES[c.kind]
    if "rematted" in c.op_name:
        reason = f"sent again, because train.remat={placement.remat} recomputes the layer"
        return Explanation(c, label, 0, reason)
    needs = [need for need in ledger.needs if need.role == label]
    asked, claimed = ledger.claim(c, needs[:1], 1)
    if claimed > 0.99 * asked:
        reason = _wide(c, claimed) or _instead_of_dispatch(experts)
        return Explanation(c, label, claimed * experts.necessary, reason)
    if extra := ledger.explain_extra(c, label, needs, claimed):
        return _with_dispatch(extra, experts)
    reason = "sent more often than the experts need"
    return Explanation(c, label, claimed * experts.necessary, reason, is_needed=False)


def _with_dispatch(extra: Explanation, experts: ShardedExperts) -> Explanation:
    """Returns the explanation of bytes beyond those `claimed`, with what a dispatch would not send of the latter."""
    c, claimed = extra.collective, extra.needed_bytes
    needed = claimed * experts.necessary
    parts = {reason: part * (c.bytes - claimed) for reason, part in extra.fractions.items()}
    if claimed > needed:
        parts[_instead_of_dispatch(experts)] = claimed - needed
    fractions = {reason: part / (c.bytes - needed) for reason, part in parts.items()}
    return Explanation(c, extra.label, needed, extra.reason, fractions=fractions)


def _instead_of_dispatch(experts: ShardedExperts) -> str:
    if experts.necessary == 1:
        return ""
    return (
        f"sent for all {experts.num_shards} shards of the experts; an all-to-all of each token to its "
        f"{experts.per_token} experts would send {experts.necessary:.4g} times as many bytes, if they are used equally"
    )


def _wide(c: Collective, claimed: float) -> str:
    return (
        f"sent as {c.array.dtype}, a wider dtype than necessary" if c.bytes > 1.01 * claimed else ""
    )


def routing(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the gather of the numbers and weights of each token's experts, and what returns their gradient."""
    experts = ledger.placement.experts
    if experts is None or c.origin or not c.axes:
        return None
    is_sum = c.kind == "all-reduce" and c.axes == experts.others
    is_sum = is_sum and c.array.size == ledger.placement.num_tokens * experts.per_token
    is_moved = c.kind in ROLES and _size_of_group(ledger, c) == experts.per_token
    if not is_sum and not is_moved:
        return None
    return Explanation(c, ROUTING, 0, "numbers and weights, which each token's devices need")


def scores(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the gather of the router's scores of all tokens, from which XLA on CPU chooses on every device."""
    experts = ledger.placement.experts
    if experts is None or c.kind != "all-gather" or "top_k" not in c.op_name:
        return None
    if c.array.size % experts.num_experts or c.origin:
        return None
    reason = "XLA on CPU gathers the router's scores of all tokens for top_k; on GPU it does not"
    return Explanation(c, ROUTING, 0, reason)


def layer_losses(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains what a pipeline sends for the loss that layers add to each token."""
    placement = ledger.placement
    is_loss = placement.experts is not None and c.array.size == placement.num_tokens
    if not is_loss or c.axes != ("pipeline",):
        return None
    if c.kind != "collective-permute" and "/share/" not in c.op_name:
        return None
    reason = "one number for each token, which travels with its activations"
    return Explanation(c, LAYER_LOSSES, 0, reason)


def layer_metrics(ledger: Ledger, c: Collective) -> Explanation | None:
    """Explains the gather of the metrics of each layer from the stages, for process 0, which logs them."""
    is_of_layers = ledger.placement.experts is not None and c.array.size in _numbers_of_layers(
        ledger
    )
    if not is_of_layers or c.kind != "all-gather" or c.axes != ("pipeline",) or c.origin or c.phase:
        return None
    return Explanation(c, "scalars", 0, "metrics of each layer")


RULES = tokens_and_results, routing, scores, layer_losses, layer_metrics


def _numbers_of_layers(ledger: Ledger) -> set[int]:
    """Returns the numbers of layers of the stacks of the model."""
    return {leaf.shape[0] for leaf in ledger.placement.leaves if leaf.used_by == ("block",)}


def _size_of_group(ledger: Ledger, c: Collective) -> float:
    """Returns how many elements a collective over a group moves for each of its tokens; 0 for other collectives."""
    placement, experts = ledger.placement, ledger.placement.experts
    if experts is None or not c.axes or c.axes != experts.gathered or c.origin:
        return 0
    return c.array.size / (placement.num_tokens * experts.num_devices)
