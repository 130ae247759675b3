"""The Unix tools: one click command per file, which parses the command line and calls the library.

- ``program``: running as a Unix program; ``terminal``: colours and progress bars; ``manual``: its man page and
  completions; ``advice``: where the documentation explains an error; ``other_options``: what a tool has for options of
  tar, grep, sort, split and xargs; ``parameters``: the options that tools share; ``input``: the samples that a command
  line selects, and the errors that it allows; ``output``: checks of targets; ``conversion``: common parts of imports
  and exports
- all tools under one command: ``tarshards``
- shards to shards: ``tarcat``, ``tarpcat``, ``tarmix``, ``tarmerge``, ``tarsort``, ``tarreshard``, ``tarsplit``,
  ``targrep``, ``tarfirst``, ``tarproc``
- files, tables and text to shards: ``tarcreate``, ``lines2tar``; and back: ``tar2tsv``, ``tar2json``
- other formats to shards: ``tarimport``; and back: ``tarexport``; msgpack shards, both ways: ``tarconvert``
- inspecting and indexing shards: ``tarshow``, ``tarview``, ``tarcheck``, ``tarindex``
- commands over many shards: ``tarjob``, also as ``kujob``
- the cache of blocks of remote shards: ``tarcache``; batches for loaders on other hosts: ``tarfeed``
- names and descriptions of datasets: ``tarcatalog``, ``tarcard``
- the verbs of the command ``tarshards``: ``loader_checks``, ``chaos_check``, ``reader_check``, ``demo``
"""
