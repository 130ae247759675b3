"""Members to samples and back.

Read in this order:

- ``keys``: splitting the name of a member into key and field
- ``member_file``: members as seekable files instead of bytes
- ``grouping``: members grouped into samples, and samples split into members
- ``batch``: many samples at once, by field; ``payloads``: the bytes of a field of many samples
- ``seen_keys``: keys that may occur once
- ``fields``: selections of fields; ``conditions``: the language of conditions, over samples; templates
- ``codecs``: fields to Python values and back
- ``ledger``: counts of delivered, skipped and quarantined samples, and the audit
- ``lines``, ``rows``, ``tree``: lines of text, rows of CSV and JSON, and directories, as sources of samples
- ``resync``: reading past damage
- ``retry_parse``: Python's parser, called again if other threads have confused it
"""
