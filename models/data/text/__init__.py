"""Text to learn from: GLUE, table-to-text, and docstrings of installed packages."""
