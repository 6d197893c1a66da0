"""Runs a plan's two passes: orders equations, packs and decodes residuals."""
