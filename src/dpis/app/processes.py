"""A command on several processes: started by torch's own launcher, or by yours, and speaking with one voice."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpis.errors import DpisError, InputError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from dpis.group import Group

INTERRUPTED = 130
"""The exit code after Ctrl-C, as shells have it."""

TIMEOUT = 1800.0
"""For so many seconds a process waits for the others, unless said otherwise: the first computes features for all."""

ENDING = 600
"""So many seconds a process may take to finish its step and save after Ctrl-C. A second one stops it at once."""

_OURS = "dpis-"
"""How the name of a launch begins that is our own."""

_OF_ANOTHER = re.compile(r"dpis: error: rank \d+ stopped: ")
"""What a process says that stopped because another did."""


# ── in each of the processes ─────────────────────────────────────────────────────────────────────────


def started_as_one_of_several() -> bool:
    """Whether a launcher has told this process its place among others."""
    ranks = os.environ.get("WORLD_SIZE", "")
    return "RANK" in os.environ and ranks.isdecimal() and int(ranks) > 1


def started_here() -> bool:
    """Whether that launcher is `launch`."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_OURS)


@contextmanager
def connected(timeout: float | None) -> Iterator[Group]:
    """All processes that a launcher has started for this command, connected; or this one alone.

    Args:
        timeout: for how many seconds each of them waits for the others.

    Raises:
        InputError: they cannot be reached.
    """
    import torch
    import torch.distributed as dist

    from dpis.group import current_group

    if not started_as_one_of_several():
        yield current_group()
        return
    backend, here = "gloo", int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        backend = "cpu:gloo,cuda:nccl"
        if here < torch.cuda.device_count():
            torch.cuda.set_device(here)
    if "OMP_NUM_THREADS" not in os.environ:
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(max(1, torch.get_num_threads() // beside))
    waiting = timedelta(seconds=TIMEOUT if timeout is None else timeout)
    try:
        dist.init_process_group(backend, timeout=waiting)
    except (RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise InputError(
            f"rank {os.environ['RANK']} cannot reach the other processes ({reason}): start all of them by torchrun, "
            "with the same --rdzv-endpoint on every machine, or one machine alone by `dpis train --processes`"
        ) from None
    try:
        yield current_group()
    finally:
        dist.destroy_process_group()  # its threads would abort a process that ends around them


def tell(line: str, code: int) -> None:
    """A command's last words: once for all processes, by whoever started them or else by rank 0.

    Args:
        line: which tells it.
        code: that this process ends with.
    """
    alone = not started_as_one_of_several()
    if not alone and code != INTERRUPTED:
        _note_for_launcher(line)
    leads = alone or os.environ["RANK"] == "0"
    if leads and (code == INTERRUPTED or not started_here()):
        print(line, file=sys.stderr)


def _note_for_launcher(line: str) -> None:
    """Where torch's launcher looks for the cause of a failure, in its form."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        told = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": told}))


# ── in the one that starts them ──────────────────────────────────────────────────────────────────────


class ProcessesError(DpisError, RuntimeError):
    """Of the processes that were started one came to its end without a word of its own.

    Args:
        message: what is known of it.
        code: to end with.
    """

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def launch(arguments: Sequence[str], processes: int) -> int:
    """Run the same command in so many connected processes of this machine, by torch's launcher.

    Rank 0 has the terminal; what the others write is kept, and shown if one of them breaks.

    Returns:
        The exit code: 0, 2 after bad input, 130 after Ctrl-C.
    """
    import logging
    import secrets

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    folder = tempfile.mkdtemp(prefix="dpis-processes-")  # of mode 0700
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=_OURS + secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(folder, dict.fromkeys(range(1, processes), Std.ALL)),
        shutdown_timeout=ENDING,
    )
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # the launcher's own view of an end that we tell in one line
    try:
        elastic_launch(config, sys.executable)("-m", "dpis", *arguments)
    except ChildFailedError as failed:
        return _told_by(failed.failures, Path(folder))
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    finally:
        logging.disable(before)
        shutil.rmtree(folder, ignore_errors=True)
    return 0


def _told_by(failures: dict[int, ProcessFailure], logs: Path) -> int:
    """One line of those that the processes had to say: the nearest to the cause. Returns the exit code."""
    if any(one.exitcode == INTERRUPTED for one in failures.values()):
        return INTERRUPTED
    for rank, one in sorted(failures.items()):
        if (
            one.exitcode < 0 and one.signal_name() != "SIGTERM"
        ):  # which the launcher sends to the rest
            _show(logs, rank)
            raise ProcessesError(f"rank {rank} was ended by {one.signal_name()}. {_go_on()}", 1)
    broken = [rank for rank, one in sorted(failures.items()) if one.exitcode == 1]
    for rank in broken[:1]:
        _show(logs, rank)
        raise ProcessesError(f"rank {rank} broke off, as shown above. {_go_on()}", 1)
    told = [line for _, one in sorted(failures.items()) if (line := _words(one.message))]
    own = [line for line in told if not _OF_ANOTHER.match(line)]
    for line in (own or told)[:1]:
        print(line, file=sys.stderr)
        return 2
    codes = ", ".join(f"rank {rank}: {one.exitcode}" for rank, one in sorted(failures.items()))
    raise ProcessesError(
        f"the processes ended without a word (exit codes of {codes}). {_go_on()}", 1
    )


def _show(logs: Path, rank: int) -> None:
    """What a process wrote; rank 0 wrote it on the screen."""
    for log in logs.rglob(f"{rank}/stderr.log"):
        sys.stderr.write(log.read_text(errors="replace"))


def _words(message: Any) -> str:
    return str(message.get("message", "")) if isinstance(message, dict) else ""


def _go_on() -> str:
    from dpis.group import HOW_TO_GO_ON

    return HOW_TO_GO_ON
