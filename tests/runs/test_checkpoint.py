"""A checkpoint is whole or refused, and nothing in it is run."""

from __future__ import annotations

import io
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from dpis.errors import InputError
from dpis.mechanism.secret_state import load_secret_state, save_secret_state
from dpis.runs import checkpoint
from dpis.runs.checkpoint import NOTICE
from tests.training.toys import Crash, crash_at, fit, mlp, released

FLIPS = 200


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("interrupted") / "run"
    with pytest.raises(Crash):
        fit(folder, mlp(), progress=crash_at(6))
    return folder / "checkpoint.secret"


def _refused(path: Path) -> None:
    with pytest.raises(InputError, match=r"damaged|another version") as refusal:
        load_secret_state(path)
    text = str(refusal.value)
    assert "\n" not in text
    assert "start the run anew in another folder" in text


def test_a_flipped_bit_anywhere_is_refused(interrupted: Path, tmp_path: Path) -> None:
    whole, path = interrupted.read_bytes(), tmp_path / "checkpoint.secret"
    chance = random.Random(27)
    places = [*range(8 * 100), *(chance.randrange(8 * len(whole)) for _ in range(FLIPS))]
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        _refused(path)
    path.write_bytes(whole)
    assert load_secret_state(path)["training"]["mechanism"]["step"] == 4


def test_a_flipped_bit_of_a_weight_is_refused(interrupted: Path, tmp_path: Path) -> None:
    """The archive's own sums are not looked at when weights are loaded."""
    whole, path = interrupted.read_bytes(), tmp_path / "checkpoint.secret"
    weight = load_secret_state(interrupted)["training"]["model"]["0.weight"]
    bytes_ = weight.numpy().tobytes()
    place = whole.index(bytes_)
    for offset in range(0, len(bytes_), 16):
        damaged = bytearray(whole)
        damaged[place + offset] ^= 1
        path.write_bytes(damaged)
        _refused(path)


@pytest.mark.parametrize("kept", [0, 1, 60, 100, 1000, -1000, -1])
def test_a_checkpoint_cut_short_is_refused(interrupted: Path, tmp_path: Path, kept: int) -> None:
    path = tmp_path / "checkpoint.secret"
    path.write_bytes(interrupted.read_bytes()[:kept])
    _refused(path)


def test_something_added_is_refused(interrupted: Path, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.secret"
    path.write_bytes(interrupted.read_bytes() + b"\0")
    _refused(path)


def test_the_first_lines_say_that_it_is_secret(interrupted: Path) -> None:
    assert NOTICE.encode() in interrupted.read_bytes()[:600]


def test_a_resumed_run_meets_the_same_refusal(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    whole = released(fit(tmp_path / "whole", mlp()).folder)
    with pytest.raises(Crash):
        fit(folder, mlp(), progress=crash_at(6))
    path = folder / "checkpoint.secret"
    good = path.read_bytes()
    weight = load_secret_state(path)["training"]["model"]["0.weight"].numpy().tobytes()
    path.write_bytes(good.replace(weight, bytes(len(weight))))
    assert path.read_bytes() != good
    with pytest.raises(InputError, match="is damaged"):
        fit(folder, mlp(), resume=True)
    path.write_bytes(good)
    assert released(fit(folder, mlp(), resume=True).folder) == whole


class _Runs:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def _saved_by_torch(payload: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("pickled", [pickle.dumps, _saved_by_torch])
def test_nothing_in_a_checkpoint_is_run(tmp_path: Path, pickled: Any) -> None:
    ran, path = tmp_path / "ran", tmp_path / "checkpoint.secret"
    path.write_bytes(checkpoint.sealed(pickled({"state": _Runs(ran)})))
    _refused(path)
    assert not ran.exists()


def test_a_payload_that_would_run_does_run_where_pickle_is_trusted(tmp_path: Path) -> None:
    """So that the test above cannot pass by a payload that does nothing."""
    for pickled in (pickle.dumps, _saved_by_torch):
        ran = tmp_path / pickled.__name__
        torch.load(io.BytesIO(pickled({"state": _Runs(ran)})), weights_only=False) if (
            pickled is _saved_by_torch
        ) else pickle.loads(pickled({"state": _Runs(ran)}))
        assert ran.exists()


def test_a_checkpoint_of_the_version_before_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.secret"
    torch.save({"format": "dpis-checkpoint/1"}, path)
    assert zipfile.is_zipfile(path)
    with pytest.raises(InputError, match="another version"):
        load_secret_state(path)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.secret"
    save_secret_state(path, {"key": b"k", "training": {"w": torch.arange(3.0)}})
    state = load_secret_state(path)
    assert state["key"] == b"k"
    assert torch.equal(state["training"]["w"], torch.arange(3.0))
