"""Which sample comes when, and on which rank.

- ``epoch_options``: ``EpochOptions``, what an epoch is; ``world``: ranks and workers
- ``plan``: ``EpochPlan``, the sequence of an epoch; ``permutations``: its random permutations; ``splitmix``: the hash
  of one integer behind every shuffle
- ``proportions``: several datasets in one sequence, by weights that may change with the position; ``choices``: that
  sequence permuted within windows, so that each rank sees all datasets
- ``selection``: some of the samples, by key or condition, and the plan over them
- ``resampling``: epochs of samples or shards that are drawn with replacement
- ``packing``: samples of variable length in bins, each at one position instead of a sample
- ``loop``: ``EpochLoop``, which takes a worker through its share of a plan, counts what was read and audits it
- ``substitutes``: other samples of an epoch, which replace those that were left out of a batch
"""
