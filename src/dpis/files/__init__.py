"""The files of a user: tables and arrays, what was declared of them, how they become tensors."""
