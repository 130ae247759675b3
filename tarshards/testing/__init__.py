"""Checks that users run on their own data, loaders and writers.

Crashes: ``system_calls`` records a write, ``crashes`` reads all states in which a crash can leave its files, and
``crash_cases`` are our writers. Chaos: ``chaos`` draws rounds and compares, ``chaos_shards`` copies the shards,
``chaos_rank`` is a process that reads them, and ``faulty_server`` and ``unreliable_site`` serve them wrongly.
"""
