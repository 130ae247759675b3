"""A process that takes blocks from a cache with several threads; see ``Workers`` in test_cache.py.

Its argument is a JSON object. It writes a line for each block that it has taken, checks their bytes, and ends with 3 at
the first that is wrong; it appends a line to *log* for each block that it fetches.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections.abc import Callable
from hashlib import sha256

from tarshards.storage.cache import Block, BlockCache, MappedBlock
from tarshards.storage.remote import Remote
from tarshards.storage.wire import calling, run


def make_block(number: int, length: int = 1 << 18, *, validator: str = '"v1"') -> Block:
    return Block("http://host/a.tar", validator, 1 << 40, number << 22, length)


def data_of(block: Block) -> bytes:
    """The bytes of a block, other ones for each."""
    pattern = sha256(repr(block).encode()).digest()
    return (pattern * (block.length // len(pattern) + 1))[: block.length]


def take(cache: BlockCache, block: Block, fetch: Callable[[], bytes]) -> memoryview:
    return run(cache.fill(block, lambda: calling(fetch)))


def hold(cache: BlockCache, block: Block, fetch: Callable[[], bytes]) -> memoryview | MappedBlock:
    return run(cache.fill_mapped(block, lambda: calling(fetch)))


def taken(cache: BlockCache, block: Block, fetch: Callable[[], bytes], *, mapped: bool) -> bytes:
    """Return the bytes of a block, as they are in memory, or copied out of a mapping that then is current."""
    while mapped:
        found = hold(cache, block, fetch)
        if not isinstance(found, MappedBlock):
            return bytes(found)
        try:
            data = found.mapping.read(found.start, block.length)
        except OSError:  # truncated meanwhile
            continue
        if found.mapping.is_current():
            return data
    return bytes(take(cache, block, fetch))


def main() -> None:
    options = json.loads(sys.argv[1])
    cache = BlockCache.of(Remote(cache_dir=options["folder"], cache_bytes=options["budget"]))
    assert cache is not None
    if options.get("reserve"):
        cache.reserve(options["reserve"])
    log = os.open(options["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    again = options.get("again", 1.0)

    def take_all(seed: int) -> None:
        rng = random.Random(seed)
        numbers = [*range(options["blocks"])] * options.get("epochs", 1)
        rng.shuffle(numbers)
        for number in numbers:
            block = make_block(number)

            def fetch(block: Block = block) -> bytes:
                os.write(log, b"%d\n" % (block.offset >> 22))
                return data_of(block)

            if taken(cache, block, fetch, mapped=rng.random() < 0.5) != data_of(block):
                os.write(2, b"a wrong block was delivered\n")
                os._exit(3)
            if rng.random() >= again:
                cache.drop(block)
            os.write(1, b"%d\n" % number)

    threads = [threading.Thread(target=take_all, args=(options["seed"] * 100 + i,)) for i in range(options["threads"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
