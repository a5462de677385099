"""Learning-rate schedules and optimizers, all of them optax's."""

from collections.abc import Callable

import jax
import optax

from meshtrain.sections import OptimConfig

Schedule = Callable[[jax.Array | int], jax.Array | float]  # step -> learning rate


def make_schedule(c: OptimConfig, *, steps: int) -> Schedule:
    """Returns warm-up to `learning_rate`, then a way down to `final_fraction` of it at `steps`.

    "constant" stays; "cosine" and "linear" go down from the end of the warm-up; "wsd" (warm-up,
    stable, decay; arXiv 2404.06395) stays until the last `decay_fraction` of the steps, then goes
    down linearly. The first step already has learning_rate / (warmup_steps + 1).
    """
    peak, final = c.learning_rate, c.learning_rate * c.final_fraction
    after_warmup = max(1, steps - c.warmup_steps)
    decay_steps = min(after_warmup, max(1, round(steps * c.decay_fraction)))
    main = {
        "constant": lambda: optax.constant_schedule(peak),
        "cosine": lambda: optax.cosine_decay_schedule(peak, after_warmup, alpha=c.final_fraction),
        "linear": lambda: optax.linear_schedule(peak, final, after_warmup),
        "wsd": lambda: optax.linear_schedule(
            peak, final, decay_steps, transition_begin=after_warmup - decay_steps
        ),
    }[c.schedule]()
    if not c.warmup_steps:
        return main
    warmup = optax.linear_schedule(peak / (c.warmup_steps + 1), peak, c.warmup_steps)
    return optax.join_schedules([warmup, main], [c.warmup_steps])


def adamw(
    learning_rate: Schedule,
    *,
    b1: float,
    b2: float,
    epsilon: float,
    weight_decay: float,
    no_decay: tuple,
) -> optax.GradientTransformation:
    """AdamW with decoupled weight decay (arXiv 1711.05101), off for parameters named in `no_decay`.

    A parameter's name is the last key of its path, such as "kernel", "bias" or "scale".
    """

    def decayed(params):
        return jax.tree.map_with_path(lambda path, _: path[-1].key not in no_decay, params)

    return optax.adamw(
        learning_rate, b1=b1, b2=b2, eps=epsilon, weight_decay=weight_decay, mask=decayed
    )
