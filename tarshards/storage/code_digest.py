"""Digests of functions: equal for equal code and values, in every process and every checkout.

A digest covers the code of a function, its constants and nested functions, its defaults and its closure, and so the
arguments of a partial, the state of a callable object and the methods of its class. It covers no file names, line
numbers, comments or addresses, and sets in any order are equal. It does not cover what the function refers to by global
names: functions that it calls, modules, constants. Functions and classes of other installed packages count by name.
"""

from __future__ import annotations

import copyreg
import functools
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from hashlib import blake2b
from importlib.machinery import PathFinder
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

PLAIN = {type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented)}
#: Attributes of a class that are code.
CODE = (FunctionType, staticmethod, classmethod, property, functools._lru_cache_wrapper)


class CodeDigest(NamedTuple):
    """A digest, and the names of the values that it does not cover, each with its type."""

    digest: str
    unknown: tuple[str, ...] = ()


def digest_code(function: Any) -> CodeDigest:
    """Return a digest of a function, or of any callable or value.

    >>> digest_code(lambda x: x + 1) == digest_code(lambda x: x + 1)
    True
    >>> digest_code(lambda x: x + 1) == digest_code(lambda x: x + 2)
    False
    """
    walk = _Walk(_package_of(function))
    digest = walk.digest(function, _name_of(function))
    return CodeDigest(digest.hex(), tuple(dict.fromkeys(walk.unknown)))


def digest_source(source: bytes) -> str:
    """Return a digest of Python source that does not depend on its comments and layout."""
    with suppress(SyntaxError, ValueError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _Walk().digest(compile(source, "", "exec", dont_inherit=True), "").hex()
    return _join("source", source).hex()


def digest_module(name: str, most: int = -1) -> str | None:
    """Return the ``digest_source`` of a module, or of a file ``*.py``; None if there is no source of this name.

    The module is found as a program in this folder would, and not imported. Bytes after the first *most* do not count.
    """
    folders: Any = ["", *sys.path]
    spec = None
    try:
        for part in name.split("."):
            spec = PathFinder.find_spec(part if spec is None else f"{spec.name}.{part}", folders)
            folders = [] if spec is None else spec.submodule_search_locations or []
        path = name if spec is None else str(spec.origin)
        if not path.endswith(".py"):
            return None
        with open(path, "rb") as file:
            return digest_source(file.read(most))
    except (OSError, ImportError, ValueError, AttributeError):
        return None


def _package_of(function: Any) -> str:
    """Return the package of a function, whose code counts even if it is installed; none for one of Python."""
    while isinstance(function, functools.partial):
        function = function.func
    module = getattr(function, "__module__", None) or type(function).__module__
    package = str(module).partition(".")[0]
    return "" if isinstance(function, type) or package in sys.stdlib_module_names else package


def _name_of(value: Any) -> str:
    value = getattr(value, "func", value) if isinstance(value, functools.partial) else value
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _join(kind: str, *parts: bytes) -> bytes:
    joined = blake2b(kind.encode(), digest_size=16)
    for part in parts:
        joined.update(b"%d:" % len(part))
        joined.update(part)
    return joined.digest()


@functools.cache
def _is_installed(module: str) -> bool:
    """Return whether a module belongs to Python or to an installed package."""
    top = module.partition(".")[0]
    if top == "__main__" or top not in sys.modules:
        return False
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    file = getattr(sys.modules[top], "__file__", None) or ""
    is_package = any(folder in file for folder in ("site-packages", "dist-packages"))
    return top in sys.stdlib_module_names or is_package or any(file.startswith(f"{folder}/") for folder in folders)


class _Walk:
    """One traversal of a value: its digest is made from those of its parts."""

    def __init__(self, package: str = "") -> None:
        self.package = package
        self.unknown: list[str] = []
        self._open: list[int] = []  # the objects that contain the current one, by address
        self._done: dict[int, tuple[Any, bytes]] = {}  # with the object, so that its address stays its own

    def digest(self, value: Any, where: str) -> bytes:
        if type(value) in PLAIN:
            return _join("plain", repr(value).encode(errors="surrogatepass"))
        address = id(value)
        if address in self._done:
            return self._done[address][1]
        if address in self._open:
            return _join("cycle", b"%d" % (len(self._open) - self._open.index(address)))
        self._open.append(address)
        try:
            made = self._of_parts(value, where)
        except RecursionError:
            made = self._by_name(value, where)
        finally:
            self._open.pop()
        self._done[address] = value, made
        return made

    def _all(self, values: Iterable[Any], where: str) -> list[bytes]:
        return [self.digest(value, where) for value in values]

    def _is_installed(self, module: str) -> bool:
        return module.partition(".")[0] != self.package and _is_installed(module)

    def _of_parts(self, value: Any, where: str) -> bytes:
        kind: Any = type(value)
        if kind in (tuple, list):
            if PLAIN.issuperset(map(type, value)):  # in one step: there may be millions
                return _join(f"{kind.__name__} of plain", "\0".join(map(repr, value)).encode(errors="surrogatepass"))
            return _join(kind.__name__, *self._all(value, where))
        if kind in (set, frozenset):
            if PLAIN.issuperset(map(type, value)):
                return _join("set of plain", "\0".join(sorted(map(repr, value))).encode(errors="surrogatepass"))
            return _join("set", *sorted(self._all(value, where)))
        if kind is dict:
            if PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values())):
                return _join(
                    "dict of plain", "\0".join(sorted(map(repr, value.items()))).encode(errors="surrogatepass")
                )
            pairs = [self.digest(name, where) + self.digest(item, f"{where}[{name!r}]") for name, item in value.items()]
            return _join("dict", *sorted(pairs))
        if kind is CodeType:
            return self._of_code(value, where)
        if kind is FunctionType:
            return self._of_function(value, where)
        if kind is MethodType:
            return _join("method", *self._all((value.__func__, value.__self__), where))
        if kind is ModuleType:
            return _join("module", value.__name__.encode())
        if kind is BuiltinFunctionType and not isinstance(value.__self__, ModuleType | type(None)):
            return _join("method", value.__name__.encode(), self.digest(value.__self__, where))
        if isinstance(value, functools._lru_cache_wrapper):
            return _join("cached", self.digest(value.__wrapped__, where))
        if kind in (staticmethod, classmethod):
            return _join(kind.__name__, self.digest(value.__func__, where))
        if kind is property:
            return _join("property", *self._all((value.fget, value.fset, value.fdel), where))
        if isinstance(value, type):
            return self._of_class(value, where)
        return self._of_object(value, where)

    def _of_code(self, code: CodeType, where: str) -> bytes:
        numbers = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        tables = code.co_code, getattr(code, "co_exceptiontable", b"")
        return _join("code", *self._all((numbers, *names, *tables, code.co_consts), where))

    def _of_function(self, function: FunctionType, where: str) -> bytes:
        if not function.__closure__ and self._is_installed(str(function.__module__)):
            return _join("name", f"{function.__module__}.{function.__qualname__}".encode())
        parts = [function.__code__, function.__defaults__, function.__kwdefaults__]
        made = self._all(parts, function.__qualname__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            try:
                content = cell.cell_contents
            except ValueError:  # an empty cell
                made.append(b"")
            else:
                made.append(self.digest(content, f"{name} of {function.__qualname__}"))
        return _join("function", *made)

    def _of_class(self, kind: type, where: str) -> bytes:
        name = f"{kind.__module__}.{kind.__qualname__}".encode()
        if self._is_installed(kind.__module__):
            return _join("name", name)
        parts = self._all(kind.__bases__, where)
        for attribute, value in sorted(vars(kind).items()):
            value = (
                getattr(value, "func", value) if hasattr(type(value), "__set_name__") else value
            )  # cached properties
            is_special = attribute.startswith("__") or attribute == "_abc_impl"  # names, places and slots of the class
            is_member = hasattr(type(value), "__get__") or is_special  # what makes instances, not what they do
            if (isinstance(value, CODE) and not attribute.startswith("__annotate")) or not is_member:
                parts.append(_join(attribute, self.digest(value, f"{attribute} of {kind.__qualname__}")))
        return _join("class", kind.__qualname__.encode(), *parts)

    def _of_object(self, value: Any, where: str) -> bytes:
        """Return a digest of what pickle and copy would make an equal object from."""
        try:
            reduce = copyreg.dispatch_table.get(type(value))
            reduced: Any = value.__reduce_ex__(4) if reduce is None else reduce(value)
            if isinstance(reduced, str):  # a global name
                module = getattr(value, "__module__", None) or type(value).__module__
                return _join("name", f"{module}.{reduced}".encode())
            make, arguments, state, *items = (*reduced, None, None, None)[:5]
            items = [None if item is None else list(item) for item in items]
        except Exception:
            return self._by_name(value, where)
        if isinstance(state, dict):
            made = [
                self.digest(name, where) + self.digest(item, f"{name} of {type(value).__qualname__}")
                for name, item in state.items()
            ]
            return _join("object", *self._all((make, arguments, *items), where), *sorted(made))
        return _join("object", *self._all((make, arguments, state, *items), where))

    def _by_name(self, value: Any, where: str) -> bytes:
        name = str(getattr(value, "__qualname__", type(value).__qualname__))
        self.unknown.append(where if where == name else f"{where} ({name})")
        return _join("name", name.encode(errors="surrogatepass"))


def name_unknown(say: Callable[..., object], what: str, found: CodeDigest) -> None:
    """Report the values that a digest does not cover, if there are any."""
    if found.unknown:
        say("%s: a change of %s is not noticed when outputs are kept", what, ", ".join(found.unknown))
