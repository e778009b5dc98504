"""As much of the datasets library as Opacus's IMDb example uses.

With ``DPIS_STUB_TEXTS=imdb`` the reviews are read from local files; without it, sentences are made up.
"""

import os
import random

import torch
from torch.utils.data import Dataset

RECORDS = int(os.environ.get("DPIS_STUB_RECORDS", "1000000"))
GOOD = ["great", "fine", "lovely", "bright", "moving", "funny", "warm", "clever"]
BAD = ["dull", "awful", "weak", "tired", "empty", "boring", "cold", "clumsy"]
PLAIN = [f"word{i}" for i in range(200)]


def load_dataset(name, cache_dir=None):
    source = os.environ.get("DPIS_STUB_TEXTS", "sample")
    rows = invented() if source == "sample" else local(source)
    shuffled = {split: random.Random(0).sample(rows[split], len(rows[split])) for split in rows}
    return Splits({split: shuffled[split][:RECORDS] for split in shuffled})


def local(source):
    from dpis.datasets.named import load

    data = load(source)
    return {
        "train": list(zip(data.train_texts, data.train_labels.tolist(), strict=True)),
        "test": list(zip(data.test_texts, data.test_labels.tolist(), strict=True)),
    }


def invented():
    source = random.Random(1)

    def review(label):
        words = source.choices(PLAIN, k=source.randint(5, 20))
        return " ".join(words + source.choices(GOOD if label else BAD, k=6))

    return {
        split: [(review(i % 2), i % 2) for i in range(count)]
        for split, count in (("train", 2000), ("test", 500))
    }


class Splits(dict):
    def map(self, function, batched):
        return Splits(
            {
                split: Tokens(function({"text": [text for text, _ in rows]})["input_ids"], rows)
                for split, rows in self.items()
            }
        )

    def set_format(self, type, columns):
        pass


class Tokens(Dataset):
    def __init__(self, ids, rows):
        self.ids = [torch.tensor(each) for each in ids]
        self.labels = torch.tensor([label for _, label in rows])

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "label": self.labels[index]}
