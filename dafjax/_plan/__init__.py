"""What is decided about a traced function: what is kept, in which codes, and why."""
