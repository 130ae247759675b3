"""NVIDIA DALI over tar shards; the only importer of ``nvidia.dali``.

``dali_loader`` runs a pipeline over a dataset, in the dataset's order, with its ledger and an exact state.
``batch_source`` feeds a pipeline that you build and run yourself.

In reading order: ``guard`` checks images before DALI sees them, ``external_source`` makes batches of encoded samples,
``loader`` runs pipelines over these batches, ``outputs`` turns what a pipeline returns into arrays.
"""

try:
    from tarshards.loaders.dali.external_source import BatchSource, batch_source
    from tarshards.loaders.dali.loader import DaliLoader, dali_loader
except ModuleNotFoundError as exc:
    if not (exc.name or "").startswith("nvidia"):
        raise
    raise ModuleNotFoundError(f"{exc.name} is missing: pip install 'tarshards[dali]'", name=exc.name) from exc

__all__ = ["BatchSource", "DaliLoader", "batch_source", "dali_loader"]
