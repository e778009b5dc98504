"""Descriptions of records that need no training: each record's depends on that record alone."""

from dpis.features.cache import CacheWarning, FeatureCache
from dpis.features.channels import group_normalise
from dpis.features.scattering import Scattering, scatter_features

__all__ = ["CacheWarning", "FeatureCache", "Scattering", "group_normalise", "scatter_features"]
