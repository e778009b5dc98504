"""MNIST from local files, or a sample; images of the shape of CIFAR-10, made up.

``DPIS_STUB_MNIST`` names the data set (``sample``: the one that comes with dpis); ``DPIS_STUB_RECORDS`` caps how many
records are trained on.
"""

import os

import torch
from torch.utils.data import Dataset

RECORDS = int(os.environ.get("DPIS_STUB_RECORDS", "1000000"))


class Images(Dataset):
    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels.tolist(), transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.transform(self.images[index]), self.labels[index]


class MNIST(Images):
    def __init__(self, root, train=True, download=False, transform=None):
        from dpis.data.named import load
        from dpis.data.sample import load_sample

        name = os.environ.get("DPIS_STUB_MNIST", "sample")
        data = load_sample() if name == "sample" else load(name)
        if train:
            super().__init__(
                data.train_images[:RECORDS, None], data.train_labels[:RECORDS], transform
            )
        else:
            super().__init__(data.test_images[:, None], data.test_labels, transform)


class CIFAR10(Images):
    """Ten patterns, and noise of half their strength: easy, so that a few steps show."""

    def __init__(self, root, train=True, download=False, transform=None):
        patterns = torch.rand(10, 3, 8, 8, generator=torch.Generator().manual_seed(0))
        patterns = torch.nn.functional.interpolate(patterns, size=(32, 32))
        source = torch.Generator().manual_seed(1 if train else 2)
        count = min(RECORDS, 50_000) if train else 1000
        labels = torch.randint(10, (count,), generator=source)
        noise = torch.rand(count, 3, 32, 32, generator=source)
        images = (255 * (2 * patterns[labels] + noise) / 3).byte()
        super().__init__(images, labels, transform)
