"""A traced function as flat lists of equations. Nothing else looks inside a jaxpr."""
