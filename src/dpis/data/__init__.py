"""Records from files: named datasets, arrays and tables, and how they become tensors."""
