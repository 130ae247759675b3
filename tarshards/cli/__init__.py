"""The Unix tools: one click command a file, each of which parses, calls the library and exits.

- samples in, samples out: ``tarcat`` (also named tarscat), ``tarpcat``, ``tarsort``, ``tarmix``, ``tarmerge``,
  ``targrep``, ``tarproc``, ``tarsplit``, ``tarreshard``
- into shards: ``tarcreate``, ``lines2tar``; out of them: ``tar2tsv``, ``tar2json``, ``tarshow``, ``tarfirst``
- about shards: ``tarindex``, ``tarcheck``; over shards: ``tarjob`` (also named kujob)

``_common`` has what they share: inputs, outputs, exit codes.
"""
