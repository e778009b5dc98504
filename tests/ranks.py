"""Functions run by several processes that are connected by gloo, on this machine."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "dpis.training", "dpis.dropin"])


def on_ranks(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = 60.0
) -> list[Any]:
    """What the function returns on every rank, called as ``function(rank, *args)``.

    Args:
        size: how many ranks.
        function: of a module, so that it can be pickled.
        args: the same for all.
        seconds: after which a collective that waits in vain is given up.

    Raises:
        AssertionError: a rank failed or died; with what each of them said.
    """
    results = outcomes_on_ranks(size, function, *args, seconds=seconds)
    failed = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(results) if not ok]
    assert not failed, "\n".join(failed)
    return [value for _, value in results]


def outcomes_on_ranks(
    size: int, function: Callable[..., Any], *args: Any, seconds: float = 60.0
) -> list[tuple[bool, Any]]:
    """For every rank whether it returned, and what; or the words of its error. One that died says nothing."""
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, children = [], []
        for rank in range(size):
            reading, writing = _CONTEXT.Pipe(duplex=False)
            child = _CONTEXT.Process(
                target=_rank, args=(writing, store, rank, size, seconds, function, args)
            )
            child.start()
            writing.close()
            pipes.append(reading)
            children.append(child)
        results = [_received(pipe, seconds * 3) for pipe in pipes]
        for child in children:
            child.join(10)
            if child.is_alive():
                child.kill()
        return results


def _received(pipe: Any, seconds: float) -> tuple[bool, Any]:
    try:
        if not pipe.poll(seconds):
            return False, "did not end"
        ok, value = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, "died"
    return ok, value


def _rank(
    pipe: Any, store: str, rank: int, size: int, seconds: float, function: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=seconds),
    )
    try:
        result = True, function(rank, *args)
    except BaseException as error:
        last = traceback.format_exc().strip().splitlines()
        result = False, f"{type(error).__name__}: {error}\n" + "\n".join(last[-12:])
    pipe.send_bytes(pickle.dumps(result))  # tensors whole, not as shared memory
    pipe.close()
    if result[0]:
        dist.destroy_process_group()
