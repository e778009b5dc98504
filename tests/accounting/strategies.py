"""Random events, budgets and workloads for property tests."""

from hypothesis import strategies as st

from dpis.accounting import Composition, Gaussian, PoissonGaussian

rates = st.floats(1e-4, 0.5)
multipliers = st.floats(0.5, 20.0)
gaussians = st.builds(Gaussian, noise_multiplier=multipliers)
steps = st.builds(PoissonGaussian, sampling_rate=rates, noise_multiplier=multipliers)
events = gaussians | steps
compositions = st.lists(st.tuples(events, st.integers(1, 50)), min_size=1, max_size=4).map(
    lambda runs: Composition(tuple(runs))
)
orders = st.integers(2, 200)
