"""Who is looked at in a step: every record by a coin of its own, fresh every time.

A sampler draws record ``i`` with probability ``q_i = π · g_hat_i / C`` where its importance ``g_hat_i`` never
exceeds ``C``; so ``q_i <= π``, which is all that privacy asks of it. `UniformSampler` takes ``g_hat = C``
(DP-SGD), `ImportanceSampler` estimates it from the norms that were last seen (DPIS).
"""

from dpis.sampling.draw import Draw, Sampler
from dpis.sampling.importance import ImportanceSampler
from dpis.sampling.shards import Shards
from dpis.sampling.uniform import UniformSampler

__all__ = ["Draw", "ImportanceSampler", "Sampler", "Shards", "UniformSampler"]
