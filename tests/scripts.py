"""Run a script or a module as a program in new processes, which have imported torch already.

``python script.py`` spends four seconds on imports, and torchrun three times as much for two processes. Here the
processes come from the server of ``processes.process_context``. They get their own arguments, environment, folder and
output, and the variables that torchrun sets. :func:`run_under_agent` has the agent of torchrun start the processes, and
start them again when one has died.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import process_context

KINDS = ("out", "err")
GRACE_S = 10  # how long the other processes may live after one has failed


def imported(path: Path) -> Any:
    """Import a script of another folder, which finds the files next to it as if it was run."""
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    return importlib.import_module(path.stem)


class Done(NamedTuple):
    """How a program ended: the exit status that is not 0 if there is one, and the output of all processes."""

    returncode: int
    stdout: str
    stderr: str


def run_script(script: str | Path, *arguments: object, cwd: Path, processes: int = 0, limit_s: float = 120) -> Done:
    """Run a Python file, or a module by its dotted name, in one process, or in ``processes`` as torchrun would."""
    with tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
        environment = {"OMP_NUM_THREADS": "1"}
        if processes:
            # The test holds the store, as torchrun's agent does, so the port is one that is free.
            store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(0, limit_s))
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
            environment |= {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
            environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        started = []
        for rank in range(processes or 1):
            own = environment | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {})
            options = (str(script), [str(argument) for argument in arguments], own, str(cwd), f"{folder}/{rank}")
            process = process_context().Process(target=_program, args=options)
            process.start()
            started.append(process)
        is_late, codes = _wait(started, limit_s)
        outputs = [Path(folder, f"{rank}.{kind}") for kind in KINDS for rank in range(len(started))]
        texts = [path.read_text("utf-8") if path.exists() else "" for path in outputs]
    stdout, stderr = "".join(texts[: len(started)]), "".join(texts[len(started) :])
    if is_late:
        raise TimeoutError(f"{script} timed out after {limit_s} s, with the output\n{stdout}{stderr}")
    return Done(next((code for code in codes if code), 0), stdout, stderr)


def run_under_agent(script: str | Path, *arguments: object, cwd: Path, processes: int, max_restarts: int = 0) -> Done:
    """Run a Python file in ``processes`` that torchrun's agent starts, and starts again when one of them fails."""
    with tempfile.TemporaryDirectory(prefix="fullrank-") as folder:
        options = (str(script), [str(argument) for argument in arguments], processes, max_restarts, str(cwd), folder)
        agent = process_context().Process(target=_agent, args=options)
        agent.start()
        is_late, (code,) = _wait([agent], limit_s=120)
        texts = ["".join(path.read_text("utf-8") for path in sorted(Path(folder).glob(f"*.{kind}"))) for kind in KINDS]
    if is_late:
        raise TimeoutError(f"{script} timed out, with the output\n{''.join(texts)}")
    return Done(code, *texts)


def _agent(script: str, arguments: list[str], processes: int, max_restarts: int, cwd: str, folder: str) -> None:
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _write_to(f"{folder}/agent")
    # A function instead of a command, so that the processes are forked with torch imported.
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        max_restarts=max_restarts,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method=process_context().get_start_method(),
    )
    elastic_launch(config, _program_of_agent)(script, arguments, cwd, folder)


def _program_of_agent(script: str, arguments: list[str], cwd: str, folder: str) -> None:
    _program(script, arguments, {"OMP_NUM_THREADS": "1"}, cwd, f"{folder}/{os.environ['RANK']}")


def _wait(processes: list[Any], limit_s: float) -> tuple[bool, list[int]]:
    """Return whether the limit was reached, and the exit codes.

    Processes that outlive the limit, or the failure of another one by the grace, are killed.
    """
    deadline = time.monotonic() + limit_s
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if any(process.exitcode for process in processes):
            deadline = min(deadline, time.monotonic() + GRACE_S)
        time.sleep(0.02)
    is_late = any(process.is_alive() for process in processes) and not any(process.exitcode for process in processes)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return is_late, [process.exitcode for process in processes]


def _program(script: str, arguments: list[str], environment: dict[str, str], cwd: str, output: str) -> None:
    _write_to(output)
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    sys.argv = [script, *arguments]
    torch.multiprocessing.spawn = partial(_spawn, output)
    try:
        if script.endswith(".py"):
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
        else:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
    except Exception as error:
        # As the interpreter would: from the script's own frame on, through the hook.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != script:
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace or error.__traceback__)
        sys.exit(1)


def _spawn(output: str, function: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 1) -> None:
    """Be ``torch.multiprocessing.spawn``, with processes of the server."""
    method = process_context().get_start_method()
    torch.multiprocessing.start_processes(_spawned, (output, function, *args), nprocs, start_method=method)


def _spawned(rank: int, output: str, function: Callable[..., None], *args: Any) -> None:
    _write_to(output)
    function(rank, *args)


def _write_to(output: str) -> None:
    """Send what this process prints to files; one that was started again continues those of its predecessor."""
    for number, kind in enumerate(KINDS, start=1):
        os.dup2(os.open(f"{output}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
