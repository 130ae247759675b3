"""Decoding by extension: webdataset's names for our codecs, and functions that run before them; also ``tenbin``."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from functools import partial
from io import BytesIO
from typing import Any

from tarshards.errors import DecodeError
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.codecs.registry import DECODERS, ENCODERS, require
from tarshards.samples.keys import Sample
from tarshards.storage.compression import gunzip
from tarshards.stream import ops
from tarshards.webdataset import handlers

#: Decodes a field by its name, with a leading dot, and its bytes; None leaves it to the next function.
Function = Callable[[str, bytes], Any]

#: webdataset's imagespecs: code that uses them expects uint8 or float32.
imagespecs = {name: form for name, form in IMAGES.words.items() if form[1] != "uint16"}
IMAGE_EXTENSIONS: list[str] = sorted(IMAGES.extensions)
decode_buffer = tenbin_loads = DECODERS["tenbin"]
encode_buffer = ENCODERS["tenbin"]
DecodingError = DecodeError
#: Whether ``torch_loads`` loads tensors and plain containers only; ``decode`` always does.
pytorch_weights_only: bool = False


class Continue:
    """Returned by a function to have the others decode *data* under another name."""

    def __init__(self, key: str, data: bytes):
        self.key = key
        self.data = data


def gzfilter(key: str, data: bytes) -> Continue | None:
    """Decompress a field whose name ends in ``.gz``."""
    return Continue(key[:-3], gunzip(data)) if key.endswith(".gz") else None


def basichandlers(key: str, data: bytes) -> Any:
    """Decode with our codecs for text, numbers, JSON, arrays and the like; return None without a codec.

    A function that a program put into ``decoders`` replaces ours.
    """
    extension = key.rpartition(".")[2]
    if (function := decoders.get(extension)) is not OWN_DECODERS.get(extension):
        return function(data)  # type: ignore[misc]
    value = decode_field(key, data)
    return None if value is data else value


def handle_extension(extensions: str, f: Callable[[bytes], Any]) -> Function:
    """Return a function for ``decode`` that applies *f* to fields with one of the *extensions*, "jpg seg.png"."""
    return partial(_by_extension, tuple(f".{each}" for each in extensions.lower().split()), f)


def _by_extension(extensions: tuple[str, ...], function: Callable[[bytes], Any], key: str, data: bytes) -> Any:
    return function(data) if f".{key.lower()}".endswith(extensions) else None


def imagehandler(imagespec: str, extensions: Iterable[str] = IMAGE_EXTENSIONS) -> Function:
    """Return a function for ``decode`` that decodes images according to the *imagespec*."""
    images = IMAGES.check(imagespec.lower())
    return handle_extension(" ".join(extensions), partial(IMAGES.decode, imagespec=images))


ImageHandler = imagehandler
default_pre_handlers, default_post_handlers = [gzfilter], [basichandlers]


class Decoder:
    """Decodes the fields of a sample by the first function that does not return None, else by our codecs.

    *handlers* are imagespecs and functions of a field's name, with a leading dot, and its bytes. *pre* run before them,
    by default ``gzfilter``, and *post* replace our codecs; *only* names the fields to decode. Fields that are not bytes
    stay unchanged; *partial* is accepted and has no effect.
    """

    def __init__(
        self, handlers: Iterable[Any], pre: Any = None, post: Any = None, only: Any = None, partial: bool = False
    ):
        own = [imagehandler(each) if isinstance(each, str) else each for each in handlers]
        if post is None and decoders != OWN_DECODERS:
            own += default_post_handlers
        decompresses = not own and post is None  # our codecs do it themselves
        before = ([] if decompresses else default_pre_handlers) if pre is None else pre
        self.handlers: list[Any] = [*before, *own, *(post or [])]
        self.post = post
        self.only: list[str] | list[Any] | None = (
            only.split() if isinstance(only, str) else only if only is None else list(only)
        )

    def decode1(self, key: str, data: bytes) -> Any:
        """Decode one field; return None to leave it to our codecs."""
        if self.only is not None and key not in self.only:  # our ops also accept extensions in only=
            return data
        name = f".{key}"
        for function in self.handlers:
            value = function(name, data)
            if isinstance(value, Continue):
                name, data = value.key, value.data
            elif value is not None:
                return value
        if self.post is not None:
            return data
        return None if name == f".{key}" else decode_field(name, data)

    def __call__(self, sample: Sample) -> Sample:
        return next(iter(ops.decode([sample], self.decode1, only=self.only)))


def torch_loads(data: bytes) -> Any:
    """Load with torch any content, including code."""
    _refuse_unsafe("torch.loads")
    return require("torch", extra="torch").load(BytesIO(data), map_location="cpu", weights_only=pytorch_weights_only)


def unpickle_loads(data: bytes) -> Any:
    """Unpickle, which runs any code in the data."""
    _refuse_unsafe("Unpickling")
    return pickle.loads(data)


def _refuse_unsafe(what: str) -> None:
    if handlers.enforce_security:
        raise ValueError(f"{what} is not allowed for security reasons when enforce_security is set")


#: Functions of bytes by extension. ``decode`` uses those that run no code from the data.
OWN_DECODERS: dict[str, Any] = {
    **DECODERS,
    **dict.fromkeys(("pyd", "pkl", "pickle"), unpickle_loads),
    "pth": torch_loads,
}
#: The same; a program may put its own functions here.
decoders: dict[str, Any] = dict(OWN_DECODERS)
cbor_loads, msgpack_loads, npy_loads, npz_loads = (decoders[each] for each in ("cbor", "msgpack", "npy", "npz"))
torch_video: Any = handlers.absent("torch_video", "handle_extension(extensions, f) takes a decoder of your own")
torch_audio: Any = handlers.absent("torch_audio", "handle_extension(extensions, f) takes a decoder of your own")
