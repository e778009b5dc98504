"""MNIST and CIFAR-10 from local files, or what stands in for them.

``DPIS_STUB_IMAGES`` names the data set; ``sample``, the default, is for MNIST the sample that comes with dpis and for
CIFAR-10 made up. ``DPIS_STUB_RECORDS`` caps how many records are trained on.
"""

import os

import torch
from torch.utils.data import Dataset

NAME = os.environ.get("DPIS_STUB_IMAGES", "sample")
RECORDS = int(os.environ.get("DPIS_STUB_RECORDS", "1000000"))


class Images(Dataset):
    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


def split(data, train):
    if train:
        return data.train_images[:RECORDS], data.train_labels[:RECORDS]
    return data.test_images, data.test_labels


class MNIST(Images):
    def __init__(self, root, train=True, download=False, transform=None):
        from dpis.datasets.named import load
        from dpis.datasets.sample import load_sample

        images, labels = split(load_sample() if NAME == "sample" else load(NAME), train)
        super().__init__(images[:, None], labels, transform)


class CIFAR10(Images):
    def __init__(self, root, train=True, download=False, transform=None):
        from dpis.datasets.named import load

        images, labels = patterns(train) if NAME == "sample" else split(load(NAME), train)
        super().__init__(images, labels, transform)


def patterns(train):
    """Ten patterns, and noise of half their strength: easy, so that a few steps show."""
    shapes = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    shapes = torch.nn.functional.interpolate(shapes, size=(32, 32))
    source = torch.Generator().manual_seed(1 if train else 2)
    count = min(RECORDS, 50_000) if train else 1000
    labels = torch.randint(10, (count,), generator=source)
    noise = torch.rand(count, 3, 32, 32, generator=source)
    return (255 * (2 * shapes[labels] + noise) / 3).byte(), labels
