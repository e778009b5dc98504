"""Arrays in .npz and .pt: what is read, and that nothing doubtful is."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpis.errors import InputError
from dpis.files.arrays import read_arrays
from dpis.files.users import codes_by_appearance

X, Y = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 0])


def npz(folder: Path, **arrays: Any) -> Path:
    path = folder / "a.npz"
    np.savez(path, **arrays)
    return path


def pt(folder: Path, content: object) -> Path:
    path = folder / "a.pt"
    torch.save(content, path)
    return path


def error(path: Path, **options: Any) -> str:
    with pytest.raises(InputError) as caught:
        read_arrays(path, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("features", ["x", "X", "features", "images", "inputs", "data"])
@pytest.mark.parametrize("targets", ["y", "targets", "labels", "target"])
def test_the_usual_names(tmp_path: Path, features: str, targets: str) -> None:
    expected = torch.from_numpy(X), torch.from_numpy(Y)
    for path in (
        npz(tmp_path, **{features: X, targets: Y}),
        pt(tmp_path, {features: expected[0], targets: expected[1]}),
    ):
        arrays = read_arrays(path)
        np.testing.assert_array_equal(arrays.features, X)
        np.testing.assert_array_equal(arrays.required_targets(), Y)
        assert arrays.target_name == targets
        assert arrays.user_ids is None
        assert len(arrays) == 3


def test_other_forms_of_pt(tmp_path: Path) -> None:
    x, y = torch.from_numpy(X), torch.from_numpy(Y)
    pair = read_arrays(pt(tmp_path, (x, y.reshape(3, 1))))
    np.testing.assert_array_equal(pair.required_targets(), Y)
    assert pair.target_name == "y"
    lone = read_arrays(pt(tmp_path, x.to(torch.bfloat16).requires_grad_()))
    np.testing.assert_array_equal(lone.features, X)
    with pytest.raises(InputError, match="targets are needed, under y, targets"):
        lone.required_targets()


def test_names_of_ones_own_and_users(tmp_path: Path) -> None:
    path = npz(tmp_path, x=X, y=Y, income=Y + 1, who=np.array(["b", "a", "b"]))
    arrays = read_arrays(path, target="income", user_column="who")
    np.testing.assert_array_equal(arrays.required_targets(), Y + 1)
    assert arrays.user_ids is not None
    assert arrays.user_ids.tolist() == [0, 1, 0]
    found = read_arrays(npz(tmp_path, x=X, y=Y, user_ids=np.array([9, 9, 2]))).user_ids
    assert found is not None
    assert found.tolist() == [0, 0, 1]
    of_other_alphabets = np.array([b"\xe9ab", b"\xe8ab", b"\xe9ab"])
    found = read_arrays(npz(tmp_path, x=X, y=Y, user_ids=of_other_alphabets)).user_ids
    assert found is not None
    assert found.tolist() == [0, 1, 0]  # decoded, both would be the same


def test_what_is_refused_in_any_file(tmp_path: Path) -> None:
    assert "features must be named x, features" in error(npz(tmp_path, a=X, y=Y))
    assert "found a, y" in error(npz(tmp_path, a=X, y=Y))
    assert "x, data could all be meant" in error(npz(tmp_path, x=X, data=X, y=Y))
    assert "no target 'z', only x, y" in error(npz(tmp_path, x=X, y=Y), target="z")
    assert "no users 'z', only x, y" in error(npz(tmp_path, x=X, y=Y), user_column="z")
    assert "targets must be one a record, of the shape (3,), found (2,)" in error(
        npz(tmp_path, x=X, y=Y[:2])
    )
    assert "found (3, 2)" in error(npz(tmp_path, x=X, y=X))
    assert "[records, ...], found the shape (3,)" in error(npz(tmp_path, x=Y, y=Y))
    assert "no records" in error(npz(tmp_path, x=X[:0], y=Y[:0]))
    assert "features must be numbers" in error(npz(tmp_path, x=X.astype(str), y=Y))
    assert "features must be numbers" in error(npz(tmp_path, x=X.astype(complex), y=Y))
    assert "a.npz: user ids must be whole numbers or text" in error(
        npz(tmp_path, x=X, y=Y, user_ids=Y / 2)
    )
    for nobody in ("", "None"):
        users = np.array(["a", nobody, "b"])
        assert "a.npz: some rows have no user" in error(npz(tmp_path, x=X, y=Y, user_ids=users))
    assert "users must be one a record" in error(npz(tmp_path, x=X, y=Y, user_ids=Y[:1]))
    assert "cannot read" in error(tmp_path / "none.npz")
    assert "cannot read" in error(tmp_path / "none.pt")


def test_objects_and_broken_files_are_refused(tmp_path: Path) -> None:
    objects = npz(tmp_path, x=X, y=np.array([0, "a", None], dtype=object))
    assert "not a plain .npz of numbers" in error(objects)
    for name, wanted in (("b.npz", "not a plain .npz"), ("b.pt", "not a file of plain tensors")):
        path = tmp_path / name
        for content in (b"", b"garbage", pickle.dumps([1, 2]), b"PK\x03\x04 broken"):
            path.write_bytes(content)
            assert wanted in error(path)
    np.save(tmp_path / "one.npy", X)
    (tmp_path / "one.npy").rename(tmp_path / "one.npz")
    assert "one array, not named ones" in error(tmp_path / "one.npz")
    cut = npz(tmp_path, x=X, y=Y)
    cut.write_bytes(cut.read_bytes()[:-40])
    assert "not a plain .npz" in error(cut)


class Trap:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("code ran",))


def test_pickled_code_never_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "pickled objects are refused" in error(pt(tmp_path, {"x": Trap(), "y": 1}))
    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    assert "torch.save({'x': x, 'y': y}, path)" in error(pt(tmp_path, dataset))
    assert capsys.readouterr().out == ""


def test_pt_contents_that_are_refused(tmp_path: Path) -> None:
    x = torch.from_numpy(X)
    assert "a dict of tensors or a pair (x, y), found tuple" in error(pt(tmp_path, (x, x, x)))
    assert "found int" in error(pt(tmp_path, 3))
    assert "'y' must be a tensor, found list" in error(pt(tmp_path, {"x": x, "y": [0, 1]}))
    assert "dense tensor of real numbers" in error(pt(tmp_path, {"x": x.to_sparse()}))
    assert "dense tensor of real numbers" in error(pt(tmp_path, {"x": x.to(torch.complex64)}))


@settings(deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1))
def test_codes_follow_first_appearance(values: list[int]) -> None:
    order = list(dict.fromkeys(values))
    assert codes_by_appearance(np.array(values)).tolist() == [order.index(v) for v in values]
