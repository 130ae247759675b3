"""Catalogs: one YAML file that names datasets, their versions and splits, and the shards of each split.

    tarshards_catalog: 1
    datasets:
      imagenet:
        '2':
          card: imagenet/train.croissant.json
          ops:
          - decode: rgb8
          splits:
            train:
              shards: imagenet/train.shards.json
              digest: sha256:5f16...

All names are relative to the file. ``catalog.yaml#imagenet@2/train`` can be used wherever shard expressions are. The
digest of a split pins the content of its manifest; when that changes, reading the split is an error. Catalogs of
Squirrel can also be read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from tarshards.errors import OpenError, ShardIndexError, StateError, UrlError, shortened
from tarshards.index.inventory import check_described
from tarshards.index.manifests import natural_order
from tarshards.samples.codecs.registry import require
from tarshards.storage.expressions import shards_in, spec_name
from tarshards.storage.location import Location
from tarshards.storage.manifest import Shard, Shards
from tarshards.storage.remote import Remote

if TYPE_CHECKING:
    from tarshards.stream.stream import Stream

KIND = "tarshards_catalog"
VERSION = 1
MAX_BYTES = 1 << 24
#: The ops that a catalog may name; they define the samples of the dataset. Their arguments are data, never code.
OPS = ("decode", "keep_fields", "rename_fields", "select_fields", "to_tuple")
#: Squirrel's drivers, and our names for their formats.
DRIVERS = {"webdataset": "tar", "messagepack": "msgpack"}
DRIVERS |= {name: name for name in ("jsonl", "csv", "parquet", "zarr")}

NAMES = "letters, digits and _.+-, a letter or digit first"
_NAME = re.compile(r"\w[\w.+-]*")
_ENTRY = re.compile(r"([^@/]+)(?:@([^@/]+))?(?:/([^@/]+))?")


class Split(NamedTuple):
    """The shards of a split: one expression, or several, relative to the catalog; *digest* is None if not pinned."""

    shards: tuple[str, ...]
    digest: str | None = None


class DatasetVersion(NamedTuple):
    """One version of a dataset; *format* is "tar", or for a source of Squirrel the format of its driver."""

    dataset: str
    version: str
    splits: dict[str, Split]
    card: str | None = None
    ops: tuple[dict[str, Any], ...] = ()
    format: str = "tar"
    metadata: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        return f"{self.dataset}@{self.version}"


class Check(NamedTuple):
    """The result of ``Catalog.verify`` for one split: its shards, samples, bytes and faults."""

    entry: str
    shards: int
    samples: int
    bytes: int
    pinned: bool
    faults: list[str]


class Catalog:
    """The datasets of a catalog file, by name and version.

    An entry is named ``dataset@version/split``. Without ``@version`` it is the newest version, where numbers compare by
    value; without ``/split`` it is the only split. Iterating gives the versions, oldest first.

    >>> catalog = Catalog("sets/catalog.yaml")
    >>> catalog.versions["digits"] = {"1": DatasetVersion("digits", "1", {"train": Split(("a-{0..1}.tar",))})}
    >>> [shard.url for shard in catalog.shards("digits")]
    ['sets/a-0.tar', 'sets/a-1.tar']
    """

    def __init__(self, url: str | os.PathLike[str] | Location = "", remote: Remote | None = None):
        if url == "":
            raise TypeError('a Catalog has a file: Catalog("catalog.yaml") is empty, Catalog.load reads it')
        self.location: Location = Location.of(url, remote)
        self.versions: dict[str, dict[str, DatasetVersion]] = {}
        self.is_foreign: bool = False

    @classmethod
    def load(cls, url: str | os.PathLike[str] | Location, remote: Remote | None = None) -> Catalog:
        """Read the catalog file *url*, ours or Squirrel's.

        Raises UrlError for a malformed entry, which it names, and OpenError if PyYAML or the file is missing.
        """
        catalog = cls(url, remote)
        catalog._parse(catalog.location.read(MAX_BYTES))
        return catalog

    @classmethod
    @contextmanager
    def locked(
        cls, url: str | os.PathLike[str] | Location, remote: Remote | None = None, *, create: bool = False
    ) -> Iterator[Catalog]:
        """Read the catalog file *url* for changing and saving it in the with-block; other processes wait for its end.

        With *create* the file need not exist. A remote file is not locked: if two processes change it at once, the
        later wins.
        """
        location = Location.of(url, remote)
        file = location if location.path is None else location.at(os.path.realpath(location.path))
        with file.folder_lock():
            yield cls(location, remote) if create and not location.exists() else cls.load(location, remote)

    def __iter__(self) -> Iterator[DatasetVersion]:
        for dataset in sorted(self.versions, key=natural_order):
            for version in sorted(self.versions[dataset], key=natural_order):
                yield self.versions[dataset][version]

    def __getitem__(self, entry: str) -> DatasetVersion:
        """Return the version that *entry* names; raise UrlError, with the names that exist, if there is none."""
        return self._find(entry)[0]

    def _find(self, entry: str) -> tuple[DatasetVersion, str | None]:
        """Return the version, and the name of the split if *entry* has one."""
        parsed = _ENTRY.fullmatch(entry)
        if parsed is None:
            raise self._error(f"{entry!r} is not dataset, dataset@version or dataset@version/split")
        dataset, number, split = parsed.groups()
        versions = self._choose(self.versions, dataset, "dataset")
        number = max(versions, key=natural_order) if number is None else number
        version = self._choose(versions, number, f"version of {dataset}")
        return version, split

    def _choose(self, names: Mapping[str, Any], name: str, kind: str) -> Any:
        if name not in names:
            known = ", ".join(sorted(names, key=natural_order)) or "none"
            raise self._error(f"no {kind} {shortened(name)}; there is {shortened(known)}")
        return names[name]

    def entries(self, entry: str | None = None) -> list[str]:
        """Return the full names of all splits of *entry*, a dataset, version or split, or of the whole catalog."""
        if entry is None:
            return [f"{version.name}/{split}" for version in self for split in sorted(version.splits)]
        version, split = self._find(entry)
        if split is not None:
            self._choose(version.splits, split, f"split of {version.name}")
        versions = [version] if "@" in entry or split is not None else list(self.versions[version.dataset].values())
        return [f"{each.name}/{name}" for each in versions for name in ([split] if split else sorted(each.splits))]

    def _split(self, entry: str) -> tuple[DatasetVersion, str, Split]:
        version, name = self._find(entry)
        if name is None:
            if len(version.splits) != 1:
                known = ", ".join(f"{version.name}/{split}" for split in sorted(version.splits))
                raise self._error(f"{version.name} has several splits; name one: {known}")
            (name,) = version.splits
        return version, name, self._choose(version.splits, name, f"split of {version.name}")

    def shards(self, entry: str) -> Shards:
        """Return the shards of a split, with complete URLs.

        Raises StateError, with both digests, if they differ from the pinned ones; UrlError for an entry that does not
        exist or does not have tar shards.
        """
        version, name, split = self._split(entry)
        shards = self._expand(version, split)
        if split.digest is not None and (found := digest_of(shards, version.ops)) != split.digest:
            bare = shards.replace(digest=[None] * len(shards))  # in case it was pinned before the manifest had digests
            if digest_of(bare, version.ops) == split.digest:
                return shards
            raise StateError(
                f"{version.name}/{name} has changed: pinned as {split.digest}, now {found}; restore its manifest, or "
                "add its current content as a new version",
                url=self.location.name,
            )
        return shards

    def _expand(self, version: DatasetVersion, split: Split) -> Shards:
        if version.format != "tar":
            if version.format not in DRIVERS.values():
                raise self._error(f"{version.name} needs Squirrel's driver {version.format}, which is not supported")
            raise self._error(
                f"{version.name} is of {version.format}, not of tar shards; Catalog.stream and `tarimport` read it"
            )
        return shards_in(self.location, split.shards)

    def stream(self, entry: str, **options: Any) -> Stream:
        """Return the stream of a split, with the ops of its version; *options* are those of ``Stream.from_shards``.

        For a source of Squirrel with another driver they are those of ``read_rows``.
        """
        from tarshards.stream.stream import Stream

        version, _, split = self._split(entry)
        if version.format != "tar" and version.format in DRIVERS.values():
            from tarshards.formats.inputs import STORES, named_format
            from tarshards.formats.row_stream import read_rows

            is_store = version.format in STORES
            specs = [
                f"{spec.rstrip('/')}/*.gz" if is_store and not (spec.endswith(".gz") or named_format(spec)) else spec
                for spec in split.shards
            ]
            urls = [shard.url for shard in shards_in(self.location, specs)]
            return self._apply(read_rows(urls, format=version.format, **options), version)
        shards = self.shards(entry)
        return self._apply(Stream.from_shards(shards, **{"remote": self.location.remote, **options}), version)

    def _apply(self, stream: Stream, version: DatasetVersion) -> Stream:
        for each in version.ops:
            ((name, given),) = each.items()
            args = given if isinstance(given, list) else [] if given is None or isinstance(given, dict) else [given]
            options = given if isinstance(given, dict) and name != "rename_fields" else {}
            if name == "rename_fields":
                args = [given]
            try:
                stream = getattr(stream, name)(*args, **options)
            except (TypeError, ValueError) as error:
                raise self._error(f"{version.name}: the op {name} refuses {shortened(given)}: {error}") from error
        return stream

    def add(
        self,
        entry: str,
        splits: Mapping[str, Any],
        *,
        card: str | None = None,
        ops: Iterable[Mapping[str, Any]] = (),
    ) -> DatasetVersion:
        """Add the version *entry*, ``dataset@version``, and pin its splits; names are relative to the current folder.

        Raises UrlError if the version exists, since versions are never edited, or if a manifest lacks the numbers of
        samples and bytes of a shard. ``save`` writes the file.
        """
        dataset, at, version = entry.partition("@")
        for name in (dataset, version, *splits):
            if not at or not _NAME.fullmatch(name):
                raise self._error(f"{shortened(name or entry)} is not a name: {NAMES}, as in imagenet@2")
        if version in self.versions.get(dataset, {}):
            raise self._error(f"{entry} exists, and versions are never edited; add another version")
        if not splits:
            raise self._error(f"{entry} needs a split")
        from tarshards.stream.stream import Stream

        self._check_ours()
        found: dict[str, Any] = {name: {"shards": self._relative(spec)} for name, spec in splits.items()}
        text: dict[str, Any] = {"splits": found, "ops": list(ops)}
        if card is not None:
            if not Location.of(card, self.location.remote).exists():
                raise self._error(f"{entry}: there is no card {Location.of(card).name}")
            text["card"] = spec_name(card, self._named)
        added = self._version(dataset, version, text)
        self._apply(Stream(()), added)
        self.versions.setdefault(dataset, {})[version] = added
        try:
            self.pin(entry)
        except BaseException:
            del self.versions[dataset][version]
            raise
        return self.versions[dataset][version]

    def _relative(self, spec: Any) -> list[str]:
        if isinstance(spec, str | os.PathLike | Shard):
            return [spec_name(spec.url if isinstance(spec, Shard) else spec, self._named)]
        return [name for each in spec for name in self._relative(each)]

    def _named(self, location: Location) -> str:
        """Return the name of a location, as the catalog writes it: relative to the catalog.

        Raises UrlError for a URL with credentials, unless the catalog is beside it, with the same ones.
        """
        location = location.expanduser()
        name = self.location.relative(location)
        if name == location.recorded != location.url:
            reason = f"a catalog keeps no credentials, and the URL of this part has some: {location.name}"
            raise UrlError(reason, url=self.location.name)
        return name

    def pin(self, entry: str | None = None) -> list[str]:
        """Add digests to the splits of *entry*, or of the whole catalog; return the names of those that had none.

        Raises StateError for a pinned split that has changed.
        """
        self._check_ours()
        pinned = []
        for name in self.entries(entry):
            version, split_name, split = self._split(name)
            shards = self.shards(name)
            if split.digest is not None:
                continue
            bare = next((shard for shard in shards if shard.samples is None or shard.size is None), None)
            if bare is not None:
                url = Location.of(bare.url).name
                cure = "index it with `tarindex`, and name the manifest that this writes"
                raise self._error(f"{name}: no manifest gives the samples and bytes of {url}; {cure}")
            version.splits[split_name] = split._replace(digest=digest_of(shards, version.ops))
            pinned.append(name)
        return pinned

    def verify(self, entry: str | None = None, *, content: bool = False) -> Iterator[Check]:
        """Compare the splits of *entry*, or of the whole catalog, with their digests, and the files with the manifests.

        Each file must exist with its size, and its index, if any, must have the digest in the manifest; with *content*
        the file is read and must have its SHA-256, if the manifest or the card of the version has one.
        """
        for name in self.entries(entry):
            version, _, split = self._split(name)
            faults = []
            try:
                shards = self.shards(name)
            except StateError as error:
                faults.append(error.reason)
                shards = self._expand(version, split)
            except (UrlError, OpenError) as error:
                faults.append(str(error))
                shards = Shards([])
            sums = self._sums(version) if content and any(shard.sha256 is None for shard in shards) else {}
            for shard in shards:
                known = shard.sha256 or sums.get(os.path.normpath(shard.url))
                faults += _faults(shard._replace(sha256=known), self.location.remote, content)
            samples, size = sum(shard.samples or 0 for shard in shards), sum(shard.size or 0 for shard in shards)
            yield Check(name, len(shards), samples, size, split.digest is not None, faults)

    def card(self, version: DatasetVersion) -> Location | None:
        """Return the location of the card of *version*, None if it has none; raise UrlError for a forbidden one."""
        if version.card is None:
            return None
        return self.location.resolve(version.card)

    def _sums(self, version: DatasetVersion) -> dict[str, str]:
        """Return the SHA-256 of the shards that the card of *version* lists, by their URLs; none without a card."""
        import json

        if (card := self.card(version)) is None:
            return {}
        try:
            listed = json.loads(card.read())["distribution"]
            found = [(file["contentUrl"], file["sha256"]) for file in listed if "contentUrl" in file]
            urls = [url if ":" in url or os.path.isabs(url) else card.beside(url).url for url, _ in found]
            return {os.path.normpath(url): sha256 for url, (_, sha256) in zip(urls, found)}
        except (ValueError, LookupError, TypeError) as error:
            raise self._error(f"{version.name}: {card.name} is not a card: {type(error).__name__}: {error}") from error

    def dump(self) -> str:
        """Return the text of the file: sorted, one entry per line, and equal for equal catalogs."""
        yaml = self._yaml()
        datasets: dict[str, dict[str, Any]] = {}
        for version in self:
            text: dict[str, Any] = {} if version.card is None else {"card": version.card}
            if version.metadata:
                text["metadata"] = dict(version.metadata)
            if version.ops:
                text["ops"] = [dict(each) for each in version.ops]
            text["splits"] = {name: _text_of(version.splits[name]) for name in sorted(version.splits)}
            datasets.setdefault(version.dataset, {})[version.version] = text
        head = {KIND: VERSION, "datasets": datasets}
        dumped: str = yaml.dump(
            head, Dumper=_plain_dumper(yaml), sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000
        )
        return dumped

    def save(self) -> None:
        """Write the file atomically; comments and everything besides entries are dropped."""
        self._check_ours()
        text = self.dump().encode()
        with self.location.open("wb") as stream:
            stream.write(text)

    def _check_ours(self) -> None:
        if self.is_foreign:
            raise self._error("a catalog of Squirrel is read-only")

    def _yaml(self) -> Any:
        try:
            return require("yaml", extra="yaml")
        except ModuleNotFoundError as error:
            raise OpenError(
                f"a catalog needs a package that is not installed: {error}", url=self.location.name
            ) from error

    def _error(self, reason: str) -> UrlError:
        return UrlError(reason, url=self.location.name)

    # Reading the file.

    def _parse(self, text: bytes) -> None:
        yaml = self._yaml()
        try:
            found = yaml.load(text, Loader=_loader(yaml))
        except yaml.YAMLError as error:
            raise self._error(f"not a catalog: {' '.join(str(error).split())}") from error
        except (RecursionError, UnicodeError, ValueError) as error:
            raise self._error(f"not a catalog: {type(error).__name__}: {error}") from error
        if isinstance(found, _Squirrel):
            self._take_squirrel(found.fields)
            return
        if not isinstance(found, dict) or KIND not in found:
            raise self._error(f"not a catalog: it has no {KIND}")
        if found[KIND] != VERSION:
            raise self._error(f"a catalog of version {shortened(found[KIND])}; only version {VERSION} is supported")
        self._check_keys(found, {KIND, "datasets"}, "the catalog")
        for dataset, versions in self._mapping(found.get("datasets") or {}, "datasets").items():
            for version, fields in self._mapping(versions, dataset).items():
                for name in (dataset, version):
                    if not _NAME.fullmatch(name):
                        raise self._error(f"{shortened(name)} is not a name: {NAMES}")
                read = self._version(dataset, version, fields)
                self.versions.setdefault(dataset, {})[version] = read

    def _version(self, dataset: str, version: str, fields: Any) -> DatasetVersion:
        name = f"{dataset}@{version}"
        self._check_keys(self._mapping(fields, name), {"splits", "card", "ops", "metadata"}, name)
        card, ops, metadata = fields.get("card"), fields.get("ops") or [], fields.get("metadata") or {}
        if card is not None and not isinstance(card, str):
            raise self._error(f"{name}: card is the name of a file, not {shortened(card)}")
        splits = {
            split: self._read_split(f"{name}/{split}", given)
            for split, given in self._mapping(fields.get("splits"), f"{name}: splits").items()
        }
        if not splits:
            raise self._error(f"{name} has no splits")
        if not isinstance(ops, list):
            raise self._error(f"{name}: ops is a list, not {shortened(ops)}")
        for each in ops:
            if not isinstance(each, dict) or len(each) != 1 or (op := next(iter(each))) not in OPS:
                raise self._error(
                    f"{name}: {shortened(each)} is not one of the ops {', '.join(OPS)}, with its arguments"
                )
            if isinstance(each[op], dict) and each[op].keys() & {"allow_unsafe", "on_error"}:
                raise self._error(f"{name}: a catalog may not set allow_unsafe or on_error of {op}")
        return DatasetVersion(
            dataset, version, splits, card, tuple(ops), metadata=self._mapping(metadata, f"{name}: metadata")
        )

    def _read_split(self, name: str, given: Any) -> Split:
        if not _NAME.fullmatch(name.partition("/")[2]):
            raise self._error(f"{shortened(name)} is not a name: {NAMES}")
        fields = given if isinstance(given, dict) else {"shards": given}
        self._check_keys(fields, {"shards", "digest"}, name)
        shards, digest = fields.get("shards"), fields.get("digest")
        specs: list[Any] = shards if isinstance(shards, list) else [shards]
        if not specs or not all(isinstance(spec, str) and spec for spec in specs):
            raise self._error(f"{name}: shards are an expression or a list of them, not {shortened(shards)}")
        if digest is not None and not (isinstance(digest, str) and re.fullmatch("sha256:[0-9a-f]{64}", digest)):
            raise self._error(f"{name}: digest is sha256: and 64 hex digits, not {shortened(digest)}")
        return Split(tuple(specs), digest)

    def _mapping(self, value: Any, name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._error(f"{name} is a mapping of names, not {shortened(value)}")
        return value

    def _check_keys(self, fields: Mapping[str, Any], known: set[str], name: str) -> None:
        if unknown := fields.keys() - known:
            raise self._error(f"{name} has {shortened(sorted(unknown)[0])}, and may have {', '.join(sorted(known))}")

    def _take_squirrel(self, found: Mapping[str, Any]) -> None:
        """Take the sources of a catalog of Squirrel, each a version with the one split "data"."""
        self.is_foreign = True
        sources = found.get("sources") or []
        if not isinstance(sources, list) or not all(isinstance(source, _Squirrel) for source in sources):
            raise self._error("a catalog of Squirrel has a list of sources, each a !YamlSource")
        for number, source in enumerate(sources):
            fields = source.fields
            dataset, driver, version = (fields.get(key) for key in ("identifier", "driver_name", "version"))
            options = fields.get("driver_kwargs") or {}
            if not isinstance(dataset, str) or not isinstance(driver, str) or not isinstance(options, dict):
                raise self._error(f"source {number} has no identifier, driver_name or driver_kwargs")
            version = "1" if version is None else str(version)
            url = options.get("url")
            format = DRIVERS.get(driver, driver) if isinstance(url, str) else driver
            splits = {"data": Split((url if isinstance(url, str) else "",))}
            metadata = self._mapping(fields.get("metadata") or {}, f"{dataset}@{version}: metadata")
            added = DatasetVersion(dataset, version, splits, format=format, metadata=metadata)
            self.versions.setdefault(dataset, {})[version] = added


def expand(file: Location, entry: str) -> Shards:
    """Return the shards of an *entry* of the catalog *file*; shard expressions call this."""
    return Catalog.load(file).shards(entry)


def digest_of(shards: Iterable[Shard], ops: Iterable[Mapping[str, Any]] = ()) -> str:
    """Return the digest of a split: over the names, samples, sizes and checksums of its shards, in order, and its ops.

    If all shards have digests of their keys and members, it covers these too. It does not depend on the dataset's
    location.

    >>> digest_of([Shard("a.tar", 3, 2048)]) == digest_of([Shard("http://host/d/a.tar", 3, 2048, indexed=True)])
    True
    """
    import json
    from hashlib import sha256

    shards = list(shards)
    rows = [[Location.of(shard.url).identity, shard.samples, shard.size, shard.sha256] for shard in shards]
    about: dict[str, Any] = {"ops": list(ops), "shards": rows}
    if shards and all(shard.digest for shard in shards):
        about["digests"] = [shard.digest for shard in shards]
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return f"sha256:{sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()}"


def _faults(shard: Shard, remote: Remote, content: bool) -> Iterator[str]:
    location = Location.of(shard.url, remote)
    try:
        size = location.size()
        if shard.size is not None and size is not None and size != shard.size:
            yield f"{location.name} has {size:,} bytes, and {shard.size:,} in its manifest"
            return
        check_described(shard, location)
        if content and shard.sha256 is not None and (found := location.sha256()) != shard.sha256:
            yield f"{location.name} has the SHA-256 {found}, and {shard.sha256} when it was described"
    except (OpenError, ShardIndexError) as error:
        yield str(error)


def _text_of(split: Split) -> Any:
    shards = split.shards[0] if len(split.shards) == 1 else list(split.shards)
    return shards if split.digest is None else {"shards": shards, "digest": split.digest}


class _Squirrel(NamedTuple):
    """A tagged mapping in a catalog of Squirrel."""

    fields: dict[str, Any]


def _loader(yaml: Any) -> Any:
    """Return a safe loader: names as written and unique; no aliases, which could expand to any size."""

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()
                raise yaml.composer.ComposerError(None, None, "aliases are not supported", event.start_mark)
            return super().compose_node(parent, index)

    def mapping(loader: Any, node: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in loader.construct_pairs_of(node):
            if key in found:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} comes twice", node.start_mark)
            found[key] = value
        return found

    def pairs(loader: Any, node: Any) -> Iterator[tuple[str, Any]]:
        if not isinstance(node, yaml.MappingNode):
            raise yaml.constructor.ConstructorError(None, None, "a mapping is needed", node.start_mark)
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a name is a word", key.start_mark)
            is_name = key.value == "identifier" and isinstance(value, yaml.ScalarNode)
            yield key.value, value.value if is_name else loader.construct_object(value, deep=True)

    def squirrel(loader: Any, node: Any) -> _Squirrel:
        return _Squirrel(mapping(loader, node))

    def number(construct: Any, loader: Any, node: Any) -> Any:
        """Return a number, or as text one of base 60, such as 1:30, whose size is the square of its digits' number."""
        return node.value if ":" in node.value else construct(loader, node)

    Loader.construct_pairs_of = pairs
    for kind in "int", "float":
        construct = getattr(Loader, f"construct_yaml_{kind}")
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", partial(number, construct))
    Loader.add_constructor("tag:yaml.org,2002:map", mapping)
    for tag in ("!YamlCatalog", "!YamlSource"):
        Loader.add_constructor(tag, squirrel)
    Loader.add_constructor("!CatalogKey", lambda loader, node: None)  # in a driver's arguments, which are not used
    return Loader


def _plain_dumper(yaml: Any) -> Any:
    """Return a safe dumper that writes no aliases, since the loader refuses them."""

    class PlainDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return PlainDumper
