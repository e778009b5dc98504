"""Opacus's own example scripts, read from its installed wheel, run as they are or with dpis in its place.

    python -m tests.examples.opacus_scripts mnist dpis --data mnist -- --device cpu --epochs 3

The edits below are all that is changed; docs/migration.md lists the same. Nothing of the scripts is kept here.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

STUBS = Path(__file__).parent / "stubs"
ENGINES = ("opacus", "dpis", "dpis-uniform")


@dataclass(frozen=True)
class Script:
    """One script of the wheel.

    Attributes:
        file: its name.
        stubs: the folder of stubs it runs with.
        needed: lines that must change for dpis beside ``from opacus import``, and into what.
        anyway: changes that both engines need, since the script does not run as it is.
        arguments: that it always needs.
        processes: which `torchrun` starts, if there is more than one.
    """

    file: str
    stubs: str
    needed: Mapping[str, str] = field(default_factory=dict)
    anyway: Mapping[str, str] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    processes: int = 1


SCRIPTS = {
    "mnist": Script("mnist.py", "vision"),
    "cifar10": Script(
        "cifar10.py",
        "vision",
        needed={"from opacus.grad_sample.functorch import make_functional\n": ""},
    ),
    "cifar10-ranks": Script(
        "cifar10.py",
        "vision",
        needed={"from opacus.grad_sample.functorch import make_functional\n": ""},
        anyway={
            "    if not torch.cuda.is_available():\n": "    if False:\n",
            "        device = local_rank\n": '        device = "cpu"\n',
        },
        arguments=("--local_rank", "0"),
        processes=2,
    ),
    "char-lstm": Script(
        "char-lstm-classification.py",
        "vision",
        needed={"self.encoder(row.strip())": "self.encoder(row.strip()[:20], pad_to=20)"},
    ),
    "imdb": Script(
        "imdb.py",
        "text",
        needed={"truncation=True,": 'truncation=True, padding="max_length",'},
        anyway={
            "            poisson_sampling=False,\n": "",
            "self.pool(x).squeeze()": "self.pool(x).squeeze(-1)",
        },
    ),
}


def source_of(script: Script) -> str | None:
    """The script as the wheel has it; None if Opacus is not installed."""
    try:
        files = distribution("opacus").files or []
    except PackageNotFoundError:
        return None
    for file in files:
        if str(file) == f"examples/{script.file}":
            return Path(str(file.locate())).read_text()
    return None


def edited(script: Script, source: str, engine: str, *, with_needed: bool = True) -> str:
    """The script for one engine; every edit must find its line."""
    edits = dict(script.anyway)
    if engine != "opacus" and with_needed:
        edits |= script.needed
    for old, new in edits.items():
        if old not in source:
            raise ValueError(f"{script.file} has no line {old!r}: another release of Opacus?")
        source = source.replace(old, new)
    if engine != "opacus":
        source = re.sub(r"^from opacus\b", "from dpis", source, flags=re.MULTILINE)
    if engine == "dpis-uniform":
        noise = "noise_multiplier=args.sigma,"
        source = source.replace(noise, noise + ' method="dp-sgd",')
    return source


@dataclass(frozen=True)
class Outcome:
    """What a script printed, and how long it took, on the clock and of its processors."""

    output: str
    seconds: float
    cpu_seconds: float

    def last(self, pattern: str) -> float:
        """The last number that the pattern finds in what was printed."""
        return float(re.findall(pattern, self.output)[-1])


def run(
    name: str,
    engine: str,
    arguments: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 600.0,
    with_needed: bool = True,
) -> Outcome:
    """Run a script in a folder of its own, in a process of its own."""
    script = SCRIPTS[name]
    source = source_of(script)
    if source is None:
        raise ValueError("opacus is not installed: pip install 'dpis[bench]'")
    path = folder / f"{name}-{engine}.py"
    path.write_text(edited(script, source, engine, with_needed=with_needed))
    search = os.pathsep.join(
        [str(STUBS / script.stubs), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    start, cpu = time.perf_counter(), cpu_of_children()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    started = [*launcher, str(script.processes)] if script.processes > 1 else []
    done = subprocess.run(
        [sys.executable, *started, str(path), *script.arguments, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise RuntimeError(f"{script.file} with {engine}:\n{done.stdout[-4000:]}")
    return Outcome(done.stdout, time.perf_counter() - start, cpu_of_children() - cpu)


def cpu_of_children() -> float:
    """Seconds of processor time of all processes that were started and have ended."""
    times = os.times()
    return times.children_user + times.children_system


def write_names(folder: Path, names: int = 300) -> Path:
    """Names of three invented languages, which differ in their syllables."""
    import random

    source = random.Random(0)
    languages = {
        "Coastal": ("la", "mi", "ro", "sa", "ne", "lo"),
        "Mountain": ("kor", "grat", "durk", "bron", "thak", "vorg"),
        "Steppe": ("aya", "uku", "oyi", "eze", "ibu", "ano"),
    }
    root = folder / "names"
    root.mkdir()
    for language, syllables in languages.items():
        lines = ["".join(source.choices(syllables, k=source.randint(2, 4))) for _ in range(names)]
        (root / f"{language}.txt").write_text("\n".join(line.capitalize() for line in lines))
    return root


def main() -> None:
    """Run one script and show what it prints, and its time."""
    parser = argparse.ArgumentParser(
        description="Runs one of Opacus's examples.", epilog="What follows -- goes to the script."
    )
    parser.add_argument("script", choices=SCRIPTS)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument(
        "--data",
        default="sample",
        help="sample, or the name of a local data set: see dpis data list",
    )
    parser.add_argument(
        "--names", type=int, default=300, help="how many of each language char-lstm gets"
    )
    parser.add_argument("--timeout", type=float, default=3600.0)
    own, _, theirs = " ".join(sys.argv[1:]).partition(" -- ")
    options = parser.parse_args(own.split())
    environment = {"DPIS_STUB_IMAGES": options.data, "DPIS_STUB_TEXTS": options.data}
    with tempfile.TemporaryDirectory() as folder:
        arguments = theirs.split()
        if options.script == "char-lstm" and "--data-root" not in arguments:
            arguments += ["--data-root", str(write_names(Path(folder), options.names))]
        outcome = run(
            options.script,
            options.engine,
            arguments,
            Path(folder),
            environment=environment,
            timeout=options.timeout,
        )
    lines = re.split(r"[\r\n]+", outcome.output)
    print("\n".join(line for line in lines if line.strip() and "it/s]" not in line))
    print(
        f"{options.script} with {options.engine}: {outcome.seconds:.1f} s, CPU {outcome.cpu_seconds:.1f} s"
    )


if __name__ == "__main__":
    main()
