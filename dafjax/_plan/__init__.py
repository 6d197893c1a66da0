"""Decides what a traced function stores for its backward pass, in which codes."""
