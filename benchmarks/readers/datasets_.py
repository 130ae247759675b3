"""Hugging Face datasets: its webdataset builder over its streaming archive reader, without decoders by extension."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from _members import one_file
from datasets import StreamingDownloadManager
from datasets.packaged_modules.webdataset.webdataset import WebDataset

WebDataset.DECODERS = {}


def read(expression: str) -> Iterator[dict[str, Any]]:
    archive = StreamingDownloadManager().iter_archive(one_file(expression))
    return WebDataset._get_pipeline_from_tar(expression, archive)
