"""Checks that users run on their own loaders, data and writers, in Python, in pytest and as ``python -m``.

Crashes: ``system_calls`` records a write, ``crashes`` reads all states in which a crash can leave its files, and
``crash_cases`` are our writers. Chaos: ``chaos`` draws rounds and compares, ``chaos_shards`` copies the shards,
``chaos_rank`` is a process that reads them, and ``faulty_server`` and ``unreliable_site`` serve them wrongly.
Conformance: ``conformance`` has the cases of `spec/` and a reader's verdict on each, and ``conformance_worker`` reads
each case in a process of its own, by any Python.
"""
