"""As much of the datasets library as Opacus's IMDb example uses.

Reviews come from the jsonl.gz file that ``DPIS_STUB_IMDB`` names; without it, sentences are made up.
"""

import gzip
import json
import os
import random

import torch
from torch.utils.data import Dataset

RECORDS = int(os.environ.get("DPIS_STUB_RECORDS", "1000000"))
GOOD = ["great", "fine", "lovely", "bright", "moving", "funny", "warm", "clever"]
BAD = ["dull", "awful", "weak", "tired", "empty", "boring", "cold", "clumsy"]
PLAIN = [f"word{i}" for i in range(200)]


def load_dataset(name, cache_dir=None):
    path = os.environ.get("DPIS_STUB_IMDB")
    rows = read(path) if path else invented()
    shuffled = {split: random.Random(0).sample(rows[split], len(rows[split])) for split in rows}
    return Splits({split: shuffled[split][:RECORDS] for split in shuffled})


def read(path):
    rows = {"train": [], "test": []}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            row = json.loads(line)
            rows[row["split"]].append((row["text"], row["label"]))
    return rows


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
