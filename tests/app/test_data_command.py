from __future__ import annotations

import subprocess
import sys

import pytest

from dpis.app import main
from dpis.datasets import locate
from tests.datasets.test_fetch import CONTENTS, Server, server, tiny

__all__ = ["Server", "server", "tiny"]


def run(capsys, *arguments):
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_dataset_is_fetched_once(capsys, tiny, tmp_path):
    folder = tmp_path / "cache" / "data" / "tiny-folder"
    code, out, err = run(capsys, "data", "fetch", "tiny")
    assert (code, out.split(), err) == (0, ["fetched", "to", str(folder)], "")
    code, out, _ = run(capsys, "data", "fetch", "TINY")
    assert (code, out.split()) == (0, ["already", "in", str(folder)])
    code, out, _ = run(capsys, "data", "list")
    assert (code, out.split()) == (0, ["tiny", str(folder)])


def test_a_folder_and_an_archive_can_be_named(capsys, tiny, tmp_path):
    archive = tmp_path / "a.tar.gz"
    archive.write_bytes(tiny.files["tiny.tar.gz"])
    code, _, _ = run(capsys, "data", "fetch", "tiny", "--to", str(tmp_path), "--from", str(archive))
    assert code == 0
    for name, content in CONTENTS.items():
        assert (tmp_path / "tiny-folder" / name).read_bytes() == content


def test_what_is_missing_is_listed_with_how_to_get_it(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("DPIS_DATA", str(tmp_path))
    monkeypatch.setenv("DPIS_CACHE", "off")
    monkeypatch.setattr(locate, "SYSTEM_FOLDER", tmp_path)
    code, out, _ = run(capsys, "data", "list")
    assert code == 0
    lines = out.splitlines()
    assert [line.split()[0] for line in lines] == ["mnist", "fmnist", "cifar10", "imdb", "glove"]
    assert all("missing: " in line for line in lines)
    assert "dpis data fetch cifar10" in lines[2]
    assert "dpis data fetch" not in lines[4]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "fetch", "nmist"], "no dataset is called 'nmist'"),
        (["data", "fetch"], "Missing argument"),
        (["data", "fly"], "No such command"),
        (["data", "fetch", "glove"], "glove could not be fetched: put glove"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    capsys, monkeypatch, tmp_path, arguments, message
):
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path))
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dpis: error: ")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_failed_fetch_is_one_clear_line(capsys, tiny, tmp_path):
    tiny.files.clear()
    code, out, err = run(capsys, "data", "fetch", "tiny")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "answers 404" in err
    assert "ask a friend" in err


@pytest.mark.slow
def test_listing_does_not_load_torch():
    code = (
        "import sys; from dpis.app import main; import dpis.datasets.fetch;"
        " main(['data', 'list']); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
