"""Real processes for the distributed tests: one pool of gloo workers per world size, shared by the whole run.

A test calls ``pool(function, *args)``. The function stands at the top level of a module, usually in the file of the
test: every rank imports that module and runs ``function(rank, *args)`` inside one process group over a file store. The
results come back in rank order. A worker that raises sends its traceback back; a pool that does not answer within the
limit, or of which a process has died, is killed and fails.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import lines
import torch
from processes import process_context

LIMIT_S = 180  # a hang must fail the test, never the whole run, and a busy machine neither
THREADS = int(os.environ.get("FULLRANK_TEST_THREADS") or 1)  # of each process
GRACE_S = 5  # how long the others may take to report after one rank has failed


class RemoteError(AssertionError):
    """A worker raised; the text is its traceback."""


def _serve(rank: int, world_size: int, store: str, tasks: Any, results: Any) -> None:
    import datetime
    import warnings

    import torch.distributed as dist

    torch.set_num_threads(THREADS)
    warnings.simplefilter("ignore")  # pytest's filters do not reach here; tests of warnings set their own
    timeout = datetime.timedelta(seconds=LIMIT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    while (task := tasks.get()) is not None:
        test, function, args = task
        lines.begin(test)
        forget_hints()
        try:
            results.put((rank, True, function(rank, *args)))
        except BaseException:
            results.put((rank, False, traceback.format_exc()))
    dist.barrier()
    dist.destroy_process_group()
    results.close()
    results.join_thread()
    os._exit(0)  # gloo's threads may abort the interpreter's own teardown


class WorkerPool:
    """``world_size`` processes that run functions together."""

    def __init__(self, world_size: int) -> None:
        context = process_context()
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="fullrank-")
        store = os.path.join(self._folder.name, "store")
        self._tasks = [context.Queue() for _ in range(world_size)]
        self._results = context.Queue()
        self._processes = [
            context.Process(
                target=_serve, args=(rank, world_size, store, self._tasks[rank], self._results), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in self._processes:
            process.start()
        self.broken = False

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run ``function(rank, *args)`` on every rank and return the results in rank order.

        Results travel as bytes: return numbers, strings, numpy arrays or lists of them, not tensors.
        """
        if self.broken:
            raise RemoteError("the pool was closed after an earlier failure")
        for tasks in self._tasks:
            tasks.put((os.environ.get("PYTEST_CURRENT_TEST", ""), function, args))
        results: dict[int, Any] = {}
        failures: list[str] = []
        missing = {*range(self.world_size)}
        for _ in range(self.world_size):
            try:
                rank, succeeded, value = self._answer(missing, GRACE_S if failures else LIMIT_S)
            except queue.Empty:
                failures += [f"rank {rank}: {self._state(rank)}" for rank in sorted(missing)]
                break
            missing.remove(rank)
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"rank {rank}:\n{value}")
        if failures:
            for process in self._processes:
                process.kill()  # the other ranks may stand in a collective that will never end
            self.close()
            raise RemoteError("\n".join(failures))
        return [results[rank] for rank in range(self.world_size)]

    def _answer(self, missing: set[int], limit_s: float) -> Any:
        """Return the next answer; ``queue.Empty`` at the limit, or as soon as one of the ``missing`` ranks has died."""
        end = time.monotonic() + limit_s
        while True:
            # Before the queue is read: what a process sent before it died still arrives.
            is_over = time.monotonic() > end or any(not self._processes[rank].is_alive() for rank in missing)
            try:
                return self._results.get(timeout=0.2)
            except queue.Empty:
                if is_over:
                    raise

    def _state(self, rank: int) -> str:
        status = self._processes[rank].exitcode
        if status is None:
            return "no answer"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def close(self) -> None:
        """End the processes; a broken pool is replaced at its next use."""
        if self.broken:
            return
        self.broken = True
        for tasks in self._tasks:
            tasks.put(None)
        for process in self._processes:
            process.join(timeout=GRACE_S)
            if process.is_alive():
                process.kill()
        self._folder.cleanup()


_pools: dict[tuple[int, str], WorkerPool] = {}


def get_pool(world_size: int, name: str = "") -> WorkerPool:
    """Return the pool of this size and name, starting it at the first use and again after a failure."""
    if (world_size, name) not in _pools or _pools[world_size, name].broken:
        _pools[world_size, name] = WorkerPool(world_size)
        _pools[world_size, name](_refuse_device)
    return _pools[world_size, name]


def _refuse_device(rank: int) -> None:
    """Let the import of device.py raise: ``fully_shard`` of later tests would shard over the simulated device."""
    sys.modules["device"] = None  # type: ignore[assignment]


def close_pools() -> None:
    """End all pools; called once at the end of the run."""
    for pool in _pools.values():
        pool.close()
    _pools.clear()


def forget_hints() -> None:
    """Let the losses give again what they warn of once: a test does not depend on those before it."""
    if "fullrank.losses.hints" in sys.modules:
        sys.modules["fullrank.losses.hints"]._HINTS.clear()


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the class, as :func:`class_of` names it, and the text of what ``call`` raises."""
    try:
        call()
    except (ValueError, TypeError, RuntimeError) as error:
        return class_of(error), str(error)
    return "none", ""


def class_of(error: BaseException) -> str:
    """Return the name of the class of ``error``; of a ``RankError``, the built-in class that it also is."""
    return type(error).__name__.removeprefix("Rank")
