"""From a file's records to what a model takes, for training and for predicting alike."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpis.app.jobs import plain_table
from dpis.datasets.glove import load_glove
from dpis.errors import InputError
from dpis.features import group_normalise, scatter_features
from dpis.features.bags import bag_features
from dpis.features.channels import ChannelScale
from dpis.features.colours import Colours, opponent
from dpis.features.standalone import scattering_source
from dpis.features.texts import VOCABULARY, word_sequences
from dpis.files.preprocessing import (
    ArrayPreprocessing,
    Preprocessing,
    TablePreprocessing,
    TextPreprocessing,
    preprocessing_from_json,
)
from dpis.files.schema import listed
from dpis.files.targets import ClassTarget
from dpis.models.kinds import Inputs
from dpis.stored_rows import Column, StoredRows, changed

GROUPS = 27
"""Of normalised scatter features: every group is three of the 81 channels of a grey image, nine of the 243 of a colour
image."""

Progress = Callable[[int, int], None]
Content = Tensor | StoredRows | tuple[str, ...]
"""Arrays or rows of numbers, in memory or on disk; texts."""


@dataclass(frozen=True)
class Pipeline:
    """Preprocessing that looks at one record at a time, so it costs no privacy.

    Attributes:
        preprocessing: from a file's records to float features, or to texts.
        kind: what the model takes.
        scale: of the channels of scatter features, from accounted releases; None: groups of channels are normalised
            record by record.
        colours: which planes of colour images are scattered.
    """

    preprocessing: Preprocessing
    kind: Inputs
    scale: ChannelScale | None = None
    colours: Colours = Colours.RGB

    def inputs(self, records: Content, progress: Progress | None = None) -> Column:
        """What the model takes, from what `preprocessing` made."""
        return self.normalised(self.described(records, progress))

    def described(self, records: Content, progress: Progress | None = None) -> Column:
        """The records as rows of numbers, before they are normalised."""
        if isinstance(records, tuple):
            return self._from_texts(records)
        features = records
        if records.ndim == 3:  # grey images: one channel
            features = changed(records, lambda images: images[:, None], "one channel")
        if self.kind is not Inputs.SCATTERED:
            return features
        if self.colours is Colours.OPPONENT:
            features = changed(features, opponent, "opponent")
        return scatter_features(features, progress=progress)

    def normalised(self, features: Column) -> Column:
        """Scatter features brought to one scale; other features as they are."""
        if self.kind is not Inputs.SCATTERED:
            return features
        if self.scale is not None:
            return changed(features, self.scale, f"{self.scale}")
        return changed(features, lambda rows: group_normalise(rows, GROUPS), f"groups {GROUPS}")

    def _from_texts(self, texts: tuple[str, ...]) -> Tensor:
        if self.kind is Inputs.WORDS:
            return word_sequences(texts, load_glove(VOCABULARY).words)
        return bag_features(texts, load_glove())

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        scale = None if self.scale is None else self.scale.to_json()
        return {
            "records": self.preprocessing.to_json(),
            "inputs": self.kind.value,
            "channel_scale": scale,
            "colours": self.colours.value,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Pipeline:
        """The inverse of `to_json`. A step that is not known is refused: without it, predictions would be others."""
        unknown = set(data) - {"records", "inputs", "channel_scale", "colours"}
        if unknown:
            raise InputError(
                f"the model's inputs are made by steps that this version does not know ({listed(sorted(unknown))}): "
                "use the version of dpis that trained it"
            )
        scale = data["channel_scale"]
        try:
            kind, colours = Inputs(data["inputs"]), Colours(data.get("colours", Colours.RGB))
        except ValueError as error:
            raise InputError(f"{error}: use the version of dpis that trained the model") from None
        return cls(
            preprocessing_from_json(data["records"]),
            kind,
            None if scale is None else ChannelScale.from_json(scale),
            colours,
        )

    def source(self) -> str:
        """Python that defines ``preprocess`` and ``decode``, given torch and nn alone; empty for texts."""
        if isinstance(self.preprocessing, TextPreprocessing):
            return ""
        if isinstance(self.preprocessing, TablePreprocessing):
            inputs = _table_source(self.preprocessing.to_json()["columns"])
        else:
            inputs = self._array_source(self.preprocessing)
        return inputs.rstrip("\n") + "\n" + _decode_source(self.preprocessing)

    def _array_source(self, arrays: ArrayPreprocessing) -> str:
        shape = list(arrays.record_shape)
        lines = ["    inputs = torch.as_tensor(records).float()" + " / 255" * arrays.divide_by_255]
        if len(shape) == 2:
            lines.append("    inputs = inputs[:, None]  # one channel")
        definitions = ""
        if self.kind is Inputs.SCATTERED:
            definitions = scattering_source()
            if self.colours is Colours.OPPONENT:
                definitions += "\n\n" + inspect.getsource(opponent)
                lines.append("    inputs = opponent(inputs)")
            lines.append(f"    inputs = Scattering(({shape[-2]}, {shape[-1]}))(inputs)")
            lines += self._normalise_lines()
        kind = "uint8" if arrays.divide_by_255 else "float"
        doc = f'    """{kind} records of shape {shape}, as the network takes them."""'
        function = "\n".join(
            ["@torch.no_grad()\ndef preprocess(records):", doc, *lines, "    return inputs"]
        )
        return definitions + "\n\n" + function + "\n"

    def _normalise_lines(self) -> list[str]:
        if self.scale is None:
            return [f"    inputs = nn.functional.group_norm(inputs, {GROUPS})"]
        return [
            f"    mean = torch.tensor({list(self.scale.mean)}).reshape(1, -1, 1, 1)",
            f"    deviation = torch.tensor({list(self.scale.deviation)}).reshape(1, -1, 1, 1)",
            "    inputs = (inputs - mean) / deviation",
        ]


def _table_source(columns: object) -> str:
    """`plain_table` with its columns filled in, without the sentence about itself."""
    body = inspect.getsource(plain_table).partition('"""\n\n')[2]
    given = f"COLUMNS: list[dict[str, Any]] = json.loads({json.dumps(columns)!r})"
    return "\nimport json\n" + body.replace("COLUMNS: list[dict[str, Any]] = []", given, 1)


def _decode_source(preprocessing: Preprocessing) -> str:
    """Python that defines ``decode``: outputs as class names, or as numbers in the target's units."""
    target = preprocessing.target
    if isinstance(target, ClassTarget):
        return _DECODE_CLASSES.format(classes=json.dumps(list(target.classes)))
    low, high = target.bounds
    middle, half = low / 2 + high / 2, high / 2 - low / 2
    return _DECODE_NUMBERS.format(low=low, high=high, middle=middle, half=half)


_DECODE_CLASSES = """

CLASSES = {classes}


def decode(outputs):
    \"\"\"The name of the class with the largest output, for every record.\"\"\"
    return [CLASSES[place] for place in outputs.argmax(1).tolist()]
"""

_DECODE_NUMBERS = """

def decode(outputs):
    \"\"\"The predicted number in the units of the target, for every record.\"\"\"
    values = {middle!r} + {half!r} * outputs.detach().double().reshape(len(outputs))
    return values.clamp({low!r}, {high!r}).tolist()
"""
