from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path

import pytest
import torch

from dpis.datasets import locate, named, sample
from dpis.errors import InputError


def test_the_sample_is_whole_and_typed():
    loaded = sample.load_sample()  # checks its checksum
    assert loaded.name == "fmnist-sample"
    assert loaded.train_images.shape == (10_000, 28, 28)
    assert loaded.test_images.shape == (2_000, 28, 28)
    assert loaded.train_labels.dtype == torch.int64
    assert loaded.train_labels[:5].tolist() == [9, 0, 0, 3, 0]
    assert loaded.train_labels.bincount().min() > 900
    assert "MIT" in loaded.licence


def test_it_is_small_and_its_licence_is_beside_it():
    folder = files("dpis.datasets")
    assert len(folder.joinpath(sample.FILE).read_bytes()) < 5_000_000
    assert "MIT License" in folder.joinpath("fmnist_sample.LICENCE").read_text(encoding="utf-8")


def test_it_is_the_beginning_of_the_published_data():
    source = locate.find_source("fmnist")
    folder = Path(os.environ.get("DPIS_DATA", "")) / source.folder
    if "DPIS_DATA" not in os.environ or locate.absent(folder, source):
        pytest.skip("fmnist is not in $DPIS_DATA")
    whole, part = named.load("fmnist"), sample.load_sample()
    assert torch.equal(whole.train_images[:10_000], part.train_images)
    assert torch.equal(whole.train_labels[:10_000], part.train_labels)
    assert torch.equal(whole.test_images[:2_000], part.test_images)
    assert torch.equal(whole.test_labels[:2_000], part.test_labels)


def test_tensors_can_be_written_to_and_do_not_share():
    first, second = sample.load_sample(), sample.load_sample()
    first.train_images.zero_()
    assert second.train_images.sum() > 0


@pytest.mark.parametrize(("name", "value"), [("SHA256", "0" * 64), ("FILE", "__init__.py")])
def test_a_damaged_sample_is_refused(monkeypatch, name, value):
    monkeypatch.setattr(sample, name, value)
    with pytest.raises(InputError, match="install dpis again"):
        sample.load_sample()
