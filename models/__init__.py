"""Plain Flax models and the program that trains them by several methods."""
