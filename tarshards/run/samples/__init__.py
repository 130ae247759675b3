"""Map commands over samples: each sample becomes files in a scratch directory, and what is left of them its result.

- ``run``: ``map_command``; ``dispatch``: samples to slots; ``slot``, ``worker``: the processes behind them
- ``scratch``, ``folder``: samples as files; ``journal``: what was done; ``halt``: when to stop
"""
