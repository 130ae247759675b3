"""Checks that users run on their own data, loaders and writers.

Read ``system_calls``, ``crashes`` and ``crash_cases``.
"""
