r"""Scattering: a fixed, wavelet-based description of an image, for small private models to learn on.

Nothing in it is learned, and every record is described by itself alone, so it costs no privacy. How it is
computed, and why so: docs/design/0004-features-and-data.md.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from os import PathLike
from typing import overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from dpis.errors import InputError
from dpis.features.cache import CacheWarning, FeatureCache
from dpis.features.filters import Array, kept_frequencies, lowpass_spectrum, wavelet_spectrum
from dpis.private_files import PassingFolder
from dpis.stored_rows import Column, StoredRows, fits_in_memory

FORMAT = "dpis scattering 1"
"""Part of the cache's key. Raise the number whenever features change in value or order."""

SCATTER_CHANNELS = 81
"""For each channel of an image, with two scales and eight angles."""

CHUNK_PIXELS = 20 << 10
"""Padded pixels transformed at once on a CPU: few enough for the intermediate maps (100 times as many
numbers) to stay in its caches, and in memory that is used again. Other devices take 64 times as many."""

DENSE_ENTRIES = 1 << 18
"""A low-pass filter up to this size is one matrix over both axes, beyond it one matrix an axis."""

BLOCK = 256
"""Images that a thread takes at once in :func:`scatter_features`."""

Progress = Callable[[int, int], None]


class Scattering(nn.Module):
    r"""Scattering coefficients of order 0, 1 and 2 of a batch of images.

    With wavelets :math:`\psi_\lambda`, λ = (scale, angle), and a low-pass :math:`\phi` that is
    sampled every ``2**scales`` pixels, each channel :math:`x` becomes

    .. math::
        x * \phi, \qquad |x * \psi_\lambda| * \phi, \qquad
        \bigl||x * \psi_\lambda| * \psi_\mu\bigr| * \phi \quad (\text{scale}(\mu) > \text{scale}(\lambda)),

    in this order, scales before angles, λ before μ: the values and the order of kymatio's
    ``Scattering2D``. Images are continued by reflection at their edges. Not trainable; the filters are
    buffers, computed from the arguments and therefore not part of ``state_dict``.

    Args:
        shape: Height and width of the images.
        scales: J; details up to about ``2**scales`` pixels are described.
        angles: L, directions of the wavelets.

    Example:
        >>> Scattering((28, 28))(torch.zeros(5, 1, 28, 28)).shape
        torch.Size([5, 81, 7, 7])

    Reference: Bruna and Mallat, Invariant Scattering Convolution Networks, PAMI 2013.
    """

    def __init__(
        self, shape: tuple[int, int] = (28, 28), *, scales: int = 2, angles: int = 8
    ) -> None:
        super().__init__()
        if scales < 1 or angles < 1:
            raise InputError(
                f"scattering needs scales >= 1 and angles >= 1, not {scales}, {angles}"
            )
        if min(shape) < 2**scales:
            raise InputError(
                f"scattering over {scales} scales needs images of at least {2**scales} x {2**scales} pixels,"
                f" not {shape[0]} x {shape[1]}: take fewer scales or larger images"
            )
        self.shape, self.scales, self.angles = (int(shape[0]), int(shape[1])), scales, angles
        self.padded = _padded_size(shape[0], scales), _padded_size(shape[1], scales)
        for axis, size in enumerate(shape):
            source = torch.from_numpy(_reflection(size, self.padded[axis]))
            self.register_buffer(f"source_{axis}", source, persistent=False)
        for level in range(scales):
            self._add_lowpass(level)
            for scale in range(level if level == 0 else level + 1, scales):
                self._add_wavelets(level, scale)

    @property
    def coefficients(self) -> int:
        """Channels of the output for each channel of the image: 81 with 2 scales and 8 angles."""
        first = self.angles * self.scales
        second = self.angles**2 * self.scales * (self.scales - 1) // 2
        return 1 + first + second

    def output_shape(self, input_shape: Sequence[int]) -> tuple[int, ...]:
        """The shape of the features of images of ``input_shape``, ``[..., channels, H, W]``."""
        *batch, channels, height, width = input_shape
        self._check_size(height, width)
        step = 2**self.scales
        return (*batch, channels * self.coefficients, height // step, width // step)

    def forward(self, images: Tensor) -> Tensor:
        """Features ``[records, channels·81, H/4, W/4]`` of float images ``[records, channels, H, W]``."""
        if images.ndim != 4 or not images.is_floating_point():
            raise InputError(
                f"scattering takes floating-point images [records, channels, height, width],"
                f" not {images.dtype} of shape {list(images.shape)}"
            )
        shape = self.output_shape(images.shape)
        features = torch.empty(shape, dtype=torch.float32, device=images.device)
        self.write(images, features)
        return features

    def write(self, images: Tensor, features: Tensor) -> None:
        """Write the features of ``images`` to ``features``, float32 and contiguous."""
        planes = images.reshape(-1, *self.shape).float()
        step = 2**self.scales
        maps = features.view(-1, self.coefficients, *(size // step for size in self.shape))
        chunk = max(1, CHUNK_PIXELS // (self.padded[0] * self.padded[1]))
        if images.device.type != "cpu":
            chunk *= 64
        for start in range(0, len(planes), chunk):
            self._transform(planes[start : start + chunk], maps[start : start + chunk])

    def extra_repr(self) -> str:
        """What the module prints of itself."""
        return f"{self.shape}, scales={self.scales}, angles={self.angles}"

    def _transform(self, planes: Tensor, features: Tensor) -> None:
        """Write the features of ``planes [n, H, W]`` to ``features [n, coefficients, H/4, W/4]``."""
        padded = planes[:, self.source_0][:, :, self.source_1]  # type: ignore[index]
        features[:, :1] = self._averaged(padded[:, None], level=0)
        first, second = 1, 1 + self.scales * self.angles
        spectrum = torch.fft.fft2(padded)[:, None]
        for scale in range(self.scales):
            envelope = self._envelope(spectrum, 0, scale)[:, 0]  # [n, angles, h, w]
            features[:, first : first + self.angles] = self._averaged(envelope, scale)
            first += self.angles
            if scale == self.scales - 1:
                break
            inner_spectrum = torch.fft.fft2(envelope)
            inner = [
                self._averaged(self._envelope(inner_spectrum, scale, coarser), coarser)
                for coarser in range(scale + 1, self.scales)
            ]  # for each coarser scale [n, angles, angles, h, w]: the order is λ, then μ
            block = torch.cat(inner, dim=2).flatten(1, 2)
            features[:, second : second + block.shape[1]] = block
            second += block.shape[1]

    def _envelope(self, spectrum: Tensor, level: int, scale: int) -> Tensor:
        """``|x ∗ ψ|`` for all angles ψ of ``scale``, sampled every ``2**scale`` pixels.

        Taking every k-th sample of a signal folds its spectrum: k·k frequencies, which the coarser
        grid cannot tell apart, are averaged. Product and average are one multiply-add for each of them.

        Args:
            spectrum: Of x, sampled every ``2**level`` pixels: ``[n, m, h, w]``, complex.
            level: Of the sampling of x.
            scale: Of the wavelets.

        Returns:
            ``[n, m, angles, h / k, w / k]``, k = 2**(scale − level).
        """
        wavelets = self.get_buffer(f"wavelets_{level}_{scale}")
        k = len(wavelets)
        n, m, h, w = spectrum.shape
        parts = torch.view_as_real(spectrum).view(n, m, k, h // k, k, w // k, 2)
        aliases = parts.permute(2, 4, 0, 1, 3, 5, 6).unsqueeze(4).contiguous()
        folded = aliases[0, 0] * wavelets[0, 0]
        for alias in range(1, k * k):
            folded.addcmul_(aliases[alias // k, alias % k], wavelets[alias // k, alias % k])
        return _modulus(torch.fft.ifft2(torch.view_as_complex(folded)))

    def _averaged(self, maps: Tensor, level: int) -> Tensor:
        """Maps ``[..., h, w]`` at ``level``, smoothed, sampled every ``2**scales`` pixels, edges cut."""
        height, width = (size // 2**self.scales for size in self.shape)
        lead = maps.shape[:-2]
        if hasattr(self, f"lowpass_{level}"):
            both: Tensor = maps.flatten(-2).flatten(0, -2) @ self.get_buffer(f"lowpass_{level}")
            return both.view(*lead, height, width)
        down, right = (self.get_buffer(f"lowpass_{level}_{axis}") for axis in (0, 1))
        return down.T @ (maps @ right)

    def _add_wavelets(self, level: int, scale: int) -> None:
        """``[k, k, angles, h, w, 2]``: aliases first, and each value twice: for re and im."""
        step, k = 2**level, 2 ** (scale - level)
        rows, columns = (kept_frequencies(size, step) for size in self.padded)
        spectra = np.stack(
            [wavelet_spectrum(self.padded, scale, a, self.angles) for a in range(self.angles)]
        )[:, rows][:, :, columns]
        h, w = len(rows) // k, len(columns) // k
        aliases = spectra.reshape(self.angles, k, h, k, w).transpose(1, 3, 0, 2, 4) / k**2
        buffer = torch.from_numpy(np.repeat(aliases[..., None], 2, axis=-1)).float()
        self.register_buffer(f"wavelets_{level}_{scale}", buffer, persistent=False)

    def _add_lowpass(self, level: int) -> None:
        """The matrix that smooths and samples, over both axes if it is small, else one an axis."""
        down, right = (
            _lowpass_matrix(size, padded, level, self.scales)
            for size, padded in zip(self.shape, self.padded, strict=True)
        )
        if down.size * right.size <= DENSE_ENTRIES:
            both = torch.from_numpy(np.kron(down, right)).float()
            self.register_buffer(f"lowpass_{level}", both, persistent=False)
            return
        for axis, matrix in enumerate((down, right)):
            buffer = torch.from_numpy(matrix).float()
            self.register_buffer(f"lowpass_{level}_{axis}", buffer, persistent=False)

    def _check_size(self, height: int, width: int) -> None:
        if (height, width) != self.shape:
            raise InputError(
                f"this scattering was made for images of {self.shape[0]} x {self.shape[1]} pixels, found"
                f" {height} x {width}: make another with Scattering(({height}, {width}))"
            )


@overload
def scatter_features(
    images: Tensor,
    *,
    cache_dir: str | PathLike[str] | None = ...,
    cache: bool = ...,
    progress: Progress | None = ...,
    scales: int = ...,
    angles: int = ...,
) -> Tensor: ...
@overload
def scatter_features(
    images: Column,
    *,
    cache_dir: str | PathLike[str] | None = ...,
    cache: bool = ...,
    progress: Progress | None = ...,
    scales: int = ...,
    angles: int = ...,
) -> Column: ...
def scatter_features(
    images: Column,
    *,
    cache_dir: str | PathLike[str] | None = None,
    cache: bool = True,
    progress: Progress | None = None,
    scales: int = 2,
    angles: int = 8,
) -> Column:
    """Scattering features of a set of images, computed once and kept on disk.

    Features lie in the cache under a hash of the images and the parameters. They are as private as
    the images: the file can be read by its owner alone. A damaged file is noticed and replaced; a
    cache that cannot be written costs a warning and nothing else.

    Args:
        images: ``[N, H, W]`` or ``[N, C, H, W]``; uint8 from 0 to 255, or floating point, by custom from
            0 to 1 (used as it is). Computed on the device they are on. Of images on disk features stay on disk.
        cache_dir: The cache's folder; by default ``$DPIS_CACHE/features`` or
            ``$XDG_CACHE_HOME/dpis/features`` (``~/.cache/dpis/features``).
        cache: False keeps nothing on disk and reads nothing. ``DPIS_CACHE=off`` does the same.
        progress: Called now and then with the images done and the images in all.
        scales: Of :class:`Scattering`.
        angles: Of :class:`Scattering`.

    Returns:
        float32 ``[N, C·81, H/4, W/4]`` on the device of ``images``. From a cache on a CPU it is mapped
        from the file: memory is used as it is read, and writing to it leaves the file alone.
    """
    if isinstance(images, StoredRows):
        return _stored_features(images, cache_dir, cache, progress, scales, angles)
    _check_images(images)
    if images.ndim == 3:
        images = images[:, None]
    scattering = Scattering((images.shape[2], images.shape[3]), scales=scales, angles=angles)
    scattering.to(images.device)
    store = FeatureCache.open(cache_dir) if cache else None
    if store is None:
        return _computed(scattering, images, progress)
    key = store.key(f"{FORMAT} scales={scales} angles={angles}", images)
    shape = scattering.output_shape(images.shape)
    features = store.load(key, shape)
    if features is not None:
        if progress is not None:
            progress(len(images), len(images))
    elif fits_in_memory(4 * math.prod(shape)):
        features = _computed(scattering, images, progress)
        store.save(key, features)
    else:
        store.write(key, shape, _computed_blocks(scattering, images, progress))
        features = store.load(key, shape)
        if features is None:  # it could not be kept, and a warning said so
            features = _computed(scattering, images, progress)
    return features.to(images.device)


def _stored_features(
    images: StoredRows,
    cache_dir: str | PathLike[str] | None,
    cache: bool,
    progress: Progress | None,
    scales: int,
    angles: int,
) -> StoredRows:
    """Of images on disk, on disk: neither is ever whole in memory."""
    example = images.example()
    _check_images(example)
    if images.ndim == 3:
        images = images.each(lambda rows: rows[:, None], "one channel")
    scattering = Scattering((images.shape[2], images.shape[3]), scales=scales, angles=angles)
    store, passing = FeatureCache.open(cache_dir) if cache else None, None
    if store is None:
        passing = PassingFolder()
        store = FeatureCache(passing.path)
    key = store.key(f"{FORMAT} scales={scales} angles={angles}", images)
    shape = scattering.output_shape(images.shape)
    features = store.stored(key, shape, passing)
    if features is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheWarning)  # it is an error here
            store.write(key, shape, _computed_blocks(scattering, images, progress))
        features = store.stored(key, shape, passing)
    elif progress is not None:
        progress(len(images), len(images))
    if features is None:
        raise InputError(
            f"features do not fit in memory, and cannot be kept in {store.folder}: set DPIS_CACHE to a folder with "
            f"room for {4 * math.prod(shape) / 2**30:,.1f} GiB"
        )
    return features


def _computed(scattering: Scattering, images: Tensor, progress: Progress | None) -> Tensor:
    """Of all images, in memory."""
    features = torch.empty(
        scattering.output_shape(images.shape), dtype=torch.float32, device=images.device
    )
    start = 0
    for block in _computed_blocks(scattering, images, progress):
        features[start : start + len(block)] = block
        start += len(block)
    return features


def _computed_blocks(
    scattering: Scattering, images: Column, progress: Progress | None
) -> Iterator[Tensor]:
    """Features of all images in their order, block by block; on a CPU each thread takes blocks of its own.

    Threads that share every operation would wait for each other after each, thousands of times a
    second, which on a busy machine was 4 to 10 times slower. One thread a block also
    makes the features the same to the last bit for any number of threads.
    """

    @torch.no_grad()
    def compute(start: int) -> Tensor:
        places = np.arange(start, min(start + BLOCK, len(images)))
        block = (
            images.fetch(places)
            if isinstance(images, StoredRows)
            else images[start : start + BLOCK]
        )
        if isinstance(images, StoredRows):
            _check_images(block)
        block = block.float() / 255 if block.dtype == torch.uint8 else block.float()
        return scattering(block)  # type: ignore[no-any-return]

    on_cpu = isinstance(images, StoredRows) or images.device.type == "cpu"
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(
        threads if on_cpu else 1,
        thread_name_prefix="dpis-scattering",
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    starts, done = iter(range(0, len(images), BLOCK)), 0
    ahead = deque(workers.submit(compute, start) for start in islice(starts, 2 * threads))
    try:
        while ahead:
            block = ahead.popleft().result()
            ahead.extend(workers.submit(compute, start) for start in islice(starts, 1))
            yield block
            done += len(block)
            if progress is not None:
                progress(done, len(images))
    finally:  # also after Ctrl-C: what has not begun is left
        workers.shutdown(cancel_futures=True)
        torch.set_num_threads(threads)  # a part of this setting belongs to the whole process


def _check_images(images: Tensor) -> None:
    if images.ndim not in (3, 4) or not (images.is_floating_point() or images.dtype == torch.uint8):
        raise InputError(
            "images must be uint8 (0 to 255) or floating point (0 to 1), [N, H, W] or [N, C, H, W];"
            f" found {images.dtype} of shape {list(images.shape)}"
        )
    if images.is_floating_point() and not bool(torch.isfinite(images).all()):
        raise InputError("images hold values that are not finite: replace NaN and infinity first")


def _modulus(values: Tensor) -> Tensor:
    """``|values|``: on parts laid side by side, which is three times as fast as torch.abs."""
    if values.requires_grad:
        return values.abs()  # whose gradient at 0 is 0; that of the way below is NaN
    squares = torch.view_as_real(values).square_()
    return (squares[..., 0] + squares[..., 1]).sqrt_()


def _padded_size(size: int, scales: int) -> int:
    """A multiple of ``2**scales`` with room for one more sample of the output on either side."""
    step: int = 2**scales
    return (size // step + 2) * step


def _reflection(size: int, padded: int) -> npt.NDArray[np.int64]:
    """For every padded position the pixel that stands there: mirrored at the first and last one."""
    period = max(1, 2 * (size - 1))
    distance = (np.arange(padded) - (padded - size) // 2) % period
    mirrored: npt.NDArray[np.int64] = np.minimum(distance, period - distance)
    return mirrored


def _lowpass_matrix(size: int, padded: int, level: int, scales: int) -> Array:
    """``[samples at level, size // 2**scales]``: smooth one axis, keep every sample but the edges'."""
    spectrum = lowpass_spectrum(padded, scales)[kept_frequencies(padded, 2**level)]
    kernel = np.fft.ifft(spectrum).real
    samples = np.arange(len(kernel))
    kept = (1 + np.arange(size // 2**scales)) * 2 ** (scales - level)
    matrix: Array = kernel[(kept[None, :] - samples[:, None]) % len(kernel)]
    return matrix
