"""The numbers of an epoch, from whatever norm sum was released."""

import math

import pytest

from dpis.mechanism import Config, Method, make_plan


@pytest.mark.parametrize(("n_public", "batch_size"), [(1989, 7), (999, 21), (60_000, 512)])
@pytest.mark.parametrize("norm_sum", [-math.inf, math.nan, 0.0, math.inf])
def test_every_norm_sum_gives_terms_also_at_the_largest_rate(n_public, batch_size, norm_sum):
    """``(b·C)/(n·C)`` may be a last bit below ``b/n``."""
    config = Config(
        method=Method.DPIS_ADAPTIVE,
        epsilon=4.0,
        delta=1e-5,
        n_public=n_public,
        batch_size=batch_size,
        epochs=2,
        rate_cap=1.0,
    )
    for clip_norm in (0.1, 0.7, 1.3):
        terms = make_plan(config).privacy.terms(1, clip_norm, norm_sum, {})
        assert batch_size / n_public <= terms.sampling_rate <= 1
