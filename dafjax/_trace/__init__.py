"""Turns a traced function into flat lists of equations. Nothing else reads a jaxpr."""
