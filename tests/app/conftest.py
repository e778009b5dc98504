"""Every job runs in a folder of its own, with no data sets and no cache but its own."""

import pytest


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("DPIS_DATA", str(tmp_path / "no-data"))
