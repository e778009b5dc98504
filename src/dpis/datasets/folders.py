"""Where files of this package live when nobody says otherwise."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """``$DPIS_CACHE``, else ``$XDG_CACHE_HOME/dpis``, else ``~/.cache/dpis``; not created here.

    None if ``DPIS_CACHE=off``: nothing is to be kept.
    """
    chosen = os.environ.get("DPIS_CACHE", "")
    if chosen.lower() == "off":
        return None
    if chosen:
        return Path(chosen).expanduser()
    platform = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(platform) if platform else Path("~/.cache").expanduser()) / "dpis"
