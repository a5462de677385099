"""Explains each collective by the needs of the layout; the rest is reported as not needed."""

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshtrain.tools.audit import activation_rules, parameter_rules
from meshtrain.tools.audit.layout import Placement
from meshtrain.tools.audit.minimum import ExplainedBytes, Explanation
from meshtrain.tools.hlo.collective_ops import PADDED_NOTE, Collective

# Returns what a collective is for, or None if the rule does not apply to it.
Rule = Callable[[ExplainedBytes, Collective], Explanation | None]


def explain(
    placement: Placement, collectives: list[Collective]
) -> tuple[list[Explanation], ExplainedBytes]:
    """Returns what each collective is for, and the ledger with the needs that none of them met."""
    ledger = ExplainedBytes(placement)

    def order(c: Collective) -> tuple:
        # Collectives of known origin come first, then the largest, so that a stack of layers is not
        # mistaken for one layer of another parameter. Over model axes the forward pass comes first:
        # extra bytes are then reported for the backward pass, where they arise.
        late = c.phase == "backward" and not {*(c.axes or ())} & {*placement.token_axes}
        return late, c.origin == "", -c.bytes

    ordered = sorted(collectives, key=order)
    # A match by the number of elements alone is tried after every match by shape.
    by_shape = [_first(RULES, ledger, c) for c in ordered]
    explanations = []
    for c, explanation in zip(ordered, by_shape, strict=True):
        explanations.append(
            explanation or _first(RULES_BY_SIZE, ledger, c) or not_needed(ledger, c)
        )
    return explanations, ledger


def _first(rules: Iterable[Rule], ledger: ExplainedBytes, c: Collective) -> Explanation | None:
    if c.sent_as:
        # As what it is for; the bytes that it sends beyond that have a reason of their own.
        meant = _first(rules, ledger, replace(c, sent_as=""))
        return meant and replace(meant, collective=c, reason=meant.reason or PADDED_NOTE)
    for rule in rules:
        if explanation := rule(ledger, c):
            return explanation
    return None


def not_needed(ledger: ExplainedBytes, c: Collective) -> Explanation:
    """Describes a tensor that the layout does not need, by its origin or its shape."""
    leaves = ledger.placement.leaves
    origins = [leaf.name for leaf in leaves if leaf.argument == c.origin]
    same_shape = [leaf.name for leaf in leaves if parameter_rules.has_shape(c, [*leaf.shape], leaf)]
    reason = "no parameter has its shape"
    if same_shape:
        reason = f"it has the unsharded shape of {same_shape[0]}"
    if origins:
        reason = f"it holds {origins[0]}"
    return Explanation(c, "not needed by this layout", 0, reason, is_needed=False)


# The rules in the order in which they are tried. Those that know their collective by its name in
# the program or by a rare shape come first.
RULES: tuple[Rule, ...] = (
    parameter_rules.bucketed_sum,
    activation_rules.scalar,
    # experts
    activation_rules.tokens_and_results,
    activation_rules.routing,
    activation_rules.router_scores,
    activation_rules.layer_losses,
    activation_rules.layer_metrics,
    # parts of sequences
    activation_rules.segments,
    activation_rules.keys_and_values,
    activation_rules.unknown_attention,
    # pipeline stages
    activation_rules.stage_message,
    parameter_rules.layer_transfer,
    activation_rules.end_broadcast,
    # axes of tokens, then those of the model
    parameter_rules.parameter_gather,
    parameter_rules.gradient_sum,
    parameter_rules.update_gather,
    activation_rules.activation_sum,
    parameter_rules.replicated_parameter,
    activation_rules.loss_function,
)

RULES_BY_SIZE: tuple[Rule, ...] = (
    activation_rules.end_broadcast_by_size,
    parameter_rules.gradient_sum_in_stages,
    parameter_rules.gradient_sum_by_size,
    parameter_rules.padded_slice_transfer,
)
