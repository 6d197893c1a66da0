"""Plans for traced functions: the stored values, their codes, and the reasons."""
