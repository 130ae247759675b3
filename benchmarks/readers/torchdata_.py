"""torchdata's datapipes: FileOpener, load_from_tar, webdataset; 0.9 is the last version that has them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

warnings.simplefilter("ignore")

from _members import one_file  # noqa: E402
from torchdata.datapipes.iter import FileOpener, IterableWrapper  # noqa: E402

PACKAGES = ("torchdata==0.9.0", "torch==2.13.0")


def read(expression: str) -> Iterator[dict[str, Any]]:
    begin = len(one_file(expression)) + 1  # names are paths below that of the archive
    files = FileOpener(IterableWrapper([expression]), mode="b").load_from_tar()
    for sample in files.map(lambda item: (item[0][begin:], item[1].read())).webdataset():
        yield {name.removeprefix("."): data for name, data in sample.items()}
