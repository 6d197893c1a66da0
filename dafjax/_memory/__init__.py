"""A static model of the temporary memory that XLA:CPU needs for a program."""
