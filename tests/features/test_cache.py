from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from dpis import stored_rows
from dpis.errors import InputError
from dpis.features import (
    CacheWarning,
    Scattering,
    group_normalise,
    scatter_features,
    scattering,
)
from dpis.stored_rows import MappedRows, StoredRows
from tests.features.kymatio_cases import noise


@pytest.fixture(autouse=True)
def no_settings(monkeypatch, tmp_path):
    monkeypatch.delenv("DPIS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def images() -> torch.Tensor:
    return (noise(6, 28, 28) * 255).to(torch.uint8)


@pytest.fixture
def computed(monkeypatch):
    """Counts how often features were computed."""
    calls = []
    compute = scattering._computed

    def counting(*arguments):
        calls.append(1)
        return compute(*arguments)

    monkeypatch.setattr(scattering, "_computed", counting)
    return calls


def only_file(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_features_are_those_of_the_module(images, tmp_path):
    features = scatter_features(images, cache_dir=tmp_path)
    torch.testing.assert_close(features, Scattering()(images[:, None] / 255), rtol=0, atol=1e-6)
    as_floats = scatter_features(images.double()[:, None] / 255, cache=False)
    torch.testing.assert_close(as_floats, features, rtol=0, atol=1e-6)
    assert features.dtype == torch.float32


def test_the_second_time_they_are_read(images, tmp_path, computed):
    first = scatter_features(images, cache_dir=tmp_path)
    second = scatter_features(images, cache_dir=tmp_path)
    assert torch.equal(first, second)
    assert len(computed) == 1
    np.testing.assert_array_equal(np.load(only_file(tmp_path)), first.numpy())  # a plain .npy


def test_writing_to_what_was_read_leaves_the_file_alone(images, tmp_path):
    first = scatter_features(images, cache_dir=tmp_path)
    scatter_features(images, cache_dir=tmp_path).zero_()
    assert torch.equal(scatter_features(images, cache_dir=tmp_path), first)


def test_other_images_and_other_parameters_are_other_features(images, tmp_path, computed):
    changed = images.clone()
    changed[3, 4, 5] ^= 1
    scatter_features(images, cache_dir=tmp_path)
    scatter_features(changed, cache_dir=tmp_path)
    scatter_features(images, cache_dir=tmp_path, angles=4)
    scatter_features(images.view(6, 14, 56), cache_dir=tmp_path)
    scatter_features(images / 255, cache_dir=tmp_path)
    assert len(computed) == 5
    assert len(list(tmp_path.iterdir())) == 5


def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def replace_by_text(path: Path) -> None:
    path.write_text("not features")


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [shorten, empty, flip_a_bit, replace_by_text])
def test_damaged_files_are_noticed_and_replaced(images, tmp_path, computed, damage):
    first = scatter_features(images, cache_dir=tmp_path).clone()
    damage(only_file(tmp_path))
    assert torch.equal(scatter_features(images, cache_dir=tmp_path), first)
    assert len(computed) == 2
    assert torch.equal(scatter_features(images, cache_dir=tmp_path), first)
    assert len(computed) == 2


def test_what_cannot_be_replaced_is_a_warning(images, tmp_path):
    first = scatter_features(images, cache_dir=tmp_path)
    replace_by_folder(only_file(tmp_path))
    with pytest.warns(CacheWarning, match="set DPIS_CACHE"):
        assert torch.equal(scatter_features(images, cache_dir=tmp_path), first)
    assert only_file(tmp_path).is_dir()  # and nothing half-written stays


def test_a_folder_that_cannot_be_made_is_a_warning(images, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(CacheWarning, match="not kept"):
        features = scatter_features(images, cache_dir=tmp_path / "file" / "cache")
    assert features.shape == (6, 81, 7, 7)


def test_a_full_disk_is_a_warning_and_leaves_nothing(images, tmp_path, monkeypatch):
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(CacheWarning, match="No space left on device"):
        scatter_features(images, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_files_and_folder_are_the_owners_alone(images, tmp_path):
    folder = tmp_path / "new"
    previous = os.umask(0)
    try:
        scatter_features(images, cache_dir=folder)
    finally:
        os.umask(previous)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == 0o600


def test_what_killed_processes_left_is_removed_after_a_day(images, tmp_path):
    old, new = tmp_path / ".unfinished-old", tmp_path / ".unfinished-new"
    for path in (old, new):
        path.write_text("")
    os.utime(old, (time.time() - 2 * 86400,) * 2)
    scatter_features(images, cache_dir=tmp_path)
    assert not old.exists()
    assert new.exists()


def test_where_the_cache_is(images, tmp_path, monkeypatch):
    scatter_features(images)
    assert only_file(tmp_path / "xdg" / "dpis" / "features").suffix == ".npy"
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path / "mine"))
    scatter_features(images)
    assert only_file(tmp_path / "mine" / "features").suffix == ".npy"


def test_without_a_cache_nothing_is_written(images, tmp_path, monkeypatch, computed):
    scatter_features(images, cache=False)
    monkeypatch.setenv("DPIS_CACHE", "off")
    scatter_features(images)
    assert len(computed) == 2
    assert list(tmp_path.iterdir()) == []


def test_progress_ends_at_the_end(tmp_path):
    seen: list[tuple[int, int]] = []
    images = torch.zeros(600, 8, 8)
    for _ in range(2):
        scatter_features(images, cache_dir=tmp_path, progress=lambda *at: seen.append(at))
    assert seen == [(256, 600), (512, 600), (600, 600), (600, 600)]


def test_threads_change_nothing_and_are_left_as_they_were():
    images = noise(600, 3, 8, 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = scatter_features(images, cache=False)
        torch.set_num_threads(3)
        assert torch.equal(scatter_features(images, cache=False), alone)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_an_interruption_ends_it():
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        scatter_features(torch.zeros(100_000, 8, 8), cache=False, progress=interrupt)
    assert torch.get_num_threads() == threads


def test_values_that_are_not_finite_are_refused(images, tmp_path):
    broken = images / 255
    broken[2, 3, 4] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        scatter_features(broken, cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "images", [torch.zeros(5, 28), torch.zeros(5, 28, 28, dtype=torch.int32)], ids=["shape", "type"]
)
def test_what_are_not_images_is_refused(images):
    with pytest.raises(InputError, match="images must be"):
        scatter_features(images, cache=False)


# ── images on disk ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def on_disk(images, tmp_path):
    np.save(tmp_path / "images.npy", images.numpy())
    array = np.load(tmp_path / "images.npy", mmap_mode="r")
    return MappedRows(tmp_path / "images.npy", array.dtype, array.shape, array.offset)


def test_features_made_in_blocks_are_the_same_file(images, on_disk, tmp_path, monkeypatch):
    """Bit by bit, and under the same name; whether images, features, both or none fit in memory."""
    monkeypatch.setattr(scattering, "BLOCK", 4)
    in_memory = scatter_features(images, cache_dir=tmp_path / "memory")
    kept = only_file(tmp_path / "memory")
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    monkeypatch.setattr(stored_rows, "MOST_ROWS", 5)
    large = scatter_features(images, cache_dir=tmp_path / "large")
    stored = scatter_features(on_disk, cache_dir=tmp_path / "stored")
    assert isinstance(stored, StoredRows)
    for folder in ("large", "stored"):
        other = only_file(tmp_path / folder)
        assert (other.name, other.read_bytes()) == (kept.name, kept.read_bytes())
        assert stat.S_IMODE(other.stat().st_mode) == 0o600
    assert torch.equal(large, in_memory)
    assert torch.equal(stored.fetch(np.array([5, 0, 3])), in_memory[[5, 0, 3]])
    normal = stored.each(lambda rows: group_normalise(rows, 27), "normalised")
    assert torch.equal(normal.fetch(np.array([4, 1])), group_normalise(in_memory, 27)[[4, 1]])


def test_features_on_disk_are_computed_once(on_disk, tmp_path, monkeypatch):
    calls = []
    blocks = scattering._computed_blocks
    monkeypatch.setattr(scattering, "_computed_blocks", lambda *a: calls.append(1) or blocks(*a))
    for _ in range(2):
        scatter_features(on_disk, cache_dir=tmp_path / "cache")
    assert len(calls) == 1
    flip_a_bit(only_file(tmp_path / "cache"))
    scatter_features(on_disk, cache_dir=tmp_path / "cache")
    assert len(calls) == 2


def test_features_that_fit_nowhere_are_an_error(on_disk, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="set DPIS_CACHE to a folder with room"):
        scatter_features(on_disk, cache_dir=tmp_path / "file" / "cache")
