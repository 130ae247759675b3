"""A browser page that shows the contents of shards, local or remote.

- ``media_types``: which fields are pictures, sound or video
- ``viewed_shards``: samples by number, with or without indexes; ``epoch_batches``: the samples of a batch
- ``queries``: filters, order, duplicates; ``histograms``, ``damage_map``, ``pictures``: other views of the page
- ``view_api``: the requests of the page, as methods; ``server``: serves them over HTTP
- ``page_text``: the HTML of the page, whose style and modules are in the folder ``page``; ``contact_sheet``: samples
  in one HTML file
- ``static_page``: a page beside the shards, for any web server
- ``showing``: ``show``, for notebooks and the tool
"""

from tarshards.view.showing import show

__all__ = ["show"]
