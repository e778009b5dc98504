"""Records of arrays: features are taken as they are, so nothing has to be released."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpis.errors import InputError
from dpis.files.arrays import TARGET_NAMES, Arrays, read_arrays
from dpis.files.preprocessing import ArrayPreprocessing, EncodedRecords, FilePreprocessing
from dpis.files.scaling import bucket_counts
from dpis.files.schema import FROM_DATA, Schema
from dpis.files.targets import Bounds, NumberTarget, class_target, classes_of_target


@dataclass(frozen=True, slots=True)
class RawArrays:
    """Arrays that were read. They never need a release: features are taken as they are."""

    encoded: EncodedRecords
    arrays: Arrays

    def __len__(self) -> int:
        return len(self.encoded.targets)

    @property
    def user_ids(self) -> NDArray[np.int64] | None:
        """``[N]``, users numbered from 0 in order of first appearance."""
        return self.encoded.user_ids

    @property
    def image_shape(self) -> tuple[int, ...] | None:
        """The shape of a record, if it can be an image."""
        shape = tuple(self.encoded.features.shape[1:])
        return shape if len(shape) in (2, 3) else None

    @property
    def columns_to_release(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def private_notes(self) -> tuple[str, ...]:
        """None; but what was not read yet is looked through."""
        assert isinstance(self.encoded.preprocessing, ArrayPreprocessing)
        self.encoded.preprocessing.look_through(self.arrays)
        return ()

    def bucket_counts(self, rows: NDArray[np.int64] | None = None) -> torch.Tensor:
        """No columns, no counts."""
        return bucket_counts([])

    def preprocessing(self, bounds: Sequence[Bounds] = ()) -> FilePreprocessing:
        """What makes tensors; there are no bounds to release."""
        if len(bounds):
            raise InputError(f"arrays need no bounds, found {len(bounds)}")
        return self.encoded.preprocessing

    def encode(self, bounds: Sequence[Bounds] = ()) -> EncodedRecords:
        """Tensors."""
        return replace(self.encoded, preprocessing=self.preprocessing(bounds))


def open_arrays(
    path: Path, schema: Schema, release_scale: bool, delimiter: str | None
) -> RawArrays:
    """Read arrays and hold them against what was declared."""
    arrays = read_arrays(path, target=schema.target, user_column=schema.user_column)
    if arrays.user_ids is not None and schema.user_column is None:
        raise InputError(
            f"{path} holds user_ids, and what is to be protected was not said: users with all of their rows "
            "(--user-column user_ids), or rows (remove the array)"
        )
    name = arrays.target_name
    targets = arrays.required_targets()
    misplaced = [column for column in (*schema.bounds, *schema.categories) if column != name]
    if misplaced or schema.drop or release_scale or delimiter is not None:
        raise InputError(
            f"{path}: columns, scales and delimiters are declared for tables; the features of arrays are taken as they "
            f"are (uint8 divided by 255). Only classes or bounds of the target {name!r} can be declared"
        )
    classes = classes_of_target(path, schema, name)
    values = [] if classes != FROM_DATA else [str(v) for v in np.unique(targets).tolist()]
    preprocessing = ArrayPreprocessing(
        record_shape=arrays.features.shape[1:],
        divide_by_255=arrays.features.dtype == np.uint8,
        target=NumberTarget(name, schema.bounds[name])
        if classes is None
        else class_target(name, classes, values),
    )
    made = preprocessing.encode(arrays)
    return RawArrays(EncodedRecords(*made, preprocessing, arrays.user_ids), arrays)


def read_arrays_again(
    path: Path, preprocessing: ArrayPreprocessing, *, with_target: bool
) -> Arrays:
    """The arrays that a preprocessing needs, of another file."""
    name = preprocessing.target.name
    own_name = with_target and name.lower() not in TARGET_NAMES  # those are found by themselves
    return read_arrays(path, target=name if own_name else None)
