"""Decisions about a traced function: which values are stored, in which codes, why."""
