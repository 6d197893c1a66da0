"""What configurations of several models check of their fields."""

from typing import Any


def check_sizes(config: Any, *names: str) -> None:
    """Raises `ValueError` if one of these fields is below 1."""
    for name in names:
        if getattr(config, name) < 1:
            raise ValueError(
                f"`{name}` must be at least 1, but got {getattr(config, name)}."
            )


def check_transformer(config: Any) -> None:
    """Raises `ValueError` if a field that every transformer here has is invalid."""
    check_sizes(config, "num_layers", "width", "num_heads", "vocabulary", "context")
    if config.width % config.num_heads != 0:
        raise ValueError(
            f"`width` must be a multiple of `num_heads`, but got {config.width} and "
            f"{config.num_heads}."
        )
    if config.lora_rank < 0:
        raise ValueError(
            f"`lora_rank` must not be negative, but got {config.lora_rank}."
        )
