"""The page of one finished run: what came out, what is guaranteed and by which evidence, how it was made.

Only what the run released may stand on it (rule 20): fields are taken by name, and what is not known here is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dpis.accounting import Mode
from dpis.app.jobs.job_options import JobOptions
from dpis.app.page import sentences
from dpis.app.page.charts import Chart, Series, figures, over_epochs
from dpis.app.page.markup import Child, Markup, join, tag
from dpis.app.page.membership import membership
from dpis.app.page.page import box, bullets, facts, page, section
from dpis.app.page.run_files import RunReport
from dpis.options import knobs
from dpis.runs.summary import PROTECTS


def render_run(run: RunReport) -> str:
    """The page."""
    recipe = run.summary["recipe"]  # empty: trained from Python
    quality = sentences.quality(run.summary["metrics"], scaled=bool(recipe))
    measured_on, trained = recipe.get("measured_on"), recipe.get("data")
    return page(
        f"{quality}: {_system(run)}" + (f" on {trained}" if trained else ""),
        tag("h1", quality),
        tag("p", *_lead(run, measured_on), class_="lead"),
        *_verdict(run),
        section("The guarantee", *_guarantee(run)),
        section("What an attacker could tell", *membership(run)),
        section("Over the epochs", *_charts(run)),
        section("Settings", *_settings(run)),
        section("Files", *_files(run)),
        footer=[tag("p", _versions(run))],
    )


def _lead(run: RunReport, measured_on: Child) -> Iterator[Child]:
    trained = len(run.summary["history"])
    yield f"Measured on {measured_on}, " if measured_on else "Measured on held-out records, "
    yield f"after {trained} epoch{'s' * (trained != 1)} of {_system(run)}"
    yield "; stopped early, on a held-out metric." if run.summary["stopped_early"] else "."


def _system(run: RunReport) -> str:
    """As it was called on the command line; from Python, the method."""
    return str(run.summary["recipe"].get("system") or run.summary["method"])


def _verdict(run: RunReport) -> Iterator[Markup]:
    if not run.private and run.problem is None:
        yield box("bad", "NOT PRIVATE:", sentences.NOT_PRIVATE.partition(": ")[2])
    elif run.problem is not None:
        yield box(
            "bad",
            "The claim does NOT hold.",
            f"The ledger was checked for this page: {run.problem}.",
            "Do not release this model, and do not quote its epsilon.",
        )
    elif run.verdict is not None:
        yield box(
            "good",
            "The ledger verifies.",
            f"Epsilon was recomputed for this page from its {len(run.verdict.ledger.entries):,} events: "
            f"{run.verdict.epsilon_claimable:.6g}, within the {run.verdict.ledger.header.claim.epsilon:g} claimed.",
        )
    if run.marks:
        why = sentences.why_not_for_release(run.marks)
        yield box("warn", "NOT FOR RELEASE:", why if run.private else why.partition(";")[0] + ".")


def _guarantee(run: RunReport) -> Iterator[Markup]:
    if run.problem is not None:
        yield tag("p", "None that can be relied on: see above.")
        return
    if run.verdict is None:
        yield tag("p", sentences.NOT_PRIVATE)
        return
    header = run.verdict.ledger.header
    whom = PROTECTS[header.unit]
    yield tag("p", sentences.guarantee(header.claim.epsilon, header.claim.delta, whom))
    yield tag("h3", "Not covered")
    yield bullets(str(note) for note in run.summary["notes"])
    planned = header.mode is Mode.PREDECLARED
    yield tag("h3", "What it rests on")
    yield facts(
        [
            ("Adjacency", f"{header.adjacency} of {whom}"),
            (
                "Number of records",
                f"{header.n_public:,} ({_SOURCES[header.n_public_source.value]})",
            ),
            (
                "Account",
                "predeclared: every noise level was fixed before the data was touched"
                if planned
                else f"adaptive: a Renyi filter at order {header.filter_order} admitted every event",
            ),
            ("Events", f"{len(run.verdict.ledger.entries):,}"),
            ("Epsilon of what was released", f"{run.verdict.epsilon_spent:.6g}"),
        ],
        "What the guarantee rests on",
    )


_SOURCES = {
    "given": "declared beforehand",
    "dataset-length": "read from the data, treated as public",
    "released": "released with noise, and paid for",
}


# ── charts ───────────────────────────────────────────────────────────────────────────────────────────


def _points(
    history: Sequence[Mapping[str, Any]], name: str, scale: float = 1.0
) -> list[tuple[float, float]]:
    return [(e["epoch"], scale * e[name]) for e in history if e.get(name) is not None]


def _charts(run: RunReport) -> Iterator[Markup]:
    history = run.summary["history"]
    if not history:
        yield tag("p", "The run has no epochs.", class_="absent")
        return
    steady = [*_steady(history)]
    if steady:
        yield tag("p", "The same in every epoch: ", join(steady, ", "), ".")
    yield figures(list(_run_charts(history)))


def _changes(points: Sequence[tuple[float, float]]) -> bool:
    return len({value for _, value in points}) > 1


def _steady(history: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    named = {"kappa": "kappa", "clip_norm": "clip norm", "sampling_rate": "sampling rate"}
    for name, shown in named.items():
        points = _points(history, name)
        if points and not _changes(points):
            yield f"{shown} {points[0][1]:.4g}"


def _run_charts(history: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    accuracy = _points(history, "held_out_accuracy", 100)
    error = _points(history, "held_out_squared_error")
    if accuracy:
        series = [Series("accuracy", accuracy)]
        yield over_epochs("accuracy", "Held-out accuracy", "accuracy, %", series, zero=False)
    if error:
        series = [Series("error", error)]
        yield over_epochs("error", "Held-out squared error", "squared error", series, zero=False)
    sigma, z = _points(history, "grad_noise_multiplier"), _points(history, "noise_multiplier")
    if any(value > 0 for _, value in (*sigma, *z)):
        series = [
            Series("z: noise over the most that one record adds", z, "z" if sigma != z else "")
        ]
        if sigma != z:
            series.append(Series("sigma_G = z · kappa, the paper's", sigma, "sigma_G", style=1))
        yield over_epochs("noise", "Noise multiplier", "noise multiplier", series)
    kappa, clip = _points(history, "kappa"), _points(history, "clip_norm")
    if _changes(kappa):
        yield over_epochs(
            "kappa",
            "Norm utilisation kappa",
            "kappa",
            [Series("kappa", kappa, style=2, dashed=False)],
            note="The mean gradient norm over the clip norm, as released with noise; 1 is DP-SGD.",
        )
    if _changes(clip):
        series = [Series("C", clip, style=3, dashed=False)]
        yield over_epochs("clip", "Clip norm", "clip norm", series)


# ── settings and files ───────────────────────────────────────────────────────────────────────────────


_NAMES = {
    "kappa": "kappa, as asked for",
    "lr": "learning rate",
    "n_public": "number of records",
    "n_public_source": "number taken from",
    "release_n": "number released",
}
"""Settings that are not called as their option is."""
_OPTIONS = knobs(JobOptions)


def _setting_name(name: str) -> str:
    """As its option, with the paper's letter."""
    plain, symbol = name.replace("_", " "), _OPTIONS[name].symbol if name in _OPTIONS else ""
    return _NAMES.get(name, plain if symbol in ("", name) else f"{plain} {symbol}")


def _settings(run: RunReport) -> Iterator[Markup]:
    chosen = {**run.summary["recipe"], **run.summary["config"]}
    chosen.pop("measured_on", None)
    method = run.summary["config"].get("method", run.summary["method"])
    pairs = [
        (_setting_name(name), _shown(value))
        for name, value in sorted(chosen.items())
        if name not in _OPTIONS or method in _OPTIONS[name].used_by
    ]
    yield tag("p", "As given, or the default that suited model and data.", class_="soft")
    yield facts([pair for pair in pairs if pair[1]], "Settings", "facts settings")
    evaluations = run.summary.get("gradient_evaluations")
    if "diagnostics" in run.marks and isinstance(evaluations, int):
        yield box(
            "warn",
            "Private, not for release:",
            f"{evaluations:,} gradients were computed (diagnostics).",
        )


def _shown(value: Any) -> str:
    if value is None or value == [] or value == "":
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(_shown(item) for item in value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items())
    return str(value)


def _files(run: RunReport) -> Iterator[Markup]:
    described = {
        "model.safetensors": "the weights",
        "model.py": "loads them with plain PyTorch",
        "ledger.jsonl": "every release, one a line",
        "summary.json": "settings, claim and results",
        "audit.json": "what an attack found",
    }
    present = [(name, what) for name, what in described.items() if (run.folder / name).is_file()]
    yield facts([(tag("code", name), what) for name, what in present], "Files")
    end = None if run.verdict is None else run.verdict.ledger.end
    if end is not None:
        yield tag(
            "p",
            "sha256 of the weights, from the ledger: ",
            tag("code", end.model_sha256),
            class_="soft",
        )
        check = "dpis verify ledger.jsonl --model model.safetensors"
        yield tag("p", "Check it yourself, in the run's folder: ", tag("code", check))


def _versions(run: RunReport) -> str:
    versions = run.summary["versions"]
    return "Made with " + ", ".join(f"{name} {versions[name]}" for name in versions) + "."
