"""Opacus's name for a model that is trained on several processes, under the import that loops have it by."""

from dpis.dropin.ranks import DifferentiallyPrivateDistributedDataParallel

__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
