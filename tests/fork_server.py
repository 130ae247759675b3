"""Tools, and a Python, that start in milliseconds: forks of one process that has imported the package.

Each tool on the PATH that :func:`serving` makes is fork_client.c, compiled. It sends its open files to the server,
which reads the rest of what a process is given (arguments, environment, directory, umask, ignored signals) in /proc. A
fork of the server becomes the tool; the client passes signals on to it, and ends as it ends. If the client is killed,
so is the tool.

A tool starts in a process of its own where a fork would differ: with other settings that Python or a package reads
while it is imported, with other limits, in other namespaces, and where the server has ended. Four differences are left:
the tool's number is not the client's, its parent is the server, its process group is its own, and /proc shows the
server's command line and environment. Tests of these, of kill -9, and of what happens while Python starts take
``path_with_started_tools``.

The Python is for processes that import torch. It knows the options ``-c``, ``-m``, ``-u`` and ``-W``; with others it
starts as a process of its own. Its end frees nothing, and what warns while it is imported has done so: tests of how a
program begins and ends take ``sys.executable``.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import fcntl
import gc
import multiprocessing
import os
import pkgutil
import resource
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
BIN = ROOT / "bin"
#: The packages whose modules are imported; those of the others need torch, or programs rarely do.
PRELOADED = ("cli", "verbs", "index", "storage", "samples", "write", "run", "tar", "epoch", "stream", "formats", "feed")
#: What the Python has imported, besides.
IN_PYTHON = [
    "torch.distributed.run",
    "torch.utils.data",
    "torch._dynamo",  # which the first optimizer imports, in seconds
    "torchvision",
    "webdataset",
    "pytest",
    "hypothesis",
    "PIL.Image",
]
IN_PYTHON += ["tarshards.loaders.torch.shard_loader", "tarshards.loaders.arrays.array_loader", "tarshards.webdataset"]
PYTHON = "python"
MOST = 253  # files that one message takes: SCM_MAX_FD
NUMBER = struct.Struct("i")
MADV_COLLAPSE = 25
ALIVE = "alive"  # a pipe in a folder of shared servers, which the folder's maker holds open


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Put all tools into *folder*, and serve them."""
    server = begin(folder, [tool.name for tool in BIN.iterdir()], BIN)
    try:
        yield
    finally:
        os.kill(server, signal.SIGTERM)
        os.waitpid(server, 0)


def make_shared_folder() -> Path:
    """Return a new folder for servers that several processes share, and that end with this one."""
    folder = Path(tempfile.mkdtemp(prefix="forks-"))
    os.mkfifo(folder / ALIVE)
    os.open(folder / ALIVE, os.O_RDWR)
    return folder


def share(folder: Path, name: str, names: list[str], tools: Path | None = None) -> Path:
    """Return the folder *name* in a shared *folder*, with the programs of ``begin``.

    The first process that asks for it begins the server.
    """
    own = folder / name
    with open(folder / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not own.exists():
            own.mkdir()
            begin(own, names, tools, os.open(folder / ALIVE, os.O_RDONLY))
    return own


def begin(folder: Path, names: list[str], tools: Path | None = None, stdin: int | None = None) -> int:
    """Put programs of these *names* into *folder*, and begin to serve them: tools, or a Python.

    Returns the process of the server. It ends with this one, or with the writers of the pipe *stdin*.
    """
    client, source = folder / ".client", Path(__file__).with_name("fork_client.c")
    definitions = {"SOCKET": folder / ".socket", "PYTHON": sys.executable, "BIN": tools or ""}
    subprocess.run(
        ["cc", "-O1", *(f'-D{name}="{value}"' for name, value in definitions.items()), "-o", client, source], check=True
    )
    for name in names:
        os.link(client, folder / name)
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}  # one thread: it forks
    command = [sys.executable, __file__, definitions["SOCKET"], *(() if tools else IN_PYTHON)]
    stdin = os.pipe()[0] if stdin is None else stdin
    reading, stdout = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, stdin, 0), (os.POSIX_SPAWN_DUP2, stdout, 1)]
    server = os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)
    os.close(stdin)
    os.close(stdout)
    assert os.read(reading, 1), "it listens"
    os.close(reading)
    return server


class Client:
    """The environment of the process *pid*; *files* are its open files here, by their numbers there."""

    def __init__(self, pid: int, files: dict[int, int]):
        self.pid, self.files = pid, files
        self.words = self._entries("cmdline")
        self.environment = dict(entry.split(b"=", 1) for entry in self._entries("environ") if b"=" in entry)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":", 1) for line in lines)
        self.umask, self.ignored = int(status["Umask"], 8), int(status["SigIgn"], 16)
        self.surroundings = surroundings(pid)

    def _entries(self, name: str) -> list[bytes]:
        return Path(f"/proc/{self.pid}/{name}").read_bytes().split(b"\0")[:-1]


def surroundings(pid: int) -> list[object]:
    """Return the properties that a fork inherits and cannot take over from process *pid*: namespaces and limits."""
    limits = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
    namespaces = [os.readlink(f"/proc/{pid}/ns/{name}") for name in ("mnt", "net", "pid", "user")]
    return [*namespaces, *(resource.prlimit(pid, limit) for limit in limits)]


def settings(environment: dict[bytes, bytes]) -> tuple[dict[bytes, bytes], bool]:
    """Return the variables of *environment* that Python and packages read at start; last, whether it requests UTF-8."""
    read = {name: value for name, value in environment.items() if name.startswith((b"PYTHON", b"FSSPEC_"))}
    read.pop(b"PYTHON_EXEC", None)  # which torchrun reads
    if read.get(b"PYTHONUTF8") == b"1":
        del read[b"PYTHONUTF8"]
        return read, True
    return read, locale_of(coerced(environment)) == b"C.UTF-8"


def locale_of(environment: dict[bytes, bytes]) -> bytes:
    return next(filter(None, map(environment.get, (b"LC_ALL", b"LC_CTYPE", b"LANG"))), b"C")


def coerced(environment: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Return the environment that Python makes of it: with UTF-8, where it names no locale (PEP 538)."""
    if not environment.get(b"LC_ALL") and locale_of(environment) in (b"C", b"POSIX"):
        return {**environment, b"LC_CTYPE": b"C.UTF-8"}
    return environment


class Server:
    """Forks for each client that connects, and tells it how the fork has ended."""

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.like = settings(dict(os.environb)), surroundings(os.getpid())
        self.selector = selectors.DefaultSelector()

    def serve(self) -> Client | None:
        """Serve until stdin ends; in a fork, return the client whose work it has to do."""
        self.selector.register(0, selectors.EVENT_READ)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        while True:
            # One at a time: what it does may concern the others.
            (key, _), *_ = self.selector.select()
            if key.fileobj == 0:
                return None
            if client := key.data():
                return client

    def _accept(self) -> Client | None:
        connection, _ = self.listener.accept()
        message, files, *_ = socket.recv_fds(connection, NUMBER.size * (MOST + 1), MOST)
        try:
            pid, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            client = Client(pid, dict(zip(array.array("i", message)[1:], files)))
            like = settings(client.environment), client.surroundings
            fork = os.fork() if like == self.like and is_possible(client.words) else None
            if fork == 0:
                return client
        except OSError:  # it was killed meanwhile
            fork = None
        for file in files:
            os.close(file)
        if fork is None:
            connection.close()
        else:
            self._follow(fork, connection, client)
        return None

    def _follow(self, fork: int, connection: socket.socket, client: Client) -> None:
        """Tell the client the number of its *fork*, and later how it ended; kill it where the client is killed."""
        ended = os.pidfd_open(fork)

        def kill() -> None:
            self.selector.unregister(connection)
            os.kill(fork, signal.SIGKILL)

        def end() -> None:
            with suppress(KeyError):  # of one that was killed
                self.selector.unregister(connection)
            self.selector.unregister(ended)
            os.close(ended)
            _, status, used = os.wait4(fork, 0)
            note_time(client.environment, used.ru_utime + used.ru_stime)
            send(connection, status)
            connection.close()

        self.selector.register(connection, selectors.EVENT_READ, kill)
        self.selector.register(ended, selectors.EVENT_READ, end)
        send(connection, fork)


def note_time(environment: dict[bytes, bytes], seconds: float) -> None:
    """Append to the file of times.py, if there is one, what a process of the test that asked for it has taken."""
    if file := environment.get(b"TARSHARDS_TEST_TIMES"):
        item = environment.get(b"PYTEST_CURRENT_TEST", b"").decode(errors="replace").rpartition(" (")[0]
        with open(file, "a") as stream:
            stream.write(f"{item}\t{seconds}\n")


def is_possible(words: list[bytes]) -> bool:
    """Return whether a fork runs these: a tool, or a Python with no other options than those that it knows."""
    return bool(words) and (not is_python(words) or options_of(words)[1][:1] not in ([], ["-"]))


def is_python(words: list[bytes]) -> bool:
    return os.path.basename(words[0]) == PYTHON.encode()


def options_of(words: list[bytes]) -> tuple[list[str], list[str]]:
    """Return the options of a Python, and what follows them: ``-c``, ``-m``, or the name of a script; else "-"."""
    arguments, options = [*map(os.fsdecode, words[1:])], subprocess._args_from_interpreter_flags()
    arguments = arguments[len(options) * (arguments[: len(options)] == options) :]
    options = []
    while arguments[:1] in (["-W"], ["-u"]):
        options.append(arguments.pop(0))
        if options[-1] == "-W":
            options.append(arguments.pop(0))
    if arguments and arguments[0].startswith("-") and arguments[0] not in ("-c", "-m"):
        return options, ["-"]
    return options, arguments


def send(connection: socket.socket, number: int) -> None:
    with suppress(OSError):  # it was killed
        connection.send(NUMBER.pack(number))


def become(client: Client) -> None:
    """Take over all that the client was given."""
    os.chdir(f"/proc/{client.pid}/cwd")
    os.umask(client.umask)
    for number in signal.valid_signals():
        if client.ignored >> (number - 1) & 1:
            signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0)
    os.environb.clear()
    os.environb.update(coerced(client.environment))
    time.tzset()
    above = 1 + max([*client.files, *map(int, os.listdir("/proc/self/fd"))])
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, above) for number, file in client.files.items()}
    os.closerange(0, above)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    sys.stdin = sys.__stdin__ = reopened(sys.stdin)
    sys.stdout = sys.__stdout__ = reopened(sys.stdout)
    sys.stderr = sys.__stderr__ = reopened(sys.stderr)


def reopened(stream: TextIOWrapper) -> TextIOWrapper | None:
    """Open a standard stream as Python does at its start, now that its file is another one."""
    number = stream.fileno()
    try:
        os.fstat(number)
    except OSError:
        return None
    at_once = stream.write_through  # with PYTHONUNBUFFERED
    file = open(number, "wb" if number else "rb", 0 if number and at_once else -1, closefd=False)  # noqa: SIM115
    getattr(file, "raw", file).name = stream.name
    by_lines = not at_once and (number == 2 or file.isatty())
    opened = TextIOWrapper(file, stream.encoding, stream.errors, "\n", by_lines, at_once)
    opened.mode = stream.mode
    return opened


def run(words: list[bytes]) -> int:
    """Run a tool, or a Python; return its exit code."""
    name, *arguments = map(os.fsdecode, words)
    if is_python(words):
        multiprocessing.set_executable(name)  # of what it spawns
        options, arguments = options_of(words)
        sys.stdout.reconfigure(line_buffering=sys.stdout.line_buffering or "-u" in options)
        filters = [option for option in options if option not in ("-u", "-W")]
        sys.warnoptions += filters
        warnings._processoptions(filters)
        folder = "" if arguments[0] in ("-c", "-m") else os.path.dirname(os.path.abspath(arguments[0]))
    else:
        folder, arguments = str(BIN), [str(BIN / os.path.basename(name)), *arguments]
    sys.argv, sys.path[0] = arguments, folder
    sys.orig_argv = [sys.executable, *arguments]
    module = sys.modules["__main__"] = ModuleType("__main__")
    try:
        if arguments[0] == "-m":
            sys.argv.pop(0)
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        elif arguments[0] == "-c":
            exec(compile(sys.argv.pop(1), "<string>", "exec"), module.__dict__)
        else:
            module.__file__ = arguments[0]
            exec(compile(Path(arguments[0]).read_bytes(), arguments[0], "exec"), module.__dict__)
    except SystemExit as error:
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
            return 1
        return (error.code or 0) & 255
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def leave(code: int) -> None:
    """Do the interpreter's clean-up at exit, except for freeing imported modules."""
    threading._shutdown()
    atexit._run_exitfuncs()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        print(f"Exception ignored in: {sys.stdout!r}\n{type(error).__name__}: {error}", file=sys.stderr)
        code = 120
    os._exit(code)


def drop_ends() -> None:
    """Drop what torch does at exit, 70 ms in each fork: it counts times of compilation, and frees its operators."""
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    if utils := sys.modules.get("torch._dynamo.utils"):
        atexit.unregister(utils.dump_compile_times)


def collapse() -> None:
    """Move this process's memory to huge pages, where Linux can: a fork copies an entry for each, 30 ms in 500 MB."""
    size, libc = 2 << 20, ctypes.CDLL(None)
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        addresses, mode, _, _, inode, *_ = line.split()
        begin, end = (int(address, 16) // size * size for address in addresses.split("-"))
        if mode == "rw-p" and inode == "0" and begin + size < end:
            libc.madvise(ctypes.c_void_p(begin + size), ctypes.c_size_t(end - begin - size), MADV_COLLAPSE)


def main() -> None:
    sys.path[0] = str(ROOT)
    for package in PRELOADED:
        folder = ROOT / "tarshards" / package
        for module in pkgutil.walk_packages([str(folder)], f"tarshards.{package}."):
            with suppress(ImportError):  # of an extra
                import_module(module.name)
    for name in sys.argv[2:]:
        with suppress(ImportError):
            import_module(name)
    drop_ends()
    import_module("tarshards.storage.compression").find_compression(b"")  # compiles its patterns, 1 ms in each fork
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[1])
    listener.listen(128)
    gc.collect()
    gc.freeze()
    collapse()
    os.write(1, b"\n")
    server = Server(listener)  # stays in memory: collected in a fork, it would close the tool's files
    if client := server.serve():
        become(client)
        leave(run(client.words))


if __name__ == "__main__":
    main()
