"""Dataset cards: a description of a dataset, its files and fields, as JSON-LD of MLCommons' Croissant, version 1.0.

Format: "Croissant Format Specification", http://mlcommons.org/croissant/1.0. Every shard is a FileObject with its size
and SHA-256. Every field of a split is a FileSet of the members that hold it, and a RecordSet of keys and contents:
records with the same key form a sample.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from tarshards.errors import DecodeError, SampleError, UrlError
from tarshards.formats.exporting import LOOKED_AT
from tarshards.index.inventory import check_described
from tarshards.samples.codecs import decode_field
from tarshards.samples.codecs.image import IMAGES
from tarshards.samples.grouping import read_samples
from tarshards.samples.keys import Sample, is_reserved
from tarshards.storage.expressions import find_shards
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard
from tarshards.storage.opening import open_shard
from tarshards.storage.remote import Remote

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
KEY = r"^((?:.*/|)[^.]+)[.]"  # finds the key in a member's name

#: The @context of the specification.
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}

# Extensions with their Croissant data type and media type. All others are bytes, which Croissant represents as text.
_KINDS = {
    "txt text transcript": ("sc:Text", "text/plain"),
    "cls cls2 class count index inx id": ("sc:Integer", "text/plain"),
    "json jsn": ("sc:Text", "application/json"),
    "wav": ("sc:AudioObject", "audio/wav"),
    "flac": ("sc:AudioObject", "audio/flac"),
    "mp3": ("sc:AudioObject", "audio/mpeg"),
    "ogg oga opus": ("sc:AudioObject", "audio/ogg"),
    "aif aiff aifc": ("sc:AudioObject", "audio/aiff"),
    "au snd": ("sc:AudioObject", "audio/basic"),
    "m4a": ("sc:AudioObject", "audio/mp4"),
    "aac": ("sc:AudioObject", "audio/aac"),
    "caf": ("sc:AudioObject", "audio/x-caf"),
    "mka": ("sc:AudioObject", "audio/x-matroska"),
    "weba": ("sc:AudioObject", "audio/webm"),
    "mp4 m4v": ("sc:VideoObject", "video/mp4"),
    "webm": ("sc:VideoObject", "video/webm"),
    "avi": ("sc:VideoObject", "video/x-msvideo"),
    "mov": ("sc:VideoObject", "video/quicktime"),
    "mkv": ("sc:VideoObject", "video/x-matroska"),
}
_KIND_OF = {extension: kind for extensions, kind in _KINDS.items() for extension in extensions.split()}
_KIND_OF |= {extension: ("sc:ImageObject", f"image/{extension}") for extension in IMAGES.extensions}
_KIND_OF |= dict.fromkeys(("jpg", "jpeg", "jpe", "jfif"), ("sc:ImageObject", "image/jpeg"))
_KIND_OF |= dict.fromkeys(("tif", "tiff"), ("sc:ImageObject", "image/tiff"))
_BYTES = ("sc:Text", "application/octet-stream")


def write_card(target: str | os.PathLike[str] | Location, splits: Mapping[str, Any], **about: Any) -> None:
    """Write the card of a dataset to *target*, whole or not at all; *splits* and *about* are as in ``make_card``.

    URLs of shards beside the card or below it are relative to it.
    """
    import json

    location = Location.of(target)
    beside = Location("card.json") if location.is_stream else location
    plain = location.url == "-" and sys.stdout.isatty()  # a terminal might interpret characters in names of shards
    text = json.dumps(make_card(splits, beside=beside, **about), indent=2, ensure_ascii=plain) + "\n"
    with open_shard(location, "wb") as stream:
        stream.write(text.encode("utf-8", "backslashreplace"))


def make_card(
    splits: Mapping[str, Any],
    *,
    name: str,
    description: str | None = None,
    licence: str | None = None,
    authors: Iterable[str] = (),
    citation: str | None = None,
    version: str | None = None,
    published: str | None = None,
    url: str | None = None,
    beside: Location | None = None,
    remote: Remote | None = None,
) -> dict[str, Any]:
    """Return the card of a dataset, *splits* by name, as JSON-LD.

    The fields come from the first 100 samples of each split. Sizes and checksums come from manifests; missing ones are
    measured, which for a checksum means reading the shard. Authors are "Name" or "Name <email>"; *licence* is a name,
    preferably from SPDX, or a URL; *published* is a date, as 2026-11-23; *url* is the dataset's page. URLs of shards
    are shown without credentials.

    Raises UrlError for a stream, such as a pipe, and for two splits that share a shard; ShardIndexError if a shard's
    index shows that the manifest describes another shard; SampleError for a split without samples.
    """
    if not splits:
        raise ValueError("a dataset has at least one split")
    files: dict[str, dict[str, Any]] = {}
    sets: list[dict[str, Any]] = []
    records: list[dict[str, Any]] = []
    samples = 0
    for split, spec in splits.items():
        shards = find_shards(spec, remote)
        own = [_file(shard, beside) for shard in shards]
        for file in own:
            if files.setdefault(file["@id"], file) is not file:
                raise UrlError(f"the shard {file['@id']} comes twice in the splits {', '.join(splits)}")
        fields = _look(split, shards)
        for field in sorted(fields):
            file_set, record_set = _field(split, field, sorted(fields), fields[field], [file["@id"] for file in own])
            sets.append(file_set)
            records.append(record_set)
        samples += sum(shard.samples or 0 for shard in shards)
    total = f"{samples:,} samples in {len(files):,} tar shards" if samples else f"{len(files):,} tar shards"
    about = {
        "name": name,
        "description": description or f"{name}: {total}.",
        "conformsTo": CONFORMS_TO,
        "license": licence,
        "creator": [_person(author) for author in authors],
        "citeAs": citation,
        "version": version,
        "datePublished": published,
        "url": url,
    }
    given = {key: value for key, value in about.items() if value}
    split_set = {"distribution": [*files.values(), *sets], "recordSet": [_split_set(splits), *records]}
    return {"@context": CONTEXT, "@type": "sc:Dataset", **given, **split_set}


def _file(shard: Shard, beside: Location | None) -> dict[str, Any]:
    """Return the FileObject of a shard."""
    location = shard.location()
    if location.is_stream:
        raise UrlError("a card names files, and this is a stream", url=location.name)
    url = location.recorded if beside is None else beside.relative(location)
    if location.is_remote:
        url = url.partition("?")[0]
    size = shard.size if shard.size is not None else location.size()
    compressed = location.compression() is not None
    if shard.sha256 is not None:
        check_described(shard, location)
    return {
        "@type": "cr:FileObject",
        "@id": url,
        "name": location.identity,
        "contentUrl": url,
        **({} if size is None else {"contentSize": f"{size} B"}),
        "encodingFormat": ["application/x-tar", "application/gzip"] if compressed else "application/x-tar",
        "sha256": shard.sha256 or location.sha256(),
    }


def _look(split: str, shards: Iterable[Shard]) -> dict[str, list[bytes]]:
    """Return the first values of each field."""
    found: dict[str, list[bytes]] = {}
    for sample in islice(read_samples(shards), LOOKED_AT):
        for field, value in _fields(sample):
            found.setdefault(field, []).append(value)
    if not found:
        raise SampleError(f"the split {split} has no samples, so its fields are unknown")
    return found


def _fields(sample: Sample) -> Iterable[tuple[str, bytes]]:
    return ((field, value) for field, value in sample.items() if not is_reserved(field))


def _field(split: str, field: str, fields: list[str], values: list[bytes], files: list[str]) -> tuple[Any, Any]:
    """Return the FileSet and the RecordSet of a field."""
    data_type, media = _KIND_OF.get(field.rpartition(".")[2], _BYTES)
    decoded = _decoded(field, values)
    if data_type == "sc:Integer" and not all(type(value) is int for value in decoded):
        data_type = "sc:Text"
    name = f"{split}/{field}"
    file_set: dict[str, Any] = {
        "@type": "cr:FileSet",
        "@id": f"{name}-members",
        "name": f"{name}-members",
        "containedIn": [{"@id": file} for file in files],
        "encodingFormat": media,
        "includes": f"*.{field}",
    }
    if others := [f"*.{other}" for other in fields if other.endswith(f".{field}")]:
        file_set["excludes"] = others
    source = {"fileSet": {"@id": file_set["@id"]}}
    record_set = {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": f"The field {field} of the samples of the split {split}; one key is one sample.",
        "key": {"@id": f"{name}/key"},
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"{name}/key",
                "name": f"{name}/key",
                "description": "The key of the sample.",
                "dataType": "sc:Text",
                "source": {**source, "extract": {"fileProperty": "fullpath"}, "transform": {"regex": KEY}},
            },
            {
                "@type": "cr:Field",
                "@id": f"{name}/content",
                "name": f"{name}/content",
                "description": _description(field, decoded),
                "dataType": data_type,
                "source": {**source, "extract": {"fileProperty": "content"}},
            },
        ],
    }
    return file_set, record_set


def _decoded(field: str, values: list[bytes]) -> list[Any]:
    """Return the decoded values, and the bytes of values that do not decode."""
    decoded = []
    for value in values:
        try:
            decoded.append(decode_field(field, value))
        except (DecodeError, ImportError):
            decoded.append(value)
    return decoded


def _description(field: str, values: list[Any]) -> str:
    """Describe the values of a field.

    >>> import numpy as np
    >>> _description("x.npy", [np.zeros((3, 4), "float32")] * 2), _description("cls", [1, 7]), _description("x", [b""])
    ('float32 array of shape 3 x 4', 'int', 'bytes')
    """
    if all(type(value).__name__ == "ndarray" for value in values):
        types = {f"{value.dtype}" for value in values}
        shapes = {" x ".join(map(str, value.shape)) or "()" for value in values}
        kind = types.pop() if len(types) == 1 else "array of several types"
        return f"{kind} array of shape {shapes.pop()}" if len(shapes) == 1 else f"{kind} arrays of several shapes"
    kinds = {type(value).__name__ for value in values}
    extension = field.rpartition(".")[2]
    if kinds == {"bytes"}:
        return f"{extension} image" if extension in IMAGES.extensions else "bytes"
    return " or ".join(sorted(kinds))


def _person(author: str) -> dict[str, str]:
    """Return an author.

    >>> _person("A. Author <a@b.org>")
    {'@type': 'Person', 'name': 'A. Author', 'email': 'a@b.org'}
    """
    match = re.fullmatch(r"(.*\S)\s*<([^<>@\s]+@[^<>@\s]+)>", author)
    return {"@type": "Person", "name": match[1], "email": match[2]} if match else {"@type": "Person", "name": author}


def _split_set(splits: Iterable[str]) -> dict[str, Any]:
    """Return the RecordSet that lists the splits."""
    name = {"@type": "cr:Field", "@id": "splits/name", "name": "splits/name", "dataType": "sc:Text"}
    return {
        "@type": "cr:RecordSet",
        "@id": "splits",
        "name": "splits",
        "description": "The splits; the records of the field F of the split S are in the record set S/F.",
        "dataType": "cr:Split",
        "key": {"@id": "splits/name"},
        "field": [name],
        "data": [{"splits/name": split} for split in splits],
    }
