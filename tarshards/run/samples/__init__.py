"""Run a command on each sample: its fields become files in a scratch directory; the files that remain are its result.

Read in this order:

- ``command``: ``map_command``, which reads samples and yields results in order
- ``dispatch``: distributes samples to slots; ``slot``: the process of a slot; ``runners``: how it runs a sample
- ``folder``: a sample as files; ``scratch``: their directory
- ``journal``: finished samples, to resume from
"""
