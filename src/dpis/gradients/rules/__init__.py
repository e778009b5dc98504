"""From one call of a torch function and its output gradient to factors: pure functions."""
