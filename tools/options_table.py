"""Writes docs/options.md from the option table: ``python tools/options_table.py``. A test fails when it is stale."""

from __future__ import annotations

from pathlib import Path

from dpis.app.jobs.job_options import JobOptions
from dpis.options import EVERY, PRIVATE, Knob, Privacy, Training, default_in_words, knobs

PAGE = Path(__file__).parents[1] / "docs" / "options.md"

INTRODUCTION = """# Options

`tools/options_table.py` makes this page from `src/dpis/options.py` and
`src/dpis/app/jobs/job_options.py`: do not edit it by hand. An option has one name through every
door:

| door | how it is said |
|---|---|
| command line | `dpis train --clip-norm 0.1`; `dpis plan` takes those that decide about noise |
| `dpis.train` | `privacy=dpis.Privacy(clip_norm=0.1)`, `training=dpis.Training(ema=0.95)`; the most common ones as words of their own: `epsilon=2.0` |
| `PrivacyEngine` | any option of `Privacy` as a word, `headroom=2.0`, or `privacy=dpis.Privacy(...)`; `epsilon`, `delta` and `clip_norm` have Opacus's names |
| Lightning, Hugging Face | `privacy=dpis.Privacy(...)` |

An option that has no effect on the chosen method is refused by the command line and by the engine.
"""  # noqa: E501


def page() -> str:
    """The whole page."""
    own = {name for name in knobs(JobOptions) if name not in {*knobs(Privacy), *knobs(Training)}}
    return "\n".join(
        [
            INTRODUCTION,
            *_section("`Privacy`: what protects the records", Privacy, {*knobs(Privacy)}),
            *_section("`Training`: how the model is fitted", Training, {*knobs(Training)}),
            *_section("The command line's own", JobOptions, own),
        ]
    )


def _section(title: str, table: type, names: set[str]) -> list[str]:
    """A table for every group of options."""
    lines = [f"## {title}", ""]
    chosen = {name: one for name, one in knobs(table).items() if name in names}
    for group in dict.fromkeys(one.group for one in chosen.values()):
        lines += [f"**{group}**", "", "| option | paper | default | meaning |", "|---|---|---|---|"]
        for name, one in chosen.items():
            if one.group == group:
                lines.append(
                    f"| `{name}` | {one.symbol} | {_default(table, name)} | {_meaning(one)} |"
                )
        lines.append("")
    return lines


def _default(table: type, name: str) -> str:
    default, shell = default_in_words(table, name), knobs(table)[name].shell_default
    return f"{default}; command line: {shell}" if shell else default


def _meaning(one: Knob) -> str:
    choices = f" One of {', '.join(one.choices)}." if one.choices else ""
    limits = one.bounds.removeprefix("a finite number ")
    bounds = f" {limits[0].upper()}{limits[1:]}." if limits else ""
    python = f" In Python also {one.in_python}." if one.in_python else ""
    only = " Python only." if one.python_only else ""
    unused = "" if one.used_by in (EVERY, PRIVATE) else f" Used by {', '.join(one.used_by)}."
    return (one.help + choices + bounds + python + only + unused).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
