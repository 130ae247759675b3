"""A browser page over shards: what is in them, wherever they lie.

- ``media_types``: which fields are pictures, sound or video
- ``viewed_shards``: the samples by number, with or without indexes; ``epoch_batches``: those of a batch
- ``queries``: filters, order, duplicates; ``histograms``, ``damage_map``, ``pictures``: what else is shown of samples
- ``view_api``: what the page asks for, as methods; ``server``: the web server of these
- ``page_text``: the page, whose style and modules are in the folder ``page``; ``contact_sheet``: some samples as one
  file of it
- ``static_page``: the page beside shards on any web server
- ``showing``: ``show``, for notebooks and the tool
"""

from tarshards.view.showing import show

__all__ = ["show"]
