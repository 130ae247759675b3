"""The tools as Python functions: one module per tool, named after it without ``tar``.

- ``cat``: read many shards as one stream of samples; ``grep``: select samples; ``sort``: sort or shuffle them
- ``join``: join parallel shards by key; ``mix``: mix streams in given proportions
- ``create``: make samples from tables, lines and files
- ``jsonl``: convert samples to JSON lines and back; ``table``: write them as tab-separated lines
- ``show``: print samples as text and pictures
- ``check``: find the faults of shards; ``repair``: extract the whole samples; ``contents``: counts that check and show
  share
"""
