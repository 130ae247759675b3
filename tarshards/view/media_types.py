"""The media types of fields: which are shown as pictures, played, or read as text."""

from __future__ import annotations

from tarshards.samples.codecs.image import IMAGES

#: The media types that browsers show or play, by the last part of a field's name. No other field is sent with its own
#: type, in particular not HTML and SVG, which can contain scripts.
NATIVE = {
    "jpg": "image/jpeg",
    "jpeg": "image/jpeg",
    "jpe": "image/jpeg",
    "jfif": "image/jpeg",
    "png": "image/png",
    "gif": "image/gif",
    "webp": "image/webp",
    "avif": "image/avif",
    "bmp": "image/bmp",
    "wav": "audio/wav",
    "mp3": "audio/mpeg",
    "flac": "audio/flac",
    "ogg": "audio/ogg",
    "oga": "audio/ogg",
    "opus": "audio/ogg",
    "m4a": "audio/mp4",
    "aac": "audio/aac",
    "mp4": "video/mp4",
    "m4v": "video/mp4",
    "mov": "video/mp4",
    "webm": "video/webm",
    "ogv": "video/ogg",
    "mkv": "video/x-matroska",
}
BYTES = "application/octet-stream"


def extension_of(field: str) -> str:
    """Return the part of a field's name that determines its content.

    >>> extension_of("left.JPG"), extension_of("json.gz")
    ('jpg', 'json')
    """
    return field.lower().removesuffix(".gz").rpartition(".")[2]


def media_type(field: str) -> str:
    """Return the type that a field is sent with.

    >>> media_type("left.jpg"), media_type("svg"), media_type("jpg.gz")
    ('image/jpeg', 'application/octet-stream', 'application/octet-stream')
    """
    return BYTES if field.lower().endswith(".gz") else NATIVE.get(extension_of(field), BYTES)


def media_types() -> dict[str, str]:
    """Return the types for the page, including images that only a server can show."""
    return {name: f"image/{name}" for name in sorted(IMAGES.extensions)} | NATIVE


def has_media(field: str) -> bool:
    """Return whether a field is a picture, sound or video, whose first bytes are not worth showing."""
    return extension_of(field) in NATIVE or extension_of(field) in IMAGES.extensions
