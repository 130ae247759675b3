"""The tools as Python functions: one file per tool, with the tool's name without ``tar``.

- ``cat``: many shards to one stream of samples; ``grep``: some of its samples; ``sort``: another order
- ``join``: parallel shards to samples with the fields of all; ``mix``: streams in given proportions
- ``create``: tables, lines and files to samples; ``jsonl``: samples to JSON lines and back; ``table``: to tab-separated
- ``show``: samples as text and pictures
- ``check``: faults of shards; ``repair``: their whole samples; ``contents``: counts that check and show share
"""
