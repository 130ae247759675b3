"""Text to tokens, in processes: examples/to_tokens.py tokenizer.json 'text-{00..99}.tar' 'tokens-{00..99}.tar'.

A document is the field txt; its tokens, and one that ends it, become the field ids.npy.
"""

import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from tarshards import map_shards

END = "<|endoftext|>"


def to_tokens(samples: Iterable[dict[str, Any]], path: str) -> Iterator[dict[str, Any]]:
    tokenizer = Tokenizer.from_file(path)
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    end = tokenizer.token_to_id(END)
    for sample in samples:
        ids = tokenizer.encode(sample["txt"].decode()).ids
        yield {"__key__": sample["__key__"], "ids.npy": np.array([*ids, end], dtype)}


if __name__ == "__main__":
    for report in map_shards(partial(to_tokens, path=sys.argv[1]), sys.argv[2], sys.argv[3]):
        print(f"{report.output}: {report.samples_out} documents in {report.seconds:.1f} s")
