"""Read the files of a directory tree as samples, and count files that are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tarshards.errors import SampleError, TarshardsError
from tarshards.samples.fields import find_field, split_fields
from tarshards.samples.keys import Sample, is_reserved, split_name
from tarshards.samples.ledger import ErrorPolicy, error_handler
from tarshards.samples.lines import checked
from tarshards.storage.streams import failure

MISSING = "fail", "skip", "ignore"


class TreeEntry(NamedTuple):
    """A sample, with the paths of its fields, or, if *folder* is not None, a folder."""

    key: str
    paths: dict[str, str]
    folder: str | None = None


class FileTree:
    """The files below *folder* as samples, in the order of ``tar --sort=name``; keys are relative to it."""

    def __init__(self, folder: str):
        self.folder = folder

    def read(
        self,
        *,
        fields: str | None = None,
        missing: str = "fail",
        class_field: str | None = None,
        skipped: Counter[str] | None = None,
        on_error: ErrorPolicy = "raise",
    ) -> Iterator[Sample]:
        """Yield the samples.

        *fields* selects fields ("jpg;png cls": words, each a field or alternatives; default: all). If a sample lacks
        some, *missing* decides: "fail" raises SampleError, "skip" leaves the sample out, "ignore" leaves the fields
        out. A sample that lacks all is left out. *class_field* adds a field with the number of the sample's top-level
        folder, as in ``classes``. *skipped* counts files without an extension, hidden files, links to folders, and
        samples that are left out. *on_error* gets the error of a sample that cannot be made, and may leave it out.
        Memory holds the names in the current folder and its parents.
        """
        if missing not in MISSING:
            raise ValueError(f"missing is {', '.join(MISSING)}, not {missing!r}")
        left_out: Counter[str] = Counter() if skipped is None else skipped
        classes = {} if class_field is None else self.classes()
        wanted = None if fields is None else [names for names in split_fields((fields,)) if class_field not in names]
        return checked(self._read(wanted, missing, class_field, classes, left_out), error_handler(on_error))

    def entries(self) -> Iterator[TreeEntry]:
        """Yield the key and the paths of the fields of each sample."""
        return _walk(self.folder, "", Counter())

    def digest(self) -> str:
        """Return a digest of the names, sizes and times of the files."""
        from hashlib import blake2b  # loads OpenSSL, which takes longer than parsing a tool's options

        digest = blake2b(digest_size=10)
        for entry in self.entries():
            for field, path in sorted(entry.paths.items()):
                try:
                    status = os.stat(path)
                except OSError as error:
                    raise failure(error, path) from error
                line = f"{entry.key}\0{field}\0{status.st_size}\0{status.st_mtime_ns}\n"
                digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def count_fields(self) -> Counter[str]:
        """Return the number of files for each field."""
        return Counter(field for entry in self.entries() for field in entry.paths)

    def classes(self) -> dict[str, int]:
        """Return the number of each folder in the folder: 0, 1, ... in the order of names, without hidden ones."""
        return {entry.name: number for number, entry in enumerate(filter(_is_open_folder, _scan(self.folder)))}

    def class_of(self, key: str, classes: Mapping[str, int]) -> int:
        """Return the number of the top-level folder of a sample; raise SampleError if it is in none."""
        name, slash, _ = key.partition("/")
        if not slash:
            raise SampleError("not in a folder named after its class", url=self.folder, key=key)
        return classes[name]

    def sample(self, key: str, paths: Mapping[str, str], numbers: Mapping[str, int]) -> Sample:
        """Return the sample of a key: the files at *paths*, and the fields that are *numbers*."""
        sample: Sample = {"__key__": key, "__url__": self.folder}
        for field, number in numbers.items():
            if field in paths:
                raise SampleError("a file for this field exists already", url=self.folder, key=key, field=field)
            sample[field] = b"%d" % number
        for field, path in paths.items():
            sample[field] = read_file(path)
        return sample

    def _read(
        self,
        wanted: list[list[str]] | None,
        missing: str,
        class_field: str | None,
        classes: Mapping[str, int],
        skipped: Counter[str],
    ) -> Iterator[Sample | TarshardsError]:
        for key, paths, _ in _walk(self.folder, "", skipped):
            if wanted is not None:
                found = [find_field(paths, names) for names in wanted]
                kept = {field: paths[field] for field in found if field is not None}
                lacking = [" or ".join(names) for names, field in zip(wanted, found) if field is None]
                if wanted and not kept:
                    skipped["samples without any of the fields"] += 1
                    continue
                if lacking and missing == "fail":
                    yield SampleError(f"no file for {', '.join(lacking)}", url=self.folder, key=key)
                    continue
                if lacking and missing == "skip":
                    skipped[f"samples without {', '.join(lacking)}"] += 1
                    continue
                paths = kept
            try:
                numbers = {} if class_field is None else {class_field: self.class_of(key, classes)}
                yield self.sample(key, paths, numbers)
            except TarshardsError as error:
                yield error


def _walk(folder: str, prefix: str, skipped: Counter[str]) -> Iterator[TreeEntry]:
    """Yield the samples below *folder*, in the order of their first files."""
    found: dict[str, TreeEntry] = {}
    for entry in _scan(folder):
        parts = split_name(prefix + entry.name)
        if entry.is_dir(follow_symlinks=False):
            if _is_open_folder(entry):
                found[entry.name + "/"] = TreeEntry("", {}, entry.path)
            else:
                skipped["hidden folders"] += 1
        elif entry.is_dir():
            skipped["links to folders"] += 1
        elif not entry.is_file() and not entry.is_symlink():
            skipped["files that are not regular"] += 1
        elif parts is None:
            skipped["hidden files" if entry.name.startswith(".") else "files without an extension"] += 1
        else:
            key, field = parts
            paths = found.setdefault(key, TreeEntry(key, {})).paths
            if field in paths:
                reason = f"{paths[field]} and {entry.path} are the same field"
                raise SampleError(reason, url=folder, key=key, field=field)
            paths[field] = entry.path
    for name, entry_found in found.items():
        if entry_found.folder is None:
            yield entry_found
        else:
            yield from _walk(entry_found.folder, prefix + name, skipped)


def _is_open_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) and not entry.name.startswith(".") and not is_reserved(entry.name)


def _scan(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        raise failure(error, folder) from error


def read_file(path: str) -> bytes:
    """Return the content of a file; raise OpenError if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except (OSError, ValueError) as error:
        raise failure(error, path) from error
