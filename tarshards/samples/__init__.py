"""Members to samples and back.

Read in this order:

- ``keys``: how a member's name splits into key and field
- ``read``: members grouped into samples, samples cut into members
- ``fields``: which fields of a sample are meant; ``conditions``: expressions over samples
- ``codecs``: fields to Python values and back
- ``ledger``: what was delivered and what was lost, and why
- ``resync``: reading on behind damage
"""
