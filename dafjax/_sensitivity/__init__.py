"""How much the rounding of each residual disturbs the gradient."""
