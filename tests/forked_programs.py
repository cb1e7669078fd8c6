"""Programs in processes of their own that need not import torch again.

A process that has imported some modules, and has run nothing, waits on a socket. For each program
it forks one that runs it as `python` would. What a test starts is a client that hands on its
arguments, environment, folder and streams, and ends as the program ends. A program may itself be
such a process, that has imported more.

Tests of what the start of an interpreter does, or needs, start one of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

_HERE = os.path.abspath(__file__)


@contextlib.contextmanager
def serving(*modules: str, python: Sequence[str] = (sys.executable,)) -> Iterator[list[str]]:
    """Let a process wait for programs; yield what stands in place of `python` in a command.

    Args:
        modules: What it imports before.
        python: What it is run by: an interpreter, or what stands in place of one.
    """
    if not hasattr(os, "pidfd_open"):  # not Linux
        yield [sys.executable]
        return
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/programs"
        command = [*python, _HERE, "serve", address, *modules]
        # It ends when this process closes its input, or is gone.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline() == b"ready\n"
            yield [sys.executable, "-I", "-S", _HERE, "run", address]


def run(address: str, arguments: Sequence[str]) -> int:
    """Let a program run; return its exit status.

    Args:
        address: Of the process that waits.
        arguments: Those of `python`.
    """
    request = {"arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"\n"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode() + b"\n")
        status = int(connection.makefile().readline() or 1)
    if status < 0:
        os.kill(os.getpid(), -status)
    return status


def serve(address: str) -> dict[str, Any]:
    """Wait for programs; return what is asked for, in a process that is to run it."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        os.write(1, b"ready\n")
        while True:
            ready = select.select([0, listener], [], [])[0]
            if listener not in ready:
                os._exit(0)
            connection, _ = listener.accept()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those forked here
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                return _begin(connection)
            connection.close()


def _begin(connection: socket.socket) -> dict[str, Any]:
    """Fork once more: one process tells how the other ends, and ends it if its client is gone."""
    streams = socket.recv_fds(connection, 1, 3)[1]
    request = json.loads(connection.makefile().readline())
    program = os.fork()
    if program == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return request
    for number in (0, 1, 2, *streams):
        os.close(number)  # who reads the program's output waits until nobody can write to it
    ended = os.pidfd_open(program)
    if ended not in select.select([connection, ended], [], [])[0]:
        os.kill(program, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        connection.sendall(f"{status}\n".encode())
    os._exit(0)


def begin(request: dict[str, Any]) -> None:
    """Run a program as `python` with its arguments would, with its options `-W`, `-I`, `-X`."""
    import runpy
    import types
    import warnings

    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    first, *rest = request["arguments"]
    is_isolated = False
    while first[:2] in ("-W", "-I", "-X"):
        is_isolated |= first == "-I"
        if first == "-W":
            sys.warnoptions.append(rest.pop(0))
            warnings._processoptions(sys.warnoptions[-1:])  # pyright: ignore
        first, *rest = rest
    folders = [] if is_isolated else [""]
    if first == "-c":
        code = compile(rest[0], "<string>", "exec", dont_inherit=True)
        sys.argv[:], sys.path[:0] = ["-c", *rest[1:]], folders
        sys.modules["__main__"] = types.ModuleType("__main__")
        exec(code, vars(sys.modules["__main__"]))
    elif first == "-m":
        sys.argv[:], sys.path[:0] = rest, [os.getcwd()] if folders else []
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [first, *rest]
        sys.path[:0] = [os.path.dirname(os.path.abspath(first))] if folders else []
        runpy.run_path(first, run_name="__main__")


def _main() -> None:
    role, address, *arguments = sys.argv[1:]
    if role == "run":
        sys.exit(run(address, arguments))
    sys.path[0] = os.path.dirname(os.path.dirname(_HERE))
    import gc
    import importlib
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what packages say of each other
        for name in arguments:
            with contextlib.suppress(ImportError):  # other versions of torch lack some
                importlib.import_module(name)
    sys.path.pop(0)
    gc.collect()
    gc.freeze()
    begin(serve(address))


if __name__ == "__main__":
    _main()
