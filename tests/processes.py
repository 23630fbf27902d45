"""Python programs in processes that have imported torch before they begin: `run` and `Popen`, as `subprocess` has them.

A fresh interpreter takes seconds to import torch, zarr and this project. Here a server does it once for each process of
tests, imports only, and forks for each program. The forked process takes the place of a fresh interpreter: command
line, ``__main__``, working folder, environment, streams, process group, signals, and generators of random numbers are
those that the program would have had, it ends as an interpreter ends, and the Python programs that it starts with
`subprocess` itself are forked, too.

What is left of the difference: modules are imported before the program, without its folder and its environment; the
garbage collector knows nothing of them, and they and what C++ has to take down of torch stay at the end; the hash seed
is 0; the parent process is the server. Tests of that, and one of each kind of program, use `subprocess`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib.machinery
import io
import json
import multiprocessing.process
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

ROOT = Path(__file__).parents[1]
IMPORTED = (
    *("numpy", "scipy.linalg", "scipy.stats", "torch._dynamo", "torch.utils.data", "h5py", "zarr", "rich"),
    *("multiprocessing.synchronize", "tracer.stores.hdf5.store", "tracer.stores.zarr.store"),
    *("tracer.recording.certifying.rehearsal", "tracer.recording.launching.script"),
    *("analyze.tables.results", "tracereel.main"),
)
"""What the server imports before it forks."""
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_READ_BEFORE = re.compile("PYTHON(?!PATH$|UNBUFFERED$)|LD_|MALLOC_|GLIBC_|OMP_|MKL_|OPENBLAS_|HDF5_|TORCH_LOGS")
"""Variables of the environment that an interpreter or a library reads before a program could begin."""
_PYTHON = sys.executable
_NUMBER = struct.Struct("!i")

_servers: dict[str, tuple[bytes, dict[str, str]]] = {}
"""Where each server listens, in the abstract namespace of Linux, and its environment, by its ``LD_PRELOAD``."""
_imported: dict[str, types.ModuleType] = {}
"""The modules of others, and of this project, that the server has imported."""


class _Program(NamedTuple):
    """A command line of Python's."""

    warnings: Sequence[str]
    unbuffered: bool
    way: str
    """``-c``, ``-m``, or nothing for a script."""
    what: str
    arguments: Sequence[str]

    @classmethod
    def of(cls, command: Any) -> _Program | None:
        """What a command runs; None if it is not Python's, or has options that only a fresh interpreter can follow."""
        if isinstance(command, (str, bytes, os.PathLike)):
            return None
        executable, *words = map(os.fsdecode, command)
        if executable != _PYTHON:
            return None
        given, unbuffered = [], False
        while words and words[0] in ("-u", "-B", "-W"):
            option = words.pop(0)
            unbuffered |= option == "-u"
            if option == "-W":
                given.append(words.pop(0))
        way = words.pop(0) if words and words[0] in ("-c", "-m") else ""
        if not words or (not way and words[0].startswith("-")):
            return None
        return cls(given, unbuffered, way, words[0], words[1:])


_Fresh = subprocess.Popen


class Popen(_Fresh):  # type: ignore[type-arg]
    """A process of a Python program that `_Program` and the environment allow to be forked.

    Any other raises `ValueError`.
    """

    only_forked = True
    _link: socket.socket | None = None

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
        restore_signals, gid, gids, uid, umask, start_new_session, process_group,
    ) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        address, begun = _served(environment.get("LD_PRELOAD", ""))
        special = executable, preexec_fn, gid, gids, uid
        plain = not (shell or pass_fds) and umask < 0 and close_fds and not any(one is not None for one in special)
        program = _Program.of(args) if plain else None
        others = [name for name, value in environment.items() if _READ_BEFORE.match(name) and begun.get(name) != value]
        if program is None or others:
            if self.only_forked:
                raise ValueError(f"{args}: this needs a fresh interpreter {others}")
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                restore_signals, gid, gids, uid, umask, start_new_session, process_group,
            )  # fmt: skip
            return
        request = {
            "program": program,
            "command": [*map(os.fsdecode, args)],
            "folder": os.path.abspath(os.fsdecode(cwd or os.curdir)),
            "environment": environment,
            "session": start_new_session,
            "group": process_group,
        }
        streams = [own if given == -1 else given for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._link = socket.socket(socket.AF_UNIX)
        self._link.connect(address)
        text = json.dumps(request).encode()
        socket.send_fds(self._link, [_NUMBER.pack(len(text))], streams)
        self._link.sendall(text)
        self.pid = _receive_number(self._link)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._link is None:
            return super()._try_wait(wait_flags)
        ready = select.poll()
        ready.register(self._link, select.POLLIN)
        if not ready.poll(0 if wait_flags & os.WNOHANG else None):
            return 0, 0
        status = _receive_number(self._link)
        self._link.close()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._link is None:
            return super()._internal_poll(_deadstate)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            except OSError:
                self.returncode = _deadstate
            finally:
                self._waitpid_lock.release()
        return self.returncode


class _Popen(Popen):
    """The same, but of what cannot be forked a process as `subprocess` begins it."""

    only_forked = False


@contextlib.contextmanager
def forked() -> Iterator[None]:
    """Have the Python programs that this process starts with `subprocess` forked, where they can be."""
    with mock.patch("subprocess.Popen", _Popen):
        yield


def run(command: Sequence[Any], **settings: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` with `Popen`."""
    with mock.patch("subprocess.Popen", Popen):
        return subprocess.run(command, **settings)


def _served(preload: str) -> tuple[bytes, dict[str, str]]:
    """The server of this process of tests for programs with these preloaded libraries, which begins with the first."""
    if preload in _servers:
        return _servers[preload]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"\0tracereel-tests-{os.getpid()}-{os.urandom(8).hex()}")
    listener.listen(100)
    environment = {**os.environ, **_ONE_THREAD, "PYTHONHASHSEED": "0"}
    environment.pop("PYTHONPATH", None)
    if preload:
        environment["LD_PRELOAD"] = preload
    command = [sys.executable, __file__, str(listener.fileno())]
    server = _Fresh(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=environment)
    _servers[preload] = listener.getsockname(), environment
    listener.close()

    def end() -> None:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()

    atexit.register(end)
    return _servers[preload]


def _receive_number(link: socket.socket) -> int:
    data = link.recv(_NUMBER.size, socket.MSG_WAITALL)
    if not data:
        raise ConnectionError("the server of processes has died")
    return _NUMBER.unpack(data)[0]


# -- the server ---------------------------------------------------------------------------------------------------


def _serve(listener: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, until stdin ends; returns in each forked process, with its request and streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ^C is for those who ask, too
    atexit.register(_leave_what_was_imported)  # first, so that it comes last
    sys.path[0] = str(ROOT)
    importlib.import_module("torch")
    # what was loaded before this is not taken down by the C library when a process ends; HDF5, later, closes its files
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)
    for name in IMPORTED:
        importlib.import_module(name)
    del sys.path[0]
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    gc.collect()
    gc.freeze()  # collections of a forked process would copy all that is imported
    _count_only_what_a_program_freezes()
    own = {"__main__", *sys.stdlib_module_names}
    _imported.update((name, module) for name, module in sys.modules.items() if name.partition(".")[0] not in own)
    for one in weakref.finalize._registry:  # type: ignore[attr-defined] # torch's operators: hundreds
        one.atexit = False
    ends = select.poll()
    ends.register(0)
    ends.register(listener)
    living: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for ready, _ in ends.poll():
            if ready == 0:
                os._exit(0)
            elif ready == listener.fileno():
                link, _ = listener.accept()
                length, streams, _, _ = socket.recv_fds(link, _NUMBER.size, 3)
                request = json.loads(link.recv(_NUMBER.unpack(length)[0], socket.MSG_WAITALL))
                pid = os.fork()
                if pid == 0:
                    for other in living:
                        os.close(other)
                    for _, other_link in living.values():
                        other_link.close()
                    listener.close()
                    _leave_the_server(request, link)
                    return request, streams
                for one in streams:
                    os.close(one)
                end = os.pidfd_open(pid)
                living[end] = pid, link
                ends.register(end, select.POLLIN)
            else:
                pid, link = living.pop(ready)
                ends.unregister(ready)
                os.close(ready)
                _, status = os.waitpid(pid, 0)
                with link, contextlib.suppress(OSError):  # who asked may have gone
                    link.sendall(_NUMBER.pack(status))


def _count_only_what_a_program_freezes() -> None:
    """Have `gc.get_freeze_count` know nothing of what the server has frozen, nor count it, which takes long."""
    frozen, count, freeze = gc.get_freeze_count(), gc.get_freeze_count, gc.freeze
    counted = False

    def freeze_more() -> None:
        nonlocal counted
        counted = True
        freeze()

    gc.freeze = freeze_more
    gc.get_freeze_count = lambda: max(0, count() - frozen) if counted else 0


def _leave_what_was_imported() -> None:
    """Have the end of a forked process take no time for modules that the server has imported: they stay."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(_imported))
    for name in _imported:
        sys.modules.pop(name, None)


def _leave_the_server(request: Mapping[str, Any], link: socket.socket) -> None:
    """Be in the right process group and end at signals, before who asked can send one."""
    if request["session"]:
        os.setsid()
    elif request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with link:
        link.sendall(_NUMBER.pack(os.getpid()))


def _become(request: Mapping[str, Any], streams: Sequence[int]) -> types.ModuleType:
    """Have all that a fresh interpreter would have; returns the module ``__main__``."""
    import numpy as np
    import torch

    program, folder = _Program(*request["program"]), request["folder"]
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    os.environ.clear()
    os.environ.update(request["environment"])
    time.tzset()
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder
    np.random.seed()  # noqa: NPY002 - the one that programs draw from; `random` does it itself
    torch.default_generator.seed()
    for one in program.warnings:
        sys.warnoptions.append(one)
        warnings._processoptions([one])  # type: ignore[attr-defined]
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _stream(number, name, program.unbuffered or bool(os.environ.get("PYTHONUNBUFFERED")))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.orig_argv = request["command"]
    sys.argv = [program.way or program.what, *program.arguments]
    first = {"-c": "", "-m": folder}.get(program.way, os.path.dirname(os.path.realpath(program.what)))
    more = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([*(os.path.abspath(one) for one in more if one), *sys.path])
    sys.path.insert(0, first)
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __loader__=importlib.machinery.BuiltinImporter)
    if not program.way:
        path = os.path.abspath(program.what)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    sys.modules["tests.processes"], sys.modules["__main__"] = sys.modules["__main__"], main
    return main


def _stream(number: int, name: str, unbuffered: bool) -> io.TextIOWrapper:
    """A standard stream, as an interpreter makes it."""
    like, writes = getattr(sys, name), number > 0
    raw = open(number, "wb" if writes else "rb", buffering=0, closefd=False)  # noqa: SIM115 - until the program ends
    raw.name = f"<{name}>"
    binary: Any = raw
    if not (writes and unbuffered):
        binary = io.BufferedWriter(raw) if writes else io.BufferedReader(raw)
    text = io.TextIOWrapper(
        binary, like.encoding, like.errors, "\n",
        line_buffering=not unbuffered and (name == "stderr" or raw.isatty()), write_through=unbuffered,
    )  # fmt: skip
    text.mode = "w" if writes else "r"
    return text


def _run(request: Mapping[str, Any], streams: Sequence[int]) -> None:
    main = _become(request, streams)
    program = _Program(*request["program"])
    try:
        if program.way == "-m":
            runpy._run_module_as_main(program.what)  # type: ignore[attr-defined]
        else:
            source = program.what if program.way else Path(program.what).read_bytes()
            exec(compile(source, "<string>" if program.way else main.__file__, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _hide_this_file(error)
        raise


def _hide_this_file(error: BaseException) -> None:
    """Have an exception that ends the program printed with the traceback that it would have had."""
    told, theirs = sys.excepthook, error.__traceback__
    while theirs is not None and theirs.tb_frame.f_code.co_filename == __file__:
        theirs = theirs.tb_next
    sys.excepthook = lambda kind, error, _: told(kind, error.with_traceback(theirs), theirs)


if __name__ == "__main__":
    # before anybody takes it by its name
    subprocess.Popen = _Popen  # type: ignore[misc]
    listener = socket.socket(fileno=int(sys.argv[1]))
    _servers[os.environ.get("LD_PRELOAD", "")] = listener.getsockname(), dict(os.environ)
    _run(*_serve(listener))
