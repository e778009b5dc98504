"""A tokenizer without a download: every word has a number from its checksum."""

import re
import zlib

VOCABULARY = 8000


class BertTokenizerFast:
    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def __len__(self):
        return VOCABULARY

    def __call__(self, texts, truncation, max_length, padding=None):
        rows = [self.ids(text)[:max_length] for text in texts]
        if padding == "max_length":
            rows = [row + [0] * (max_length - len(row)) for row in rows]
        return {"input_ids": rows}

    def ids(self, text):
        words = re.findall(r"\w+|[^\w\s]", text)
        return [1] + [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words]
