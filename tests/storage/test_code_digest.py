"""Digests of functions: the same for the same code and values, anywhere; others for any other."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tarshards.storage.code_digest import digest_code, digest_source

MODULE = '''
import functools
import re
import threading
from enum import Enum

import numpy as np


class Size(Enum):
    small = 1
    large = {"s", "m", "l"}


class Base:
    names = {"x", "y", "z"}

    def __init__(self, value):
        self.value, self.others = value, {"p", "q", "r"}

    def __call__(self, sample):
        return sample, self.value

    @property
    def twice(self):
        return self.value * 2

    @functools.cached_property
    def thrice(self):
        return self.value * 3

    @staticmethod
    def still(sample):
        return [sample for name in {"u", "v", "w"}]


class Derived(Base):
    __slots__ = ("slot",)

    def __call__(self, sample):
        return super().__call__(sample)


def outer(number, function=None):
    def inner(sample, *, chosen=frozenset({"d", "e", "f"})):
        """What it does."""
        if sample in {"a", "b", "c"} and function:
            return function(sample)
        return (lambda: number + 1), chosen, np, re

    return inner


def with_lock():
    lock = threading.Lock()
    return lambda: lock


@functools.lru_cache
def cached(sample):
    return sample


def generator(samples):
    yield from samples


FUNCTIONS = [
    outer(1), outer(2, Base(3)), outer(1, Base), outer(np), outer(Size.large), functools.partial(outer, {1: "a"}),
    functools.partial(Base(1), {"g", "h", "i"}), Base(1), Base(2), Derived(1), Base(1).__call__, Base.still, Base, Size,
    cached, generator, len, str.upper, "-".join, np.sqrt, np.arange(3), np.random.default_rng(3), re.compile("a.c"),
    lambda x: x, lambda x: -x, lambda x=(1, 2.5, None, ...): x, with_lock(), re.sub, np.stack, functools.reduce,
]
'''
SHOW = "from module import FUNCTIONS\nfrom tarshards.storage.code_digest import digest_code\n"
SHOW += "print(*map(digest_code, FUNCTIONS), sep='\\n')"


def shown(folder: Path, seed: int, source: str = MODULE) -> list[str]:
    folder.mkdir()
    (folder / "module.py").write_text(source)
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}"}
    command = [sys.executable, "-c", SHOW]
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split("\n")[:-1]


def test_equal_in_all_processes_checkouts_and_orders_of_sets(tmp_path):
    first = shown(tmp_path / "a", 0)
    other = re.sub("^def", "# More lines, and another folder.\n\n\ndef", MODULE, flags=re.MULTILINE)
    for number, seed in enumerate((1, 2)):
        assert shown(tmp_path / f"b{number}", seed, other) == first
    assert len(set(first)) == len(first), "what differs has other digests"
    assert [line for line in first if "unknown=()" not in line] == [
        line for line in first if "lock of with_lock.<locals>.<lambda> (lock)" in line
    ]


def make(body: str):
    values: dict = {"__name__": "made"}
    exec("def made():\n" + "".join(f"    {line}\n" for line in body.split("\n")), values)
    return values["made"]()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("return lambda x: x + 1", "return lambda x: x - 1"),
        ("return lambda x: x + 1", "return lambda x: x + 1.0"),
        ("return lambda x: x + 1", "return lambda x: x + True"),
        ("return lambda x: x.a", "return lambda x: x.b"),
        ("return lambda x, n=1: n", "return lambda x, n=2: n"),
        ("return lambda x, *, n=1: n", "return lambda x, *, n=2: n"),
        ("n = 1\nreturn lambda x: n", "n = 2\nreturn lambda x: n"),
        ("n = [1, {2: 3}]\nreturn lambda x: n", "n = [1, {2: 4}]\nreturn lambda x: n"),
        ("return lambda x: [y + 1 for y in x]", "return lambda x: [y + 2 for y in x]"),
        ("def f(x):\n    return lambda: 1\nreturn f", "def f(x):\n    return lambda: 2\nreturn f"),
        ("def f(x):\n    return x\nreturn lambda x: f(x)", "def f(x):\n    return -x\nreturn lambda x: f(x)"),
        (
            "def f(x):\n    try:\n        x()\n    except OSError:\n        pass\nreturn f",
            "def f(x):\n    x()\nreturn f",
        ),
        ("class A:\n    def f(self): return 1\nreturn A().f", "class A:\n    def f(self): return 2\nreturn A().f"),
        ("class A:\n    n = 1\nreturn A()", "class A:\n    n = 2\nreturn A()"),
        ("class B:\n    n = 1\nclass A(B): pass\nreturn A()", "class B:\n    n = 2\nclass A(B): pass\nreturn A()"),
        (
            "class A:\n    @classmethod\n    def f(cls): pass\nreturn A",
            "class A:\n    @classmethod\n    def f(cls): 1/0\nreturn A",
        ),
        ("import re\nn = re.compile('a')\nreturn lambda: n", "import re\nn = re.compile('b')\nreturn lambda: n"),
        ("import os\nreturn lambda x, m=os: m", "import sys\nreturn lambda x, m=sys: m"),
        ("n = {1, 2}\nreturn lambda: n", "n = {1, 3}\nreturn lambda: n"),
        ("return len", "return sorted"),
    ],
)
def test_other_code_and_values_have_other_digests(first, second):
    assert digest_code(make(first)) == digest_code(make(first))
    assert digest_code(make(first)) != digest_code(make(second))
    assert digest_source(first.encode()) != digest_source(second.encode())


def test_state_of_callable_objects_counts():
    class Adds:
        def __init__(self, weights):
            self.weights, self.itself = weights, self

        def __call__(self, sample):
            return self.weights

    assert digest_code(Adds(np.arange(4))) == digest_code(Adds(np.arange(4)))
    assert digest_code(Adds(np.arange(4))) != digest_code(Adds(np.arange(1, 5)))
    assert digest_code(functools.partial(Adds([1]), n={"a": {1, 2}})) == digest_code(
        functools.partial(Adds([1]), n={"a": {2, 1}})
    )


def test_a_call_changes_no_digest():
    cache = functools.lru_cache(make("return lambda x: [y for y in range(x)]"))
    before = digest_code(cache)
    for _ in range(100):  # specialized code is the same code
        cache.__wrapped__(3)
    cache(3)
    assert digest_code(cache) == before


def test_comments_and_layout_are_not_code():
    assert digest_source(b"def f(x):\n    return x\n") == digest_source(
        b"# one\ndef f( x ):\n\n    return (x)  # two\n"
    )
    assert digest_source(b"not python\n") == digest_source(b"not python\n") != digest_source(b"not Python\n")


def test_what_has_no_digest_is_named():
    lock, deep = threading.Lock(), []
    for _ in range(5000):
        deep = [deep]
    assert digest_code(lambda: lock).unknown == ("lock of test_what_has_no_digest_is_named.<locals>.<lambda> (lock)",)
    assert digest_code(lambda: deep).unknown == ("deep of test_what_has_no_digest_is_named.<locals>.<lambda> (list)",)
    with open(os.devnull) as file:
        assert digest_code(functools.partial(len, file)).unknown == ("len (TextIOWrapper)",)
