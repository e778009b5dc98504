"""Whatever is imported first in a process can be: no module needs another to have been there before it."""

from __future__ import annotations

import subprocess
import sys

import dpis

FIRST = [f"from dpis import {name}" for name in dpis.__all__] + [
    f"import dpis.{room}"
    for room in (
        *("accounting", "app.entry", "coupling.shared_rows", "dropin", "dropin.trainer_settings"),
        *(
            "features",
            "files.reading",
            "gradients",
            "mechanism",
            "models.kinds",
            "noise",
            "runs.folder",
        ),
        *("sampling", "training"),
    )
]

TRY_EACH = """
import os, sys, numpy, torch, torch.utils.data, dp_accounting, dp_accounting.pld, dp_accounting.rdp  # once: slow
for first in sys.argv[1:]:
    if not os.fork():
        try:
            exec(first)
        except BaseException as error:
            print(f"{first}: {error!r}", flush=True)
        os._exit(0)
    os.wait()
"""


def test_anything_may_be_imported_first() -> None:
    said = subprocess.run([sys.executable, "-c", TRY_EACH, *FIRST], capture_output=True, text=True)
    assert said.stdout == "", said.stdout
    assert said.returncode == 0, said.stderr
