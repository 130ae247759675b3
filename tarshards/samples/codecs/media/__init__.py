"""Sound and video (``pip install 'tarshards[media]'``): a part that can be removed, whose import registers its codecs.

- ``audio``, ``video``: the codecs
- ``audio_headers``, ``video_headers``: headers read without decoding
"""

from tarshards.samples.codecs.media import audio as audio
from tarshards.samples.codecs.media import video as video
