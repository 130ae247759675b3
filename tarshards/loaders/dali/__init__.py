"""NVIDIA DALI over tar shards; the only importer of ``nvidia.dali``.

``dali_loader`` runs a pipeline over a dataset, in the dataset's order, with its ledger and an exact state.
``batch_source`` feeds a pipeline that you build and run yourself.

In reading order: ``image_check`` checks images before DALI sees them, ``external_source`` makes batches of encoded
samples, ``dali_loader`` runs pipelines over these batches, ``outputs`` turns what a pipeline returns into arrays.
"""

from tarshards.samples.codecs.registry import require

require("nvidia.dali", extra="dali dali13")

from tarshards.loaders.dali.dali_loader import DaliLoader, dali_loader  # noqa: E402
from tarshards.loaders.dali.external_source import BatchSource, batch_source  # noqa: E402 (they import it)

__all__ = ["BatchSource", "DaliLoader", "batch_source", "dali_loader"]
