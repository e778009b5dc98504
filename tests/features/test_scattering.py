from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dpis.errors import InputError
from dpis.features import Scattering, filters, group_normalise, scattering
from tests.features.kymatio_cases import RECORDED, Case, cases, noise


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_equals_kymatio(case: Case):
    transform = Scattering(case.images.shape[-2:], scales=case.scales, angles=case.angles)
    features = transform(case.images)
    with np.load(RECORDED) as recorded:
        expected = torch.from_numpy(recorded[case.name])
    assert features.shape == expected.shape == transform.output_shape(case.images.shape)
    torch.testing.assert_close(features, expected, rtol=0, atol=3e-6)  # its filters are float32


def direct(image: np.ndarray, scales: int, angles: int) -> np.ndarray:
    """Scattering by its formula: full-size circular convolutions, sampled at the end.

    Differs from the fast way where that samples early, which loses frequencies above the coarser grid's.
    """
    shape = tuple((size // 2**scales + 2) * 2**scales for size in image.shape)
    before = [(padded - size) // 2 for padded, size in zip(shape, image.shape, strict=True)]
    pad = [
        (b, padded - size - b) for b, padded, size in zip(before, shape, image.shape, strict=True)
    ]
    padded = np.pad(image, pad, mode="reflect")
    low = np.outer(*(filters.lowpass_spectrum(size, scales) for size in shape))

    def through(signal: np.ndarray, spectrum: np.ndarray) -> np.ndarray:
        return np.fft.ifft2(np.fft.fft2(signal) * spectrum)

    def averaged(signal: np.ndarray) -> np.ndarray:
        step = 2**scales
        return through(signal, low).real[step:-step:step, step:-step:step]

    def wavelets(finest: int) -> list[tuple[int, np.ndarray]]:
        return [
            (scale, filters.wavelet_spectrum(shape, scale, angle, angles))
            for scale in range(finest, scales)
            for angle in range(angles)
        ]

    first = [(scale, np.abs(through(padded, wavelet))) for scale, wavelet in wavelets(0)]
    second = [
        np.abs(through(envelope, wavelet))
        for scale, envelope in first
        for _, wavelet in wavelets(scale + 1)
    ]
    maps = [padded, *(envelope for _, envelope in first), *second]
    return np.stack([averaged(signal) for signal in maps])


def test_is_close_to_the_formula_without_early_sampling():
    image = noise(1, 1, 28, 28)
    expected = direct(image[0, 0].double().numpy(), 2, 8)
    features = Scattering()(image)[0].double().numpy()
    assert np.abs(features - expected).max() < 0.01 * expected.max()


@pytest.mark.parametrize("scale", [0, 1])
@pytest.mark.parametrize("angle", range(8))
def test_wavelet_is_the_transform_of_a_sampled_morlet(scale: int, angle: int):
    size, width = 64, 0.8 * 2**scale
    direction = (3 - angle) * math.pi / 8
    at = np.fft.fftfreq(size, 1 / size)
    y, x = np.meshgrid(at, at, indexing="ij")
    along = y * math.cos(direction) + x * math.sin(direction)
    across = x * math.cos(direction) - y * math.sin(direction)
    envelope = np.exp(-(along**2 + (across / 2) ** 2) / (2 * width**2)) / (4 * math.pi * width**2)
    wave = envelope * np.exp(1j * 3 * math.pi / 4 / 2**scale * along)
    morlet = np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope)
    ours = filters.wavelet_spectrum((size, size), scale, angle, 8) / filters.GAIN
    np.testing.assert_allclose(ours, morlet, atol=1e-6)


def test_wavelets_have_mean_zero_and_the_lowpass_gain_one():
    assert filters.wavelet_spectrum((36, 40), 1, 3, 8)[0, 0] == 0
    assert filters.lowpass_spectrum(36, 2)[0] ** 2 == pytest.approx(filters.GAIN)


def test_records_do_not_touch_each_other(monkeypatch):
    """However they are cut into chunks: what one record is described by is its own."""
    images = noise(7, 2, 28, 28)
    whole = Scattering()(images)
    monkeypatch.setattr(scattering, "CHUNK_PIXELS", 3 * 36 * 36)
    torch.testing.assert_close(Scattering()(images), whole, rtol=0, atol=1e-6)
    changed = images.clone()
    changed[3] = float("nan")
    features = Scattering()(changed)
    others = [0, 1, 2, 4, 5, 6]
    assert torch.equal(features[others], Scattering()(images)[others])
    assert features[3].isnan().all()


def test_the_filters_are_buffers_that_need_no_saving():
    transform = Scattering()
    assert transform.state_dict() == {}
    assert not list(transform.parameters())
    assert {name for name, _ in transform.named_buffers()} >= {"wavelets_0_1", "lowpass_0"}
    assert torch.nn.Sequential(transform, torch.nn.Flatten())(noise(1, 1, 28, 28)).shape == (
        1,
        3969,
    )


def test_large_images_use_one_matrix_an_axis(monkeypatch):
    images = noise(2, 1, 28, 28)
    expected = Scattering()(images)
    monkeypatch.setattr(scattering, "DENSE_ENTRIES", 0)
    torch.testing.assert_close(Scattering()(images), expected, rtol=0, atol=1e-6)


def test_gradients_reach_the_image_and_are_finite_where_maps_vanish():
    image = torch.zeros(1, 1, 28, 28)
    image[0, 0, 5:9, 5:9] = noise(4, 4)
    image.requires_grad_()
    Scattering()(image).sum().backward()
    assert image.grad is not None
    assert image.grad.isfinite().all()
    assert image.grad.abs().max() > 0


def test_gradients_are_those_of_the_fast_way():
    """With a gradient to come the modulus is taken another way; and the slope must be the true one."""
    image, direction = noise(2, 1, 1, 8, 8)
    transform = Scattering((8, 8), scales=1, angles=2)
    image.requires_grad_()
    features = transform(image)
    torch.testing.assert_close(features, transform(image.detach()), rtol=0, atol=1e-6)
    (slope,) = torch.autograd.grad(features.sum(), image)
    step = 1e-2 * direction
    rise = (transform(image.detach() + step) - transform(image.detach() - step)).sum() / 2
    torch.testing.assert_close((slope * step).sum(), rise, rtol=1e-2, atol=0)


def test_empty_batch():
    assert Scattering()(torch.empty(0, 1, 28, 28)).shape == (0, 81, 7, 7)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(2, 1, 28, 28, dtype=torch.uint8), "floating-point images"),
        (torch.zeros(2, 28, 28), "floating-point images"),
        (torch.zeros(2, 1, 32, 32), r"make another with Scattering\(\(32, 32\)\)"),
    ],
)
def test_wrong_images_are_refused(images, message):
    with pytest.raises(InputError, match=message):
        Scattering()(images)


@pytest.mark.parametrize("arguments", [{"scales": 0}, {"angles": 0}, {"shape": (28, 3)}])
def test_wrong_arguments_are_refused(arguments):
    with pytest.raises(InputError, match="scattering"):
        Scattering(**arguments)


def test_group_normalise_centres_and_scales_each_group_of_each_record():
    features = noise(3, 81, 7, 7) * torch.tensor([1.0, 5.0, 0.2])[:, None, None, None]
    normal = group_normalise(features, 27).view(3, 27, -1)
    torch.testing.assert_close(normal.mean(2), torch.zeros(3, 27), rtol=0, atol=1e-4)
    torch.testing.assert_close(
        normal[:2].var(2, correction=0), torch.ones(2, 27), rtol=0, atol=1e-3
    )
    alone = group_normalise(features[1:2], 27)
    torch.testing.assert_close(alone[0].flatten(), normal[1].flatten())


def test_groups_must_divide_the_channels():
    with pytest.raises(InputError, match="groups must divide"):
        group_normalise(noise(3, 81, 7, 7), 10)
