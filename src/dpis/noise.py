"""Gaussian noise for sums of gradients."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise

import torch
from torch import Tensor

from dpis.errors import InputError
from dpis.randomness import TILE, Normals

GRID_BITS = 20

SHARE = 16 * TILE
"""So much of the noise is made by one thread in a row."""


def on_grid(noisy: Tensor, noise_std: float) -> Tensor:
    """Noisy values rounded to a public grid, about a millionth of their noise's standard deviation apart.

    What is released would otherwise show its last bits, all of them in float64, those of small numbers in any type,
    and with them which noises were possible (see `dpis.randomness`). Rounding is post-processing: free.

    Args:
        noisy: in float64; changed in place.
        noise_std: of the noise in it; 0: nothing is hidden, and nothing is rounded.
    """
    if noise_std == 0:
        return noisy
    exponent = math.floor(math.log2(noise_std)) - GRID_BITS  # so that scaling is exact
    return noisy.mul_(2.0**-exponent).round_().mul_(2.0**exponent)


def layout(sizes: Mapping[str, int]) -> dict[str, int]:
    """Where each tensor begins in the vector of a step's noise: one behind the other, in the order of their names.

    It depends on public names and sizes alone, so every process of a group knows it.

    Args:
        sizes: how many entries each has.
    """
    names = sorted(sizes)
    begins = accumulate((sizes[name] for name in names), initial=0)
    return dict(zip(names, begins, strict=False))


def add_noise(
    sums: Mapping[str, Tensor],
    noise_std: float,
    normals: Normals,
    begins: Mapping[str, int] | None = None,
) -> dict[str, Tensor]:
    """``sums + noise_std · Normal(0, I)`` on a public grid (`on_grid`), added in place.

    The noise of an entry is a function of its position in `normals`. It depends neither on threads nor on where sums
    are cut. It is made and added in float64 on the CPU, a tile at a time on as many threads as torch uses, so there
    are never more than a few tiles beside the sums. Sums elsewhere are copied to the CPU and back. What is done with
    the result is post-processing.

    Args:
        sums: tensors by name, of any floating type; overwritten, and rounded to their type last of all.
        noise_std: standard deviation of every entry's noise, in the units of the sums.
        normals: serve this call alone; the same for two sums reveal their difference.
        begins: where in them the entries of each sum begin, in the order of rows; by default these are all sums there
            are, and `layout` says it. Else they are slices that do not overlap.

    Returns:
        The sums, sorted by name. One whose memory is not in the order of its rows is a copy.

    Example:
        >>> import torch
        >>> from dpis.randomness import Key
        >>> noisy = add_noise({"weight": torch.zeros(2, 3)}, 1.5, Key.fresh().normals("noise", step=0, count=6))
        >>> noisy["weight"].shape
        torch.Size([2, 3])
    """
    if not (math.isfinite(noise_std) and noise_std >= 0):
        raise InputError(f"noise_std must be a finite number >= 0, found {noise_std!r}")
    sizes = {name: value.numel() for name, value in sums.items()}
    if begins is None and sum(sizes.values()) != len(normals):
        raise InputError(
            f"a normal for every entry is required: {sum(sizes.values())} entries, {len(normals)} normals. "
            "Nothing was released"
        )
    begins = layout(sizes) if begins is None else begins
    noisy = {name: sums[name].detach().contiguous() for name in sorted(sums)}
    if noise_std == 0:
        return noisy
    here = {name: value.cpu() for name, value in noisy.items()}  # itself, if it is there
    _add([_Part(begins[name], value.view(-1)) for name, value in here.items()], noise_std, normals)
    for name, value in noisy.items():
        if value is not here[name]:
            value.copy_(here[name])
    return noisy


@dataclass(frozen=True, eq=False)
class _Part:
    """Entries of a sum, and the position of the first of them."""

    begin: int
    entries: Tensor

    def cut(self) -> Iterator[_Part]:
        """Where tiles of normals end."""
        if self.begin % TILE + len(self.entries) <= TILE:  # most have no more
            return iter([self] if len(self.entries) else [])
        sizes = [min(len(self.entries), -self.begin % TILE)]
        rest = len(self.entries) - sizes[0]
        sizes += [TILE] * (rest // TILE) + [rest % TILE]
        begins = accumulate(sizes, initial=self.begin)
        cut = zip(begins, torch.split(self.entries, sizes), strict=False)
        return (_Part(begin, entries) for begin, entries in cut if len(entries))


def _add(parts: Sequence[_Part], noise_std: float, normals: Normals) -> None:
    """Entries that share a tile are one thread's, and it makes that tile once."""
    in_order = sorted((cut for part in parts for cut in part.cut()), key=lambda part: part.begin)
    for before, after in pairwise(in_order):
        if before.begin + len(before.entries) > after.begin:
            raise InputError(
                "sums overlap in the noise of their step: entries with the same noise show their difference. "
                "Nothing was released"
            )
    shares = [list(own) for _, own in groupby(in_order, lambda part: part.begin // SHARE)]
    threads = min(torch.get_num_threads(), len(shares))
    if threads < 2:
        for own in shares:
            _add_tiles(own, noise_std, normals)
        return
    with _one_thread_an_operation(), ThreadPoolExecutor(threads) as pool:
        deque(pool.map(lambda own: _add_tiles(own, noise_std, normals), shares), maxlen=0)


def _add_tiles(parts: Sequence[_Part], noise_std: float, normals: Normals) -> None:
    first, last = parts[0].begin // TILE, parts[-1].begin // TILE
    parts_of = {n: list(own) for n, own in groupby(parts, lambda part: part.begin // TILE)}
    for number, tile in enumerate(normals.tiles(first, last + 1), first):
        tile.mul_(noise_std)
        begin = number * TILE
        own = [
            (tile[part.begin - begin :][: len(part.entries)], part.entries)
            for part in parts_of.get(number, ())
        ]
        for noisy, entries in own:
            noisy.add_(entries)
        on_grid(tile, noise_std)
        for noisy, entries in own:
            entries.copy_(noisy)


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """For threads that begin in here: torch would start as many again in each of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
