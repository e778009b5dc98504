"""Private training inside other people's trainers: ``dpis.integrations.lightning`` and ``.huggingface``.

Neither package is required by dpis; each is imported only when its integration is used.
"""

from dpis.integrations.settings import Privacy

__all__ = ["Privacy"]
