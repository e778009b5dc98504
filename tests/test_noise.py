"""Noise: the right scale is accepted and its neighbours are rejected; nothing is used twice."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from dpis import noise
from dpis.errors import InputError
from dpis.noise import SHARE, add_noise, layout, on_grid
from dpis.randomness import TILE, Key
from tests.mechanism.systems import recorded_ciphers, shared_blocks

FALSE_ALARM = 1e-6  # of every statistical assertion; seeds are fixed
KEY = Key.from_seed(4)
SUMS = {
    "weight": torch.linspace(-3, 3, 12_000).reshape(100, 120),
    "bias": torch.full((5_000,), 1e4, dtype=torch.float64),
    "half": torch.ones(10, 30, 10, dtype=torch.bfloat16),
    "scalar": torch.tensor(2.0),
    "nothing": torch.zeros(0, 4),
}


SIZE = sum(value.numel() for value in SUMS.values())


def noisy_sums(std: float, step: int = 0, sums: dict[str, Tensor] = SUMS) -> dict[str, Tensor]:
    """Copies of the sums, in float64, with noise."""
    copies = {name: value.double().clone() for name, value in sums.items()}
    return add_noise(copies, std, KEY.normals("noise", step, sum(v.numel() for v in sums.values())))


def noise_of(noisy: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value - SUMS[name].double() for name, value in noisy.items()}


def accept_scale(noise: dict[str, Tensor], std: float) -> None:
    """Every parameter's noise, and all of it, has this standard deviation and mean zero."""
    for part in (*noise.values(), torch.cat([value.flatten() for value in noise.values()])):
        if part.numel() < 2:
            continue
        squares = stats.chi2(part.numel()).cdf(float((part / std).square().sum()))
        assert FALSE_ALARM / 2 < squares < 1 - FALSE_ALARM / 2
        score = float(part.sum()) / (std * math.sqrt(part.numel()))
        assert abs(score) < stats.norm.isf(FALSE_ALARM / 2)


@pytest.mark.parametrize("std", [1e-3, 1.0, 250.0])
def test_the_scale_is_accepted_and_its_neighbours_are_rejected(std: float) -> None:
    accept_scale(noise_of(noisy_sums(std)), std)
    for factor in (2 / 3, 3 / 2):
        with pytest.raises(AssertionError):
            accept_scale(noise_of(noisy_sums(factor * std)), std)


def test_noise_on_one_parameter_only_is_rejected() -> None:
    noise = noise_of(noisy_sums(1.0))
    with pytest.raises(AssertionError):
        accept_scale(noise | {"bias": torch.zeros_like(noise["bias"])}, 1.0)


def test_no_number_is_used_twice() -> None:
    zeros = {name: torch.zeros(1000) for name in "abc"}
    drawn = torch.cat([*noisy_sums(1.0, 1, zeros).values(), *noisy_sums(1.0, 2, zeros).values()])
    assert len(drawn.unique()) > 5980  # on a grid some meet by chance


def test_the_order_of_the_mapping_does_not_matter() -> None:
    forwards = noisy_sums(1.0, 3)
    backwards = noisy_sums(1.0, 3, dict(reversed(SUMS.items())))
    assert list(forwards) == list(backwards) == sorted(SUMS)
    assert all(torch.equal(forwards[name], backwards[name]) for name in SUMS)


def test_noise_is_added_in_place_whatever_the_type() -> None:
    copies = {name: value.clone() for name, value in SUMS.items()}
    exact = noisy_sums(1.0)
    for name, value in add_noise(copies, 1.0, KEY.normals("noise", 0, SIZE)).items():
        assert value.data_ptr() == copies[name].data_ptr()
        assert torch.equal(value, exact[name].to(value.dtype)), "rounded once, at the end"
        assert value.shape == SUMS[name].shape


def test_sums_whose_memory_is_in_another_order() -> None:
    """Positions go by rows, not by memory."""
    exact = noisy_sums(1.0)
    turned = {
        name: value.double().mT.contiguous().mT for name, value in SUMS.items() if value.ndim == 2
    }
    copies = {name: value.double().clone() for name, value in SUMS.items()} | turned
    assert not turned["weight"].is_contiguous()
    noisy = add_noise(copies, 1.0, KEY.normals("noise", 0, SIZE))
    assert all(torch.equal(noisy[name], exact[name]) for name in SUMS)
    same = {"x": torch.zeros(1).expand(100)}
    assert len(add_noise(same, 1.0, KEY.normals("noise", 0, 100))["x"].unique()) == 100


def test_sums_may_require_a_gradient() -> None:
    sums = {"p": torch.zeros(3, requires_grad=True)}
    assert not add_noise(sums, 1.0, KEY.normals("noise", 0, 3))["p"].requires_grad


def test_no_noise_and_no_parameters() -> None:
    without = noisy_sums(0.0)
    assert all(torch.equal(without[name], SUMS[name].double()) for name in SUMS)
    assert add_noise({}, 1.0, KEY.normals("noise", 0, 0)) == {}


@pytest.mark.parametrize("std", [-1.0, math.nan, math.inf])
def test_a_wrong_scale_is_refused(std: float) -> None:
    with pytest.raises(InputError, match="noise_std"):
        noisy_sums(std)


@pytest.mark.parametrize("count", [SIZE - 1, SIZE + 1])
def test_a_normal_for_every_entry(count: int) -> None:
    with pytest.raises(InputError, match="every entry"):
        add_noise(SUMS, 1.0, KEY.normals("noise", 0, count))


# ── slices, threads, processes ───────────────────────────────────────────────────────────────────────

LARGE = {"a": 3 * TILE + 5, "b": 7, "c": SHARE + 1, "d": 2 * SHARE - TILE}
"""Entries of sums that end inside tiles and shares, and one within a tile."""


def zeros(sizes: dict[str, int]) -> dict[str, Tensor]:
    return {name: torch.zeros(size, dtype=torch.float64) for name, size in sizes.items()}


def large_noise() -> dict[str, Tensor]:
    return add_noise(zeros(LARGE), 1.0, KEY.normals("noise", 5, sum(LARGE.values())))


def test_noise_lies_where_the_layout_says() -> None:
    normals = KEY.normals("noise", 5, sum(LARGE.values()))
    for name, value in large_noise().items():
        own = normals[layout(LARGE)[name] :][: LARGE[name]]
        assert torch.equal(value, on_grid(own, 1.0))


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_the_number_of_threads_does_not_matter(threads: int) -> None:
    expected, before = large_noise(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        noisy = large_noise()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(noisy[name], expected[name]) for name in LARGE)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice that got no noise must not pass."""

    def fails(noisy: Tensor, std: float) -> Tensor:
        if len(noisy) < TILE:
            raise RuntimeError("no memory")
        return noisy

    monkeypatch.setattr(noise, "on_grid", fails)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(RuntimeError, match="no memory"):
        large_noise()


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_every_process_makes_its_slice(ranks: int) -> None:
    """Of every parameter a share, as FSDP cuts it: together they are the noise of one process."""
    whole, begins, count = large_noise(), layout(LARGE), sum(LARGE.values())
    made: dict[str, list[Tensor]] = {name: [] for name in LARGE}
    for rank in range(ranks):
        own = {name: torch.arange(size).tensor_split(ranks)[rank] for name, size in LARGE.items()}
        first = {name: begins[name] + int(at[0]) for name, at in own.items() if len(at)}
        sums = zeros({name: len(own[name]) for name in first})
        for name, value in add_noise(sums, 1.0, KEY.normals("noise", 5, count), first).items():
            made[name].append(value)
    assert all(torch.equal(torch.cat(made[name]), whole[name]) for name in LARGE)


def no_position_twice() -> None:
    with recorded_ciphers() as opened:
        large_noise()
    assert sum(one.read for one in opened) >= 8 * sum(LARGE.values())
    assert not shared_blocks(opened)


@pytest.mark.parametrize("threads", [1, 4])
def test_no_two_entries_share_a_counter(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    no_position_twice()
    monkeypatch.setattr(noise, "SHARE", TILE + 1)  # shares that end within a tile
    with pytest.raises(AssertionError):
        no_position_twice()


def test_sums_that_overlap_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    normals = KEY.normals("noise", 0, 100)
    with pytest.raises(InputError, match="overlap"):
        add_noise(zeros({"a": 10, "b": 10}), 1.0, normals, {"a": 0, "b": 9})
    monkeypatch.setattr(noise, "layout", lambda sizes: dict.fromkeys(sizes, 0))
    with pytest.raises(InputError, match="overlap"):
        large_noise()


@pytest.mark.parametrize("noise_std", [1e-9, 0.3, 15.0, 1e12])
def test_released_numbers_lie_on_a_public_grid(noise_std: float) -> None:
    sums, normals = zeros({"x": 1000}), KEY.normals("grid", 0, 1000)
    released = add_noise(sums, noise_std, normals)["x"]
    grid = 2.0 ** (math.floor(math.log2(noise_std)) - 20)
    assert torch.equal(released, torch.round(released / grid) * grid)
    assert 0 < (released - noise_std * normals[:]).abs().max() <= grid / 2
    assert torch.equal(on_grid(normals[:], 0.0), normals[:])
