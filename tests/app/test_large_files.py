"""`dpis train` on every kind of file, in memory and on disk: the same model; and little memory for much data."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import dpis
from dpis import stored_rows
from dpis.app import main
from dpis.mechanism.secret_state import load_secret_state
from tests.files.tables import FORMATS, columns, write

COMMON = ["--epochs", "2", "--batch-size", "40", "--seed", "3"]
DECLARED = [
    "--target", "ok", "--classes", "no,yes", "--model", "mlp", "--n-public", "210", *COMMON,
    "--categories", "city=Paris,Lyon,Nice", "--categories", "level=1,2,3",
]  # fmt: skip
WAYS = {
    "rows": ["--bounds", "age=0:100", "--drop", "who"],
    "users": ["--bounds", "age=0:100", "--user-column", "who", "--max-rows-per-user", "2"],
    "released": ["--release-scale", "--drop", "who"],
}


def trained(path: Path | str, *flags: str) -> dict[str, bytes]:
    out = Path(f"run{len(list(Path().glob('run*')))}")
    assert main(["train", str(path), *flags, "--out", str(out)]) == 0
    names = "model.safetensors", "ledger.jsonl"
    return {name: (out / name).read_bytes() for name in names}


@pytest.fixture
def nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "csv"])
def test_every_table_gives_the_model_of_the_csv(
    tmp_path: Path, kind: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(write("csv", tmp_path), *DECLARED, *WAYS[way])
    path = write(kind, tmp_path)
    assert (
        trained(path, *DECLARED, *WAYS[way])["model.safetensors"] == expected["model.safetensors"]
    )
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    assert (
        trained(path, *DECLARED, *WAYS[way])["model.safetensors"] == expected["model.safetensors"]
    )


def test_a_table_on_disk_gives_the_model_of_the_csv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = trained(write("csv", tmp_path), *DECLARED, *WAYS["rows"])
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    path = write("parquet", tmp_path)
    assert (
        trained(path, *DECLARED, *WAYS["rows"])["model.safetensors"]
        == expected["model.safetensors"]
    )
    capsys.readouterr()
    assert main(["evaluate", "run1", str(path)]) == 0
    on_disk = capsys.readouterr().out
    assert main(["evaluate", "run1", "t.csv"]) == 0
    assert capsys.readouterr().out == on_disk
    assert main(["predict", "run1", str(path)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(columns()["ok"])


@pytest.mark.parametrize("kind", ["folder", "npz", "npy"])
def test_arrays_by_path(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 5)).astype(np.float32)
    named = {"x": x, "y": (x[:, 0] > 0).astype(np.int64)}
    np.savez(tmp_path / "data.npz", **named)  # type: ignore[arg-type]
    flags = ["--classes", "2", "--model", "linear", "--n-public", "180", *COMMON]
    expected = trained(tmp_path / "data.npz", *flags)
    (tmp_path / "arrays").mkdir()
    for name, array in named.items():
        np.save(tmp_path / "arrays" / f"{name}.npy", array)
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 1800)
    path = {"folder": tmp_path / "arrays", "npz": tmp_path / "data.npz"}.get(kind)
    if path is not None:
        assert trained(path, *flags) == expected
        return
    capsys.readouterr()
    assert main(["train", str(tmp_path / "arrays" / "x.npy"), *flags]) == 2
    assert "targets are needed" in capsys.readouterr().err


@pytest.mark.parametrize("views", [[], ["--augment", "flip", "--augmentations", "2"]])
def test_images_on_disk_are_scattered_on_disk(
    tmp_path: Path, views: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    images = np.random.default_rng(0).integers(0, 256, (60, 12, 12), dtype=np.uint8)
    np.savez(tmp_path / "data.npz", x=images, y=np.arange(60) % 2)
    flags = [
        "--classes", "2", "--model", "scatter-linear", "--epochs", "1", "--batch-size", "10",
        "--n-public", "54", "--seed", "3", *views,
    ]  # fmt: skip
    expected = trained(tmp_path / "data.npz", *flags)
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 1000)
    assert (
        trained(tmp_path / "data.npz", *flags)["model.safetensors"] == expected["model.safetensors"]
    )
    monkeypatch.setenv("DPIS_CACHE", "off")
    assert (
        trained(tmp_path / "data.npz", *flags)["model.safetensors"] == expected["model.safetensors"]
    )


@pytest.mark.usefixtures("nothing_fits")
def test_what_is_wrong_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("parquet", tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    assert main(["train", str(path), *DECLARED, *WAYS["rows"], "--out", "run"]) == 2
    said = capsys.readouterr().err
    assert "is damaged or not what its name says" in said
    assert "Traceback" not in said
    assert not Path("run").exists()
    assert main(["train", "--check-data"]) == 2
    assert "give --resume too" in capsys.readouterr().err


def test_an_interrupted_command_goes_on_over_a_table_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_rows, "KEPT_IN_MEMORY", 0)
    monkeypatch.setattr("dpis.training.data_fingerprint.SETTLED_SECONDS", -1e9)
    path = write("parquet", tmp_path)
    expected = trained(path, *DECLARED, *WAYS["rows"])
    stopped: list[int] = []

    def stop(progress: object, standing: object) -> None:
        stopped.append(1)
        if len(stopped) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as once:
        once.setattr("dpis.training.progress.ProgressBar.step_done", stop)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            raise SystemExit(main(["train", str(path), *DECLARED, *WAYS["rows"], "--out", "run9"]))
    known = load_secret_state(Path("run9/checkpoint.secret"))["training"]["data"]["known"]
    assert len(known) == 64  # a chunk of every shard, of one column on disk
    assert main(["train", "--resume", "run9", "--check-data"]) == 0
    assert Path("run9/model.safetensors").read_bytes() == expected["model.safetensors"]


def test_a_dataset_of_hugging_face_as_rows_of_dicts(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    data = datasets.Dataset.from_dict({"x": x.tolist(), "y": (x[:, 0] > 0).long().tolist()})
    data.save_to_disk(tmp_path / "hf")

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    for place, rows in enumerate((data, datasets.load_from_disk(tmp_path / "hf"))):
        result = dpis.train(
            nn.Linear(4, 2), rows.with_format("torch"), epochs=1, batch_size=16, n_public=64,
            training=dpis.Training(objective=loss), seed=1, out=tmp_path / f"run{place}",
        )  # fmt: skip
        assert result.epochs == 1


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────

MEASURED = """
import sys, threading, time
from pathlib import Path
def anonymous():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024
import dpis.app.jobs.training
from dpis.app import main
before, most, done = anonymous(), 0.0, False
def watch():
    global most
    while not done:
        most = max(most, anonymous())
        time.sleep(0.01)
watching = threading.Thread(target=watch)
watching.start()
code = main(sys.argv[1:])
done = True
watching.join()
print("above", most - before)
raise SystemExit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux")
def test_a_table_larger_than_its_share_of_memory(tmp_path: Path) -> None:
    """600 MB of features, mostly a hole in the file: less than 200 MB of memory that is the process's own."""
    rows, width = 150_000, 1000
    (tmp_path / "arrays").mkdir()
    x = np.lib.format.open_memmap(tmp_path / "arrays" / "x.npy", "w+", np.float32, (rows, width))
    x[::1000] = 1.0
    x.flush()
    np.save(tmp_path / "arrays" / "y.npy", np.arange(rows) % 2)
    command = [
        sys.executable, "-c", MEASURED, "train", str(tmp_path / "arrays"), "--classes", "2", "--model", "linear",
        "--epochs", "1", "--batch-size", "4096", "--n-public", "135000", "--seed", "1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.partition("above")[2].split()[0]) < 200
