"""A run's public values as text, and back."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, fields
from importlib.metadata import version

from dpis.accounting import Accountant, Cadence, CountSource, Release
from dpis.mechanism import AdaptiveClipping, Config, Contribution, Method, NormSum


def versions() -> dict[str, str]:
    """Of everything the numbers depend on."""
    packages = ("dpis", "torch", "dp-accounting", "numpy")
    return {name: version(name) for name in packages} | {"python": platform.python_version()}


def config_to_json(config: Config) -> str:
    """A config as text."""
    values = asdict(config)
    if values["headroom"] == float("inf"):
        values["headroom"] = "inf"
    return json.dumps(values)


def config_from_json(text: str) -> Config:
    """The config that `config_to_json` wrote."""
    values = json.loads(text)
    kappa, clipping = values["kappa"], values["clipping"]
    values |= {
        "method": Method(values["method"]),
        "n_public_source": CountSource(values["n_public_source"]),
        "contribution": Contribution(values["contribution"]),
        "norm_sum": NormSum(values["norm_sum"]),
        "accountant": Accountant(values["accountant"]),
        "headroom": float(values["headroom"]),
        "kappa": tuple(kappa) if isinstance(kappa, list) else kappa,
        "clipping": None if clipping is None else AdaptiveClipping(**clipping),
        "releases": tuple(
            Release(r["label"], r["noise_multiplier"], Cadence(r["cadence"]))
            for r in values["releases"]
        ),
    }
    known = {field.name for field in fields(Config)}
    return Config(**{name: value for name, value in values.items() if name in known})
