"""The optimizers that the training program offers."""

import optax


def make_optimizer(
    name: str,
    *,
    learning_rate: float,
    weight_decay: float,
    schedule: str,
    steps_per_epoch: int,
    epochs: int,
) -> optax.GradientTransformation:
    """Returns an optimizer with a warm-up over the first half epoch.

    Args:
        name: `"sgd"` (Nesterov momentum 0.9) or `"adamw"`.
        learning_rate: Its value after the warm-up.
        weight_decay: Decays all parameters.
        schedule: `"cosine"` falls to zero at the last step; `"constant"` does not
            depend on `epochs`, so that such a run can be prolonged.
        steps_per_epoch: Training steps in an epoch.
        epochs: Epochs in the run.
    """
    num_warmup_steps = max(1, steps_per_epoch // 2)
    if schedule == "cosine":
        rate = optax.warmup_cosine_decay_schedule(
            init_value=0.0,
            peak_value=learning_rate,
            warmup_steps=num_warmup_steps,
            decay_steps=max(num_warmup_steps + 1, steps_per_epoch * epochs),
        )
    else:
        rate = optax.warmup_constant_schedule(
            init_value=0.0, peak_value=learning_rate, warmup_steps=num_warmup_steps
        )
    if name == "sgd":
        return optax.chain(
            optax.add_decayed_weights(weight_decay),
            optax.sgd(rate, momentum=0.9, nesterov=True),
        )
    return optax.adamw(rate, weight_decay=weight_decay)
