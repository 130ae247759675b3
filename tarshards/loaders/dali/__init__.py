"""Tar shards for NVIDIA DALI: the one importer of nvidia.dali.

``dali_loader`` runs a pipeline over a dataset, in the dataset's order and with its ledger and exact state. The sources
feed pipelines that are written and run by hand. ``native_loader`` is DALI's own reader, kept from losing samples.
"""

try:
    from tarshards.loaders.dali.guard import BadImage, Check
    from tarshards.loaders.dali.indexed import indexed_source
    from tarshards.loaders.dali.loader import DaliLoader, dali_loader
    from tarshards.loaders.dali.native import NativeLoader, native_loader
    from tarshards.loaders.dali.sources import array_source, batch_source, sample_source
except ModuleNotFoundError as exc:
    if not (exc.name or "").startswith("nvidia"):
        raise
    raise ModuleNotFoundError(f"{exc.name} is missing: pip install 'tarshards[dali]'", name=exc.name) from exc

__all__ = [
    "BadImage",
    "Check",
    "DaliLoader",
    "NativeLoader",
    "array_source",
    "batch_source",
    "dali_loader",
    "indexed_source",
    "native_loader",
    "sample_source",
]
