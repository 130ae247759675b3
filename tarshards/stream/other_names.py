"""Names that WebDataset, Squirrel and other loaders use, and what they are called here, for error messages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")

#: Methods of other libraries' datasets.
METHODS = {
    "cache": "Remote(cache_dir=...) caches remote shards",
    "detshuffle": "ShardDataset(urls, shuffle=True, seed=0) shuffles reproducibly",
    "listed": "batched(n, collate=list) makes lists",
    "loop": "repeat(n), or repeat() without end",
    "map_dict": "map_fields({'jpg': function})",
    "rename": "rename_fields({'new': 'old'})",
    "rename_keys": "rename_fields({'new': 'old'})",
    "resampled": "ShardDataset(urls, resample=True) draws with replacement",
    "slice": "take(n), skip(n), or pipe(itertools.islice, begin, end, step)",
    "split_by_node": "nothing: each rank reads its own part",
    "split_by_rank_pytorch": "nothing: each rank reads its own part",
    "split_by_worker": "nothing: each worker reads its own part",
    "split_by_worker_pytorch": "nothing: each worker reads its own part",
    "to_torch_iterable": "torch_iterable(stream)",
    "unlisted": "flatten()",
    "with_epoch": "ShardLoader(..., steps=n) makes a pass of n batches",
    "xdecode": "decode(...)",
    "zip_index": "enumerate(), or rekey('{index:06d}')",
}
#: Arguments of other libraries' datasets, loaders and stages.
OPTIONS = {
    "batch_sizes": "batch_size=, the first argument after the dataset; bucket() makes batches of varying size",
    "buffer": "workers= also bounds what is in flight",
    "bufsize": "shuffle(size)",
    "cache_dir": "remote=Remote(cache_dir=...)",
    "cache_size": "remote=Remote(cache_dir=..., cache_bytes=...)",
    "collation_fn": "collate= in batched(), collate_fn= in a ShardLoader",
    "decoder": ".decode(...)",
    "detshuffle": "shuffle=True, seed=0",
    "empty_check": "nothing: datasets without samples are errors",
    "extensions": ".to_tuple('jpg', 'cls')",
    "handler": "on_error=, a function of the error, 'skip', or Ledger(max_errors=...)",
    "drop_last_if_not_full": "partial=False",
    "max_workers": "workers=",
    "maxcount": "max_samples=",
    "maxsize": "max_bytes=",
    "nodesplitter": "nothing: each rank reads its own part; world= names another",
    "repeat": ".repeat()",
    "resampled": "resample=True",
    "select_files": "fields=",
    "shardshuffle": "shuffle=True",
    "shuffle_buffer_size": "shuffle=True, pool=",
    "splitter": "nothing: ranks and workers read their own parts",
    "transforms": ".map_tuple(...), .map_fields({...}) or .map(...)",
    "workersplitter": "nothing: each worker reads its own part",
}


def no_attribute(kind: str, name: str) -> str:
    """Return the message for a missing method.

    >>> no_attribute("Stream", "listed")
    'a Stream has no listed: batched(n, collate=list) makes lists'
    """
    return f"a {kind} has no {name}" + (f": {METHODS[name]}" if name in METHODS else "")


def explained(error: TypeError, given: Iterable[str] = ()) -> TypeError:
    """Return *error*; if it is about an argument as another library names it, the message says what to write here.

    If the error is about a missing argument, the other library's name is looked up among the *given* ones.

    >>> explained(TypeError("f() got an unexpected keyword argument 'maxcount'"))
    TypeError("f() got an unexpected keyword argument 'maxcount': here it is max_samples=")
    """
    if (missing := re.match(r"(.*\(\)) missing \d+ required", str(error))) and (name := _other(given)):
        error = TypeError(f"{missing[1]} got an unexpected keyword argument '{name}'")
    found = re.search(r"got an unexpected keyword argument '(\w+)'", str(error))
    if found is None or found[1] not in OPTIONS or "here it is" in str(error):
        return error
    return TypeError(f"{str(error).partition('. Did you mean')[0]}: here it is {OPTIONS[found[1]]}")


def _other(names: Iterable[str]) -> str | None:
    return next((name for name in names if name in OPTIONS), None)


def explains(function: Callable[P, Result]) -> Callable[P, Result]:
    """Decorate *function* so that errors about arguments named as in other libraries say what to write here."""

    @wraps(function)
    def explaining(*args: P.args, **options: P.kwargs) -> Result:
        try:
            return function(*args, **options)
        except TypeError as error:
            better = explained(error, options)
            if better is error:
                raise
            raise better from None

    return explaining
