"""Read the metadata in the peers' files, and create their virtual environments, two at a time."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from measure import DATA

PEERS, READERS = Path(__file__).with_name("peers"), Path(__file__).with_name("readers")
ENVIRONMENTS = DATA / "environments"
TASKS = {  # task -> the function of a peer that performs it
    "stream": "stream",
    "arrays": "arrays",
    "decode": "decode",
    "crop": "crop",
    "train": "crop",
    "random": "places",
    "write": "write",
    "index": "index",
    "resume": "restore",
    "first": "stream",
    "cold": "stream",
}


@dataclass(frozen=True)
class Peer:
    """The metadata in a peer's file, read without importing it."""

    file: str  # the module's name: a package's own name would hide it, hence the "_" at some ends
    about: str
    packages: tuple[str, ...]
    system: tuple[str, ...]
    pip: tuple[str, ...]
    own: bool
    threads: bool | tuple[str, ...]  # in all tasks, in none, or in these
    cannot: dict[str, str]
    form: dict[str, str]  # function -> what its items are, to compare them with their like (`views`)
    decoders: tuple[str, ...]  # of images; if more than one, they are passed to the functions
    functions: frozenset[str]

    @property
    def name(self) -> str:
        return self.file.rstrip("_")

    @property
    def ours(self) -> bool:
        return self.name.startswith("tarshards")

    def threaded(self, task: str) -> bool:
        """Return whether the workers of a task are threads, with at least one."""
        return self.threads is True or (self.threads is not False and TASKS[task] in self.threads)

    def decoders_of(self, task: str) -> tuple[str, ...]:
        """Return the decoders to measure in a task, or one without a name if it decodes nothing."""
        return self.decoders if self.decoders and TASKS[task] in ("decode", "crop") else ("",)

    def reason(self, task: str) -> str | None:
        """Return why the peer cannot do a task, or None."""
        function = TASKS[task]
        if function in self.functions and task not in self.cannot:
            return None
        return self.cannot.get(task) or self.cannot.get(function, "has no function for it here")


def read_peer(path: Path) -> Peer:
    """Return the metadata in a peer's file."""
    tree = ast.parse(path.read_text())
    constants: dict[str, Any] = {
        "SYSTEM": (),
        "PIP": (),
        "OWN": False,
        "THREADS": (),
        "PACKAGES": (),
        "CANNOT": {},
        "FORM": {},
        "DECODERS": (),
    }
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name in ("PACKAGES", "SYSTEM", "PIP", "OWN", "THREADS", "CANNOT", "FORM", "DECODERS"):
                constants[name] = ast.literal_eval(node.value)
    named = {key.lower(): value for key, value in constants.items()}
    functions = frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return Peer(path.stem, (ast.get_docstring(tree) or "").split("\n")[0], functions=functions, **named)


def all_peers() -> list[Peer]:
    """Return every peer, ours first."""
    peers = [read_peer(path) for path in PEERS.glob("[!_]*.py")]
    return sorted(peers, key=lambda peer: (not peer.ours, peer.name))


def is_here(peer: Peer) -> bool:
    """Return whether the running environment has the peer's packages, of any version."""
    try:
        return all(version(re.split("[=<>;@[ ]", package)[0]) for package in peer.packages)
    except PackageNotFoundError:
        return False


def make(peer: Peer) -> str:
    """Return the Python of a peer's environment, created if missing; raise OSError with pip's message."""
    if not peer.packages:
        return sys.executable
    folder = ENVIRONMENTS / peer.file
    made, failed = folder / "packages.json", ENVIRONMENTS / f"{peer.file}.failed.json"
    wanted = {"packages": list(peer.packages), "pip": list(peer.pip)}
    for kept in made, failed:
        known = json.loads(kept.read_text()) if kept.exists() else {}
        if {key: known.get(key) for key in wanted} == wanted:
            if "error" in known:
                raise OSError(known["error"])
            return str(folder / "bin" / "python")
    python = str(folder / "bin" / "python")
    if not Path(python).exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True, capture_output=True)
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *peer.pip, *peer.packages]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        needs = f"; it needs Debian's {', '.join(peer.system)}" if peer.system else ""
        error = f"pip install failed: {' '.join(lines[-1:])[:300]}{needs}"
        failed.write_text(json.dumps({**wanted, "error": error}))
        raise OSError(error)
    made.write_text(json.dumps(wanted))
    failed.unlink(missing_ok=True)
    return python


def python_with(module: str, *environments: str) -> str | None:
    """Return the Python that has a module: of one of these environments of the suite, else this one; None if none."""
    for environment in environments:
        folder = ENVIRONMENTS / environment
        if list(folder.glob(f"lib/python*/site-packages/{module}")):
            return str(folder / "bin" / "python")
    return sys.executable if find_spec(module) else None


def make_for_reader(module: str) -> tuple[str, tuple[str, ...]]:
    """Return the Python for a file in `readers/`, and its packages: those of the peer of its name, or its own."""
    file = f"{module}.py"
    peer = read_peer(PEERS / file if (PEERS / file).exists() else READERS / file)
    return make(peer), peer.packages


def try_again() -> None:
    """Forget which environments could not be created: what they need may be installed by now."""
    for failed in ENVIRONMENTS.glob("*.failed.json"):
        failed.unlink()


def make_all(peers: list[Peer], say: Any = print) -> dict[str, str | OSError]:
    """Return the Python of each peer's environment, or the error of creating it."""

    def made(peer: Peer) -> str | OSError:
        try:
            python = make(peer)
        except (OSError, subprocess.SubprocessError) as exc:
            exc = OSError(str(exc))
            say(f"environment of {peer.name}: {exc}")
            return exc
        say(f"environment of {peer.name}: there")
        return python

    ENVIRONMENTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        return dict(zip((peer.file for peer in peers), pool.map(made, peers)))
