"""What the tests of loops share: the examples as modules, and one guarantee."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from dpis.dropin.trainer_settings import TrainerSettings
from dpis.options import Privacy

EXAMPLES = Path(__file__).parents[2] / "examples"
PRIVACY = TrainerSettings(privacy=Privacy(n_public=64), noise_multiplier=1.0, seed=0)

quiet = pytest.mark.filterwarnings("ignore")  # of the other packages


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
