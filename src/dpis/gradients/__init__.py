"""Gradient norms of single records and weighted sums of their gradients."""
