"""Which sample comes when, and on which rank.

- ``plan``: ``EpochPlan``, the sequence of an epoch; ``permutations``: the hashes behind it
- ``proportions``: several datasets in one sequence
- ``world``: ranks and workers
- ``loop``: the audit of a planned epoch
"""
