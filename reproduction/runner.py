"""Runs the cells that are missing, two at a time, and writes a row as each ends."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpis.errors import DpisError
from reproduction.results import Results
from reproduction.rows import Row
from reproduction.table_cells import TableCell

Say = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What came of a request for cells."""

    there: int
    run: int
    failed: tuple[str, ...]
    left: int


def run_missing(
    cells: Sequence[TableCell],
    results: Results,
    runs: Path,
    *,
    processes: int,
    budget_minutes: float,
    say: Say,
) -> Outcome:
    """Run what has no row yet, in the order given; begin no cell after the time is up.

    Args:
        cells: what is wanted.
        results: where rows are and go.
        runs: the folder for run folders. One that was interrupted is taken up by the code that began it alone: a row
            names one commit.
        processes: how many cells at once; each has its share of the cores.
        budget_minutes: of wall time.
        say: tells a person.
    """
    results.prepare()
    missing = [cell for cell in cells if results.find(cell) is None]
    waiting = list({cell.key: cell for cell in missing}.values())
    deadline = time.monotonic() + 60 * budget_minutes
    # Once: the workers keep the code they begin with, whatever is committed meanwhile.
    commit = commit_of_code()
    done, failed = 0, []
    if waiting:
        say(f"{len(cells) - len(missing)} of {len(cells)} cells are there, {len(waiting)} to run")
    with ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), _prepare_worker, (processes,)
    ) as pool:
        running: dict[Future[tuple[Row, bytes | None]], TableCell] = {}
        while running or (waiting and time.monotonic() < deadline):
            while waiting and len(running) < processes and time.monotonic() < deadline:
                cell = waiting.pop(0)
                say(f"running  {_name(cell)}")
                running[pool.submit(_work, cell, runs, commit)] = cell
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(future)
                try:
                    row, ledger = future.result()
                    results.add(row, ledger)
                except BrokenProcessPool:
                    raise  # no worker is left to go on with
                except Exception as error:  # of this cell alone
                    failed.append(f"{_name(cell)}: {error or type(error).__name__}")
                    say(f"failed   {failed[-1]}")
                    continue
                done += 1
                say(f"done     {_name(cell)}: {_accuracy(row)} in {row['wall_seconds']:.0f} s")
    for cell in cells:
        results.find(cell)  # cells that are the same run as one of these
    return Outcome(len(cells) - len(missing), done, tuple(failed), len(waiting))


def _prepare_worker(processes: int) -> None:
    import torch

    # A shell's background job comes with interrupts ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if processes > 1:
        torch.set_num_threads(1)


def _end_with_parent() -> None:
    """A runner that is killed stops its cells, as Ctrl-C would: saved, to be taken up by the next."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    parent.join()
    os.kill(os.getpid(), signal.SIGINT)
    with _at_work:
        os._exit(1)


_at_work = threading.Lock()


def _work(cell: TableCell, runs: Path, commit: str) -> tuple[Row, bytes | None]:
    with _at_work:
        return run_cell(cell, runs, commit)


def run_cell(cell: TableCell, runs: Path, commit: str) -> tuple[Row, bytes | None]:
    """Train it, verify its ledger, and make out its row."""
    from dpis.app.jobs.training import resume_job, start_job
    from dpis.runs.folder import FolderLock, RunFolder
    from dpis.training.progress import Silent

    named = (cell.table, cell.dataset, cell.method, cell.recipe, cell.accountant, cell.epsilon)
    name = "-".join(str(part) for part in named if part is not None)
    digest = hashlib.sha256(f"{cell.key} {commit}".encode()).hexdigest()[:8]
    folder = runs / f"{name}-seed{cell.seed}-{digest}"
    runs.mkdir(parents=True, exist_ok=True)
    beside = folder.with_name(f"{folder.name}.lock")
    beside.touch()
    with FolderLock(beside):  # until the row is made: longer than the run itself locks its folder
        resumed = RunFolder(folder).checkpoint.exists()
        if resumed:
            job = resume_job(folder, Silent())
        else:
            if folder.exists():  # finished, and killed before its row was written
                shutil.rmtree(folder)
            job = start_job(cell.job(folder), Silent())
        row, ledger = _row(cell, folder, job.result.summary.as_json(), commit)
    return {**row, "wall_seconds": round(job.wall_seconds, 1), "resumed": resumed}, ledger


def _row(
    cell: TableCell, folder: Path, summary: dict[str, Any], commit: str
) -> tuple[Row, bytes | None]:
    ledger = _verified_ledger(folder) if cell.epsilon is not None else None
    row = {
        "table": cell.table,
        "dataset": cell.dataset,
        "method": cell.method,
        "recipe": cell.recipe,
        "epsilon": cell.epsilon,
        "delta": None if cell.epsilon is None else cell.options["delta"],
        "seed": cell.seed,
        "test_accuracy": summary["metrics"]["accuracy"],
        "measured_on": summary["recipe"]["measured_on"],
        "accountant": cell.accountant,
        "gradient_evaluations": summary["gradient_evaluations"],
        "command": cell.command,
        "commit": commit,
        "claim": summary["claim"],
        "machine": _machine(),
        "options": cell.json_options,
        "history": summary["history"],
        "ledger_sha256": None if ledger is None else hashlib.sha256(ledger).hexdigest(),
        "verified": ledger is not None,
    }
    return row, ledger


def _verified_ledger(folder: Path) -> bytes:
    from dpis.accounting import verify_ledger

    path = folder / "ledger.jsonl"
    verdict = verify_ledger(path, folder / "model.safetensors")
    if not verdict.holds:
        raise DpisError(f"the ledger in {folder.name} does not verify: {verdict.problem}")
    return path.read_bytes()


def commit_of_code() -> str:
    """The commit of this code, with a mark if it was changed since; rows written beside it are no change."""
    here = Path(__file__)
    root = here.parents[1]
    try:
        own = str(here.relative_to(root))
        _git(root, "ls-files", "--error-unmatch", own)  # not a repository around a venv
        commit = _git(root, "rev-parse", "--short=12", "HEAD").strip()
        changed = _git(root, "status", "--porcelain", "--", "src", here.parent.name).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}-dirty" if changed else commit


def _git(folder: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def _machine() -> str:
    import torch

    cores = multiprocessing.cpu_count()
    return f"{platform.machine()}, {_processor()}, {cores} cores, {torch.get_num_threads()} thread(s) a run"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown processor"
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else "unknown processor"


def _name(cell: TableCell) -> str:
    privacy = (
        "not private" if cell.epsilon is None else f"epsilon {cell.epsilon:g} {cell.accountant}"
    )
    return f"{cell.table} {cell.dataset} {cell.method} {cell.recipe} {privacy} seed {cell.seed}"


def _accuracy(row: Row) -> str:
    accuracy = row["test_accuracy"]
    return "no accuracy" if accuracy is None else f"{100 * accuracy:.2f} %"
