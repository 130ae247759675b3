"""Checks that users run on their own loaders, data and writers, in Python, in pytest and as commands of ``tarshards``.

A kit for any loader, which needs only the standard library; read it in this order:

- ``setups``: a small dataset, and the setup for which a loader over it is made
- ``runs``: the loader under test, and one rank's run of it
- ``chains``: stops and resumes, what each may deliver, and the shortest chain that shows a fault
- ``resume``, ``epochs``, ``shuffle``: the checks

For readers of tar files: ``conformance`` has the cases of `spec/`, a reader's verdict on each, and their table;
``conformance_worker`` reads each case in a separate process, with any Python.

For writers: ``system_calls`` records a write, and ``crashes`` reads all states in which a crash can leave its files.

Chaos: ``chaos`` draws rounds and judges them, ``chaos_shards`` copies the shards, ``chaos_rank`` is a process that
reads them, and ``faulty_server`` and ``unreliable_site`` serve them with faults.

``digits`` is for ``tarshards demo``: it writes a small dataset, trains on it and audits the run.
"""

from __future__ import annotations

from tarshards.testing.chains import Chain, LoaderFault
from tarshards.testing.epochs import check_epoch
from tarshards.testing.resume import Checked, check_chain, check_resume, each_world, small_worlds
from tarshards.testing.runs import Tested
from tarshards.testing.setups import Setup, numbers_of, write_shards
from tarshards.testing.shuffle import check_shuffle

__all__ = [
    "Chain",
    "Checked",
    "LoaderFault",
    "Setup",
    "Tested",
    "check_chain",
    "check_epoch",
    "check_resume",
    "check_shuffle",
    "each_world",
    "numbers_of",
    "small_worlds",
    "write_shards",
]
