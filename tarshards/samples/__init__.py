"""Members to samples and back.

Read in this order:

- ``keys``: how the name of a member splits into key and field
- ``member_file``: members as files that seek, instead of their bytes
- ``read``: members grouped into samples, and samples split into members
- ``batch``: many samples at once, by field
- ``seen_keys``: keys that may occur once
- ``fields``: selections of fields; ``conditions``: the language of conditions, over samples; templates
- ``codecs``: fields to Python values and back
- ``ledger``: counts of what was delivered, skipped and quarantined, and the audit
- ``lines``, ``rows``, ``tree``: lines of text, rows of CSV and JSON, and directories, from which samples are made
- ``resync``: reading past damage
- ``retry_parse``: Python's parser, called again where other threads have confused it
"""
