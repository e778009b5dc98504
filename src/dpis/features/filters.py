r"""The filters of the scattering transform, as the Fourier transforms they are used by.

A *Morlet wavelet* is a plane wave under a Gaussian envelope, less a multiple of the envelope that
makes its mean zero; the *low-pass* filter is a Gaussian. A Gaussian envelope of covariance
:math:`\Sigma` has the Fourier transform :math:`g(\omega) = \exp(-\omega^\top \Sigma \omega / 2)`, and
a wave of frequency :math:`\xi` shifts it, so

.. math:: \hat\psi(\omega) = g(\omega - \xi) - K g(\omega),\qquad \hat\psi(0) = 0.

Sampling a filter on the pixel grid repeats its spectrum with period :math:`2\pi` in both directions
(Poisson's formula), which here is a sum over a few shifts. Making it periodic over an image of
``height × width`` samples that spectrum at :math:`2\pi k / \text{size}`. All spectra are real.

Reference: Bruna and Mallat, Invariant Scattering Convolution Networks, PAMI 2013.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

BASE_WIDTH = 0.8
"""Standard deviation, in pixels, of the finest wavelet's envelope along its wave."""
BASE_FREQUENCY = 3 * math.pi / 4
"""Of the finest wavelet's wave, in radians a pixel. Each scale halves it and doubles the width."""
GAIN = math.pi / 3.1415
"""Of every filter, for each pass. Exactly 1 by the formulae; kymatio, whose features people compare
with, writes π as 3.1415 in the filters' norm, and agreement to 1e-5 needs its 0.003 %."""
REPEATS = 2
"""Shifts by 2π summed to either side. The widest spectrum is below 1e-30 beyond them."""


def wavelet_spectrum(shape: tuple[int, int], scale: int, angle: int, angles: int) -> Array:
    """The Morlet wavelet of one scale and one direction on a periodic grid of ``shape``.

    The ``angles`` directions share out half a turn: a wave and its opposite have the same modulus.
    They are numbered downwards, ``angle`` 0 being the greatest. The envelope is ``angles / 4`` times
    as long across the wave as along it: the more directions, the finer each must tell them apart.
    """
    width = BASE_WIDTH * 2**scale
    direction = (int(angles / 2 - 1) - angle) * math.pi / angles
    along = np.array([math.cos(direction), math.sin(direction)])
    across = np.array([-along[1], along[0]])
    covariance = width**2 * (np.outer(along, along) + (angles / 4) ** 2 * np.outer(across, across))
    wave = BASE_FREQUENCY / 2**scale * along
    shifted = _gaussian_spectrum(shape, covariance, wave)
    centred = _gaussian_spectrum(shape, covariance, np.zeros(2))
    mean_zero: Array = shifted - shifted[0, 0] / centred[0, 0] * centred
    return GAIN * mean_zero


def lowpass_spectrum(size: int, scales: int) -> Array:
    """The Gaussian window that averages over ``2**scales`` pixels, along one axis of ``size``.

    In two dimensions it is the product of the axes' windows.
    """
    width = BASE_WIDTH * 2 ** (scales - 1)
    frequencies = 2 * math.pi * np.fft.fftfreq(size)
    shifts = 2 * math.pi * np.arange(-REPEATS, REPEATS + 1)
    spectrum: Array = np.exp(-0.5 * (width * (frequencies[:, None] + shifts)) ** 2).sum(axis=1)
    return math.sqrt(GAIN) * spectrum


def kept_frequencies(size: int, step: int) -> npt.NDArray[np.int64]:
    """Where the low frequencies stand that a grid of every ``step``-th sample can tell apart."""
    return np.fft.fftfreq(size // step, 1 / (size // step)).astype(np.int64) % size


def _gaussian_spectrum(shape: tuple[int, int], covariance: Array, centre: Array) -> Array:
    """Σ over shifts of exp(−½ (ω − centre)ᵀ covariance (ω − centre)), ω over the grid of ``shape``."""
    down, right = (2 * math.pi * np.fft.fftfreq(size) for size in shape)
    total = np.zeros(shape)
    shifts = 2 * math.pi * np.arange(-REPEATS, REPEATS + 1)
    for shift_down in shifts:
        for shift_right in shifts:
            u = (down + shift_down - centre[0])[:, None]
            v = (right + shift_right - centre[1])[None, :]
            quadratic = covariance[0, 0] * u * u + 2 * covariance[0, 1] * u * v
            total += np.exp(-0.5 * (quadratic + covariance[1, 1] * v * v))
    return total
