"""Ray Data: what each task of read_webdataset runs for a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow
from _members import one_file
from ray.data._internal.datasource.webdataset_datasource import WebDatasetDatasource


def read(expression: str) -> Iterator[dict[str, Any]]:
    source = WebDatasetDatasource(one_file(expression), decoder=None)
    with pyarrow.OSFile(expression) as stream:
        for block in source._read_stream(stream, expression):
            for row in block.to_dict("records"):
                yield {name: data for name, data in row.items() if data == data}  # a field that is missing is NaN
