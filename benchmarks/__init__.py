"""Measurements of dafjax against what a user would otherwise do."""
