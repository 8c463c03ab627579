"""Processes that stay for the tests of a module.

They are forked from one process that has imported torch, regard and transformers, which takes seconds, and has started
no thread.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

from regard import RegardError

IMPORTS = ["tests.parallel.cases", "tests.parallel.model_cases", "transformers.models.llama.modeling_llama"]


class Workers:
    """Processes of one group; each runs the functions that it is sent.

    Args:
        size: how many ranks.
        folder: for the file by which they meet.
    """

    def __init__(self, size: int, folder: Path) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(IMPORTS)
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, str(folder / "meet"), theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """What the function returns on each rank, called with the rank, the count of ranks, and the arguments."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        found = [self._received(rank, 120) for rank in range(len(self.pipes))]
        failed = [f"rank {rank}:\n{each[1]}" for rank, each in enumerate(found) if not each[0]]
        assert not failed, "\n".join(failed)
        return [each[1] for each in found]

    def failing(
        self, function: Callable[..., Any], others: dict[int, Callable[..., Any]], **arguments: Any
    ) -> list[tuple[Any, float]]:
        """(the error that each rank raised, after how many seconds); (None, 0.0) for ranks that are not asked.

        Args:
            others: what some of the ranks run in place of the function.
        """
        for rank, pipe in enumerate(self.pipes):
            if self.processes[rank].is_alive():
                pipe.send((_timed, {"function": others.get(rank, function), **arguments}))
        return [
            (None, 0.0) if rank in others or not process.is_alive() else self._received(rank, 60)[1]
            for rank, process in enumerate(self.processes)
        ]

    def _received(self, rank: int, seconds: float) -> tuple[bool, Any]:
        if not self.pipes[rank].poll(seconds):
            return False, f"no answer in {seconds} s"
        try:
            return self.pipes[rank].recv()
        except (EOFError, ConnectionResetError):
            return False, "the process ended"

    def close(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()


@contextmanager
def workers(size: int, folder: Path) -> Generator[Workers]:
    """Processes, for as long as the context is open."""
    made = Workers(size, folder)
    try:
        yield made
    finally:
        made.close()


def _timed(rank: int, size: int, *, function: Callable[..., Any], **arguments: Any) -> tuple[Exception | None, float]:
    start = time.monotonic()
    try:
        function(rank, size, **arguments)
    except RegardError as error:
        return error, time.monotonic() - start
    return None, time.monotonic() - start


def _serve(rank: int, size: int, meet: str, pipe: Connection) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meet}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            sys.stdout.flush()
            os._exit(0)  # the group's threads may wait for processes that ended
        try:
            pipe.send((True, function(rank, size, **arguments)))
        except BaseException:  # noqa: BLE001
            pipe.send((False, traceback.format_exc()))
