"""Differentially private training for PyTorch with importance sampling."""

__version__ = "0.1.0"
