"""A file from an address, continued where it was left, and checked."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import ssl
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from dpis.errors import DpisError

Progress = Callable[[str, int, int | None], None]
"""Called with what is fetched, how many bytes are here, and of how many (None: not known)."""

TIMEOUT_SECONDS = 15.0
"""For connecting, and for each read."""

BLOCK_BYTES = 1 << 18


class FetchError(DpisError):
    """Data could not be got from one place. Its message is part of a line."""


def download(url: str, part: Path, md5: str, progress: Progress) -> None:
    """Fetch ``url`` to ``part``, going on from what is there; what came stays if the connection breaks.

    Raises:
        FetchError: It cannot be reached, breaks off, or is not what was published.
    """
    if part.is_file() and md5_of(part) == md5:
        return
    _receive(url, part, progress)
    if md5_of(part) != md5:
        part.unlink(missing_ok=True)
        raise FetchError(f"what {url} sent is not the published file (md5)")


def md5_of(path: Path) -> str:
    """The checksum that the authors of old datasets published. Contents are checked by sha256 as well."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _receive(url: str, part: Path, progress: Progress) -> None:
    have = part.stat().st_size if part.is_file() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            if have and not _continues(answer, have):
                have = 0  # it sends the whole file
            length = answer.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else None
            with part.open("ab" if have else "wb") as file:
                progress(url, have, total)
                while block := answer.read(BLOCK_BYTES):
                    file.write(block)
                    have += len(block)
                    progress(url, have, total)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            with contextlib.suppress(OSError):  # longer than the file: another one's beginning
                part.unlink()
        raise FetchError(f"{url} answers {error.code} {error.reason}") from error
    except urllib.error.URLError as error:
        raise FetchError(f"{url} cannot be reached ({error.reason})") from error
    except (TimeoutError, ConnectionError, ssl.SSLError, http.client.HTTPException) as error:
        raise FetchError(f"{url} broke off ({error or type(error).__name__})") from error
    if total is not None and have < total:
        raise FetchError(
            f"{url} broke off after {have:,} of {total:,} bytes: run the command again to go on"
        )


def _continues(answer: http.client.HTTPResponse, have: int) -> bool:
    return answer.status == http.client.PARTIAL_CONTENT and answer.headers.get(
        "Content-Range", ""
    ).startswith(f"bytes {have}-")
