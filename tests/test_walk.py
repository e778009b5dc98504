"""The counting tool sees both entries."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[1] / "tools" / "walk.py"


@pytest.mark.slow
def test_the_walk_is_counted() -> None:
    command = [sys.executable, str(TOOL), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["rooms"]["runs"]["files"] > 2
    assert found["longest_signatures"][0]["arguments"] < 20
    for step in found["steps"].values():
        assert {"mechanism/mechanism.py", "noise.py", "randomness.py"} <= step["modules"].keys()
        assert step["over_plain"] > 1
