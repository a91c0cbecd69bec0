"""The server that forks the processes of the tests. It imports torch once, for four seconds of a core."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import threading
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import lines

# The threads of numpy and scipy wait for each other: on busy cores L-BFGS takes four times as long with two.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# What nearly every worker imports. The compiler and the sharded wrappers are here because DDP and the first gather
# import them.
PRELOADED = ["torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor.parallel", "pytest", "fullrank"]
# What the workers of some files import, at one second and more; the server does if the collected files have.
COSTLY = ["hypothesis", "sklearn.metrics", "torchmetrics"]


class OwnedProcess(ForkServerProcess):
    """A process that ends with the one that started it; the lines that it executes are those of the test it serves."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.test = os.environ.get("PYTEST_CURRENT_TEST", "")

    def run(self) -> None:
        end_with_parent()
        gc.freeze()  # what the server has imported stays
        lines.begin(self.test)
        super().run()


class ServerContext(ForkServerContext):
    """The context of Python's server, with processes of our own kind."""

    Process = OwnedProcess


def process_context(*more: str, preloaded: Sequence[str] = PRELOADED) -> Any:
    """Return the multiprocessing context of the tests: fresh processes, which have imported torch already if possible.

    The server that forks them is started by ``exec`` and runs nothing but imports, so they share no state with pytest.
    A process that came from the server uses it too, where Python would start another one.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    server = forkserver._forkserver
    if sys.version_info < (3, 14) and server._forkserver_address is not None and server._forkserver_pid is None:
        server.ensure_running = lambda: None
    context = ServerContext()
    context.set_forkserver_preload([*preloaded, *more, *(name for name in COSTLY if name in sys.modules)])
    return context


def end_with_parent() -> None:
    """End this process as soon as the one that started it has ended, also if that was killed."""
    parent = multiprocessing.parent_process()

    def wait() -> None:
        parent.join()
        os._exit(1)

    if parent is not None:
        threading.Thread(target=wait, daemon=True).start()
