"""Modules of torch in several threads: each has a copy, and random numbers by a seed of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tarshards.parallel.forks import PerProcess


class Seeded(TorchDispatchMode):
    """Within it, what this thread draws from torch's generator of the CPU comes from one that begins with *seed*.

    Torch's generator, from which all other threads draw, does not change.
    """

    def __init__(self, seed: int):
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else the first call imports torch's compiler, which takes a second

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or not _draws_from_default([*args, *kwargs.values()]):
            return func(*args, **kwargs)
        drawing = _with_generator(func)
        if drawing is not None:
            return drawing(*args, **kwargs | {"generator": self._generator})
        with _swapping():  # no overload takes a generator, as of dropout: torch's own has the state of this one
            before = torch.get_rng_state()
            torch.set_rng_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(torch.get_rng_state())
                torch.set_rng_state(before)


_swapping = PerProcess(threading.Lock)


def _draws_from_default(arguments: list[Any]) -> bool:
    """Say whether an operator with these *arguments* gets no generator, and no other device than the CPU."""
    for each in arguments:
        device = each.device if isinstance(each, torch.Tensor) else each if isinstance(each, torch.device) else None
        if isinstance(each, torch.Generator) or (device is not None and device.type != "cpu"):
            return False
    return True


@cache
def _with_generator(func: Any) -> Any:
    """Return the overload of an operator that takes what *func* takes, and a generator; None if there is none."""
    overloads = [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]
    taken = {each: [argument.name for argument in each._schema.arguments] for each in overloads}
    rest = [name for name in taken[func] if name != "generator"]
    for each, names in taken.items():
        if "generator" in names and [name for name in names if name != "generator"] == rest:
            return each
    return None


class _Copies(threading.local):
    """The copies of modules that a thread has."""

    def __init__(self) -> None:
        self.by_module: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


_copies = _Copies()


def own_module(module: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a copy of a torch module for this thread, with the same parameters and buffers.

    The main thread, and functions that are no modules, need none.
    """
    if not isinstance(module, torch.nn.Module) or threading.current_thread() is threading.main_thread():
        return module
    own = _copies.by_module.get(module)
    if own is None:
        shared = {id(tensor): tensor for tensor in chain(module.parameters(), module.buffers())}
        own = _copies.by_module[module] = deepcopy(module, shared)
    return own
