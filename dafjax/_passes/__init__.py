"""Passes: rewrites of a program before anything is decided about residuals."""
