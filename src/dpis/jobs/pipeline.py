"""From a file's records to what a model takes, for training and for predicting alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpis.data.preprocessing import (
    ArrayPreprocessing,
    Preprocessing,
    TablePreprocessing,
    preprocessing_from_json,
)
from dpis.features import group_normalise, scatter_features
from dpis.features.standalone import scattering_source

GROUPS = 27
"""Of normalised scatter features: every group is three of the 81 channels of a grey image."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Preprocessing that looks at one record at a time, so it costs no privacy.

    Attributes:
        preprocessing: from a file's records to float features.
        scattered: describe images by normalised scatter features.
    """

    preprocessing: Preprocessing
    scattered: bool

    def inputs(self, features: Tensor, progress: Progress | None = None) -> Tensor:
        """What the model takes, from what `preprocessing` made."""
        if features.ndim == 3:
            features = features[:, None]  # grey images have one channel
        if not self.scattered:
            return features
        return group_normalise(scatter_features(features, progress=progress), GROUPS)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"records": self.preprocessing.to_json(), "scattered": self.scattered}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Pipeline:
        """The inverse of `to_json`."""
        return cls(preprocessing_from_json(data["records"]), bool(data["scattered"]))

    def source(self) -> str:
        """Python that defines ``preprocess``, given torch and nn alone."""
        if isinstance(self.preprocessing, TablePreprocessing):
            return _TABLE_SOURCE.format(columns=json.dumps(self.preprocessing.to_json()["columns"]))
        return self._array_source(self.preprocessing)

    def _array_source(self, arrays: ArrayPreprocessing) -> str:
        shape = list(arrays.record_shape)
        lines = ["    inputs = torch.as_tensor(records).float()" + " / 255" * arrays.divide_by_255]
        if len(shape) == 2:
            lines.append("    inputs = inputs[:, None]  # one channel")
        if self.scattered:
            lines.append(f"    inputs = Scattering(({shape[-2]}, {shape[-1]}))(inputs)")
            lines.append(f"    inputs = nn.functional.group_norm(inputs, {GROUPS})")
        kind = "uint8" if arrays.divide_by_255 else "float"
        doc = f'    """{kind} records of shape {shape}, as the network takes them."""'
        function = "\n".join(
            ["@torch.no_grad()\ndef preprocess(records):", doc, *lines, "    return inputs"]
        )
        return (scattering_source() if self.scattered else "") + "\n\n" + function + "\n"


_TABLE_SOURCE = '''
import json
import math

COLUMNS = json.loads(r"""{columns}""")


def preprocess(rows):
    """Rows as dictionaries from column to text or number, as the network takes them."""
    values = [[features(column, row.get(column["name"], "")) for column in COLUMNS] for row in rows]
    return torch.tensor([sum(row, []) for row in values])


def features(column, value):
    """A number scaled to [-1, 1] and whether it is missing; or a category as one 1 among zeros, others last."""
    if "bounds" in column:
        low, high = column["bounds"]
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isnan(number):
            return [0.0, 1.0]
        number = min(max(number, low), high)
        return [2 * (number - low) / (high - low) - 1, 0.0]
    places = {{name: place for place, name in enumerate(column["categories"])}}
    chosen = places.get(str(value).strip(), len(places))
    return [float(place == chosen) for place in range(len(places) + 1)]
'''


def to_device(name: str) -> torch.device:
    """A device by name; ``auto`` is a GPU of CUDA if there is one."""
    from dpis.errors import InputError

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device {name!r} cannot be used: {reason}") from None
    return device
