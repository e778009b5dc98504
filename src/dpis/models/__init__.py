"""Models by name, and the networks of the paper."""
