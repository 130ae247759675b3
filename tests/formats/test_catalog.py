"""Catalogs: finding, pinning and checking versions, catalog entries as shard expressions, and Squirrel's own files."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from range_server import serving

from tarshards import IndexedShards, ShardWriter, Stream, expand_urls, read_samples
from tarshards.errors import OpenError, StateError, UrlError
from tarshards.formats.catalog import Catalog, Split, digest_of
from tarshards.formats.croissant import write_card
from tarshards.formats.msgpack_shards import write_msgpack
from tarshards.storage import expressions
from tarshards.storage.expressions import find_shards
from tarshards.storage.manifest import Shard

yaml = pytest.importorskip("yaml")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(folder: str, count: int = 6, *, first: int = 0, per_shard: int = 3) -> str:
    """Write samples to shards in *folder*; return the name of their manifest."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    with ShardWriter(f"{folder}/train-{{shard:03d}}.tar", max_samples=per_shard) as writer:
        for number in range(first, first + count):
            writer.write({"__key__": f"{number:04d}", "cls": number, "txt": f"text {number}"})
    return f"{folder}/train.shards.json"


@pytest.fixture
def catalog(here):
    """Two versions of one dataset in a catalog of another folder, saved."""
    made = Catalog("sets/catalog.yaml")
    made.add("digits@9", {"train": write("sets/old")})
    write("sets/new", 9)
    Path("sets/new/card.json").write_text("{}")
    made.add("digits@10", {"train": write("sets/new", 9), "val": write("sets/val", 3)}, card="sets/new/card.json")
    made.save()
    return Catalog.load("sets/catalog.yaml")


NEW = [f"sets/new/train-00{number}.tar" for number in range(3)]


def test_an_entry_is_a_shard_expression(catalog):
    assert expand_urls("sets/catalog.yaml#digits@10/train") == NEW
    assert find_shards("sets/catalog.yaml#digits@9") == find_shards("sets/old/train.shards.json")
    both = expand_urls("sets/catalog.yaml#digits@{9,10}/train::other.tar")
    assert both == ["sets/old/train-000.tar", "sets/old/train-001.tar", *NEW, "other.tar"]
    Path("list").write_text("sets/catalog.yaml#digits@10/val\n")
    assert expand_urls("@list") == ["sets/val/train-000.tar"]
    assert len(list(read_samples("sets/catalog.yaml#digits@10/train"))) == 9
    assert len(IndexedShards("sets/catalog.yaml#digits@10/train")) == 9


def test_the_default_version_is_the_newest_by_number(catalog):
    assert catalog["digits"].name == "digits@10"
    assert expand_urls("sets/catalog.yaml#digits/train") == NEW


def test_a_version_with_one_split_needs_no_name_of_it(catalog):
    assert len(catalog.shards("digits@9")) == 2
    with pytest.raises(UrlError, match=r"digits@10 has several splits; name one: digits@10/train, digits@10/val"):
        catalog.shards("digits@10")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("letters", r"sets/catalog\.yaml: no dataset 'letters'; there is 'digits'"),
        ("digits@3", r"no version of digits '3'; there is '9, 10'"),
        ("digits@9/test", r"no split of digits@9 'test'; there is 'train'"),
        ("", "is not dataset, dataset@version"),
        ("digits@", "is not dataset, dataset@version"),
        ("digits@9/a/b", "is not dataset, dataset@version"),
    ],
)
def test_what_does_not_exist_is_told_with_what_does(catalog, entry, reason):
    with pytest.raises(UrlError, match=reason):
        expand_urls(f"sets/catalog.yaml#{entry}")


def test_a_file_of_exactly_that_name_takes_precedence(here):
    Path("a.yaml#b").touch()
    assert expand_urls("a.yaml#b") == ["a.yaml#b"]
    assert expand_urls("a#2.tar") == ["a#2.tar"]


def test_the_whole_folder_can_be_moved(catalog, here):
    shutil.move("sets", "elsewhere")
    assert len(expand_urls(f"{here}/elsewhere/catalog.yaml#digits@10/train")) == 3
    assert Catalog.load("elsewhere/catalog.yaml")["digits"].card == "new/card.json"


def test_versions_are_never_edited(catalog):
    with pytest.raises(UrlError, match=r"digits@9 exists, and versions are never edited"):
        catalog.add("digits@9", {"train": "sets/val/train.shards.json"})
    before = catalog["digits@9"].splits["train"].digest
    write("sets/old", 6, per_shard=2)
    with pytest.raises(StateError) as caught:
        expand_urls("sets/catalog.yaml#digits@9/train")
    now = digest_of(find_shards("sets/old/train.shards.json"))
    assert before != now
    assert all(text in str(caught.value) for text in ("sets/catalog.yaml", "digits@9/train", before, now))
    with pytest.raises(StateError):
        catalog.pin()
    write("sets/old")  # the same samples give the same shards
    assert len(expand_urls("sets/catalog.yaml#digits@9/train")) == 2


def test_an_index_changes_no_digest(catalog, shell_tarindex):
    before = digest_of(find_shards("sets/old/train.shards.json"))
    for index in Path("sets/old").glob("*.index"):
        index.unlink()
    shell_tarindex("sets/old/train-{000..001}.tar")
    assert digest_of(find_shards("sets/old/train.shards.json")) == before


@pytest.fixture
def shell_tarindex(path_with_tools):
    environment = {**os.environ, "PATH": path_with_tools}
    return lambda *arguments: subprocess.run(["tarindex", *arguments], env=environment, check=True)


def test_the_digest_is_over_ops_too(here):
    shards = find_shards(write("a"))
    assert digest_of(shards) != digest_of(shards, [{"keep_fields": "cls"}])
    assert digest_of(shards) != digest_of(shards[::-1])
    assert digest_of(shards) != digest_of([shards[0]._replace(sha256="0" * 64), shards[1]])


def test_pin_gives_digests_to_what_was_written_by_hand(here):
    write("a")
    text = "tarshards_catalog: 1\ndatasets:\n  digits:\n    1:\n      splits: {train: a/train.shards.json}\n"
    Path("catalog.yaml").write_text(text)
    catalog = Catalog.load("catalog.yaml")
    assert catalog["digits"].splits["train"] == Split(("a/train.shards.json",))
    assert catalog.pin() == ["digits@1/train"]
    assert catalog.pin() == []
    catalog.save()
    again = Catalog.load("catalog.yaml")
    assert again["digits@1"].splits["train"].digest == digest_of(find_shards("a/train.shards.json"))


def test_only_manifests_are_pinned(here):
    write("a")
    with pytest.raises(UrlError, match=r"digits@1/train: no manifest gives the samples and bytes of a/train-000.tar"):
        Catalog("catalog.yaml").add("digits@1", {"train": "a/train-{000..001}.tar"})


def test_a_catalog_is_the_same_text_in_whatever_order_it_was_made(here):
    splits = [(f"{name}@{version}", write(f"{name}{version}", 3)) for name in "ba" for version in (1, 2, 10)]
    texts = set()
    for seed in range(5):
        random.Random(seed).shuffle(splits)
        catalog = Catalog("catalog.yaml")
        for entry, manifest in splits:
            catalog.add(entry, {"val": manifest, "train": manifest}, ops=[{"keep_fields": ["cls"]}])
        texts.add(catalog.dump())
        catalog.save()
        assert Catalog.load("catalog.yaml").dump() == catalog.dump()
    (text,) = texts
    assert [line.strip() for line in text.splitlines() if line.startswith("    '")] == ["'1':", "'2':", "'10':"] * 2
    assert not any(mark in text for mark in "&*")  # no aliases


def test_a_stream_has_the_ops_of_its_version(here):
    catalog = Catalog("catalog.yaml")
    catalog.add("digits@1", {"train": write("a")}, ops=[{"decode": {"only": "cls"}}, {"to_tuple": ["txt", "cls"]}])
    assert catalog.stream("digits").collect()[:2] == [(b"text 0", 0), (b"text 1", 1)]
    first = [number for _, number in catalog.stream("digits", shuffle=True, seed=1)]
    assert sorted(first) == list(range(6))
    assert first == [number for _, number in catalog.stream("digits", shuffle=True, seed=1)]
    catalog.add(
        "digits@2", {"train": "a/train.shards.json"}, ops=[{"rename_fields": {"label": "cls"}}, {"decode": None}]
    )
    assert catalog.stream("digits@2").take(1).collect()[0]["label"] == b"0"


@pytest.mark.parametrize(
    ("ops", "reason"),
    [
        ([{"map": "print"}], "is not one of the ops decode"),
        ([{"decode": {"allow_unsafe": True}}], "may not set allow_unsafe"),
        ([{"decode": "rgb9"}], "the op decode refuses"),
        ([{"keep_fields": ["cls"], "decode": None}], "is not one of the ops"),
        (["decode"], "is not one of the ops"),
        ([{"decode": {"nonsense": 1, "only": 7}}], "the op decode refuses"),
    ],
)
def test_ops_are_data_and_are_checked(here, ops, reason):
    with pytest.raises(UrlError, match=reason):
        Catalog("catalog.yaml").add("digits@1", {"train": write("a")}, ops=ops)


@pytest.mark.parametrize(
    "name", ["pipe:touch ran", "PIPE:touch ran", "-", "@list", "catalog.yaml#a", "simplecache::pipe:id"]
)
def test_a_catalog_runs_no_commands_and_reads_no_lists(here, name):
    Path("list").write_text("pipe:touch ran\n")
    text = {"tarshards_catalog": 1, "datasets": {"a": {"1": {"splits": {"train": name}}}}}
    Path("catalog.yaml").write_text(yaml.safe_dump(text))
    with pytest.raises(UrlError, match=r"catalog\.yaml: a catalog (may not name|names shards)"):
        Stream.from_shards("catalog.yaml#a", allow_pipe=True).collect()
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd", "simplecache::/etc/passwd", "~/x.tar"])
def test_a_remote_catalog_names_no_local_files(name):
    import fsspec

    text = {"tarshards_catalog": 1, "datasets": {"a": {"1": {"splits": {"train": name}}}}}
    fsspec.filesystem("memory").pipe("/bad/catalog.yaml", yaml.safe_dump(text).encode())
    if name.startswith("~"):  # the name of a folder there
        assert expand_urls("memory://bad/catalog.yaml#a") == ["memory://bad/~/x.tar"]
    else:
        with pytest.raises(UrlError, match="a catalog may not name"):
            expand_urls("memory://bad/catalog.yaml#a")
    fsspec.filesystem("memory").rm("/bad", recursive=True)


@pytest.mark.parametrize("spec", ["a-" + "{0..9}" * 8 + ".tar", "{00..99999999}"])
def test_a_catalog_of_a_few_bytes_does_not_stand_for_any_number_of_shards(spec):
    import fsspec

    text = {"tarshards_catalog": 1, "datasets": {"a": {"1": {"splits": {"train": spec}}}}}
    fsspec.filesystem("memory").pipe("/endless/catalog.yaml", yaml.safe_dump(text).encode())
    with pytest.raises(UrlError, match="100,000,000 names; an expression names at most 3,000,000 shards") as caught:
        expand_urls("memory://endless/catalog.yaml#a")
    assert caught.value.url == "memory://endless/catalog.yaml"
    fsspec.filesystem("memory").rm("/endless", recursive=True)


def test_the_shards_of_a_split_are_counted_together(here, monkeypatch):
    monkeypatch.setattr(expressions, "MOST_SHARDS", 10)
    for count in 9, 10:
        text = {"tarshards_catalog": 1, "datasets": {"a": {"1": {"splits": {"all": ["x", f"a-{{1..{count}}}"]}}}}}
        Path(f"{count}.yaml").write_text(yaml.safe_dump(text))
    assert len(expand_urls("9.yaml#a")) == 10
    with pytest.raises(UrlError, match=r"^10\.yaml: an expression names at most 3,000,000 shards$"):
        expand_urls("10.yaml#a")


@pytest.mark.parametrize("name", ["/etc/passwd", "file:///etc/passwd", "pipe:id"])
def test_a_remote_catalog_names_no_local_card(name):
    import fsspec

    text = {"tarshards_catalog": 1, "datasets": {"a": {"1": {"card": name, "splits": {"train": "a.tar"}}}}}
    fsspec.filesystem("memory").pipe("/bad/catalog.yaml", yaml.safe_dump(text).encode())
    with pytest.raises(UrlError, match="a catalog may not name"):
        list(Catalog.load("memory://bad/catalog.yaml").verify(content=True))
    fsspec.filesystem("memory").rm("/bad", recursive=True)


def test_a_catalog_of_a_web_server(catalog, here):
    with serving(Path(here)) as site:
        base = f"{site.url}/sets"
        assert expand_urls(f"{base}/catalog.yaml#digits@10/val") == [f"{base}/val/train-000.tar"]
        signed = expand_urls(f"{base}/catalog.yaml?token=secret#digits@10/val")
        assert signed == [f"{base}/val/train-000.tar?token=secret"]
        with pytest.raises(UrlError) as caught:
            expand_urls(f"{base.replace('//', '//me:password@')}/catalog.yaml?token=secret#nothing")
        assert "no dataset 'nothing'" in str(caught.value)
        assert not any(secret in str(caught.value) for secret in ("password", "secret"))


def test_verify_finds_what_a_web_server_lacks(here):
    catalog = Catalog("catalog.yaml")
    catalog.add("digits@1", {"train": write("a", 12)})
    catalog.save()
    Path("a/train-000.tar").unlink()
    with open("a/train-001.tar", "ab") as shard:
        shard.write(bytes(512))
    with serving(Path(here)) as site:
        (check,) = Catalog.load(f"{site.url}/catalog.yaml").verify()
    missing, other = check.faults
    assert missing.startswith(f"{site.url}/a/train-000.tar: ")
    assert other.startswith(f"{site.url}/a/train-001.tar has ")


GOOD = "tarshards_catalog: 1\ndatasets: {a: {1: {splits: {train: x.tar}}}}\n"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it has no tarshards_catalog"),
        ("[1, 2]", "it has no tarshards_catalog"),
        ("a: [", "not a catalog: while parsing"),
        (b"\xff\xfe\x00\x01a", "not a catalog"),
        (GOOD.replace("catalog: 1", "catalog: 2"), "version 2; only version 1"),
        (GOOD + "more: 1\n", "the catalog has 'more'"),
        (GOOD.replace("{train: x.tar}", "{}"), "a@1 has no splits"),
        (GOOD.replace("{train: x.tar}", "x.tar"), "a@1: splits is a mapping"),
        (GOOD.replace("x.tar", "7"), "shards are an expression or a list of them, not 7"),
        (GOOD.replace("x.tar", "{shards: x.tar, digest: sha256:12}"), "digest is sha256: and 64 hex digits"),
        (GOOD.replace("{a:", "{a/b:"), "is not a name"),
        (GOOD.replace("{splits", "{card: 7, splits"), "card is the name of a file"),
        (GOOD.replace("{splits", "{digest: x, splits"), "a@1 has 'digest', and may have card"),
        (GOOD.replace("x.tar}", "x.tar, train: y.tar}"), "'train' comes twice"),
        (GOOD.replace("x.tar", "&x x.tar, val: *x"), "aliases are not supported"),
        (GOOD.replace("x.tar", "!!python/object/apply:os.system [id]"), "could not determine a constructor"),
        ("[" * 100_000, "not a catalog"),
    ],
)
def test_files_that_are_no_catalogs(here, text, reason):
    Path("catalog.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UrlError, match=rf"^catalog\.yaml: .*{reason}"):
        Catalog.load("catalog.yaml")


def test_names_are_as_they_are_written(here):
    """1.10 is no number, and `on` no truth."""
    Path("catalog.yaml").write_text("tarshards_catalog: 1\ndatasets: {on: {1.10: {splits: {no: x.tar}}}}\n")
    assert expand_urls("catalog.yaml#on@1.10/no") == ["x.tar"]
    catalog = Catalog.load("catalog.yaml")
    catalog.save()
    assert [version.name for version in Catalog.load("catalog.yaml")] == ["on@1.10"]


def test_verify_finds_what_is_missing_short_or_changed(here):
    catalog = Catalog("catalog.yaml")
    manifest = write("a", 12)
    catalog.add("digits@1", {"train": manifest})
    (check,) = catalog.verify(content=True)
    size = sum(path.stat().st_size for path in Path("a").glob("*.tar"))
    assert check == ("digits@1/train", 4, 12, size, True, [])
    Path("a/train-000.tar").unlink()
    with open("a/train-001.tar", "ab") as shard:
        shard.write(bytes(512))
    (check,) = catalog.verify()
    assert [fault.partition(" ")[0] for fault in check.faults] == ["a/train-000.tar:", "a/train-001.tar"]
    write("a", 6)
    (check,) = catalog.verify()
    assert check.faults[0].startswith("digits@1/train has changed: pinned as sha256:")


def test_verify_reads_the_content_if_it_is_asked_to(here):
    Path("a").mkdir()
    with ShardWriter("a/train-{shard:03d}.tar", sha256=True) as writer:
        writer.write({"__key__": "a", "txt": "good"})
    catalog = Catalog("catalog.yaml")
    catalog.add("digits@1", {"train": "a/train.shards.json"})
    data = Path("a/train-000.tar").read_bytes()
    Path("a/train-000.tar").write_bytes(data.replace(b"good", b"evil"))
    assert [check.faults for check in catalog.verify()] == [[]]
    ((fault,),) = [check.faults for check in catalog.verify(content=True)]
    assert "has the SHA-256" in fault


def test_verify_knows_the_checksums_of_the_card(here):
    manifest = write("sets/a")
    write_card("sets/card.json", {"train": manifest}, name="digits")
    catalog = Catalog("catalog.yaml")
    catalog.add("digits@1", {"train": manifest}, card="sets/card.json")
    assert [check.faults for check in catalog.verify(content=True)] == [[]]
    data = Path("sets/a/train-001.tar").read_bytes()
    Path("sets/a/train-001.tar").write_bytes(data.replace(b"text 4", b"text 5"))
    ((fault,),) = [check.faults for check in catalog.verify(content=True)]
    assert fault.startswith("sets/a/train-001.tar has the SHA-256")
    Path("sets/card.json").write_text("[]")
    with pytest.raises(UrlError, match=r"digits@1: sets/card.json is not a card"):
        list(catalog.verify(content=True))


def test_without_pyyaml_the_extra_is_named(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("catalog.yaml").write_text(GOOD)
    with pytest.raises(OpenError, match=r"yaml is missing: pip install 'tarshards\[yaml\]'"):
        expand_urls("catalog.yaml#a")


def test_expressions_without_catalogs_import_no_yaml():
    program = "import sys; from tarshards import expand_urls; expand_urls('a-{0..9}.tar'); "
    program += "sys.exit(any(name in sys.modules for name in ('yaml', 'tarshards.formats.catalog')))"
    subprocess.run([sys.executable, "-c", program], check=True)


# Squirrel's own catalogs.

SQUIRREL = """!YamlCatalog
version: 0.20.2
sources:
- !YamlSource
  identifier: train
  driver_name: webdataset
  driver_kwargs:
    url: shards/train-{0..1}.tar
    storage_options: {secret: topsecret}
  version: 2
  metadata:
    author: A
- !YamlSource
  identifier: no
  driver_name: messagepack
  driver_kwargs: {url: gs://project/cifar10}
  version: 1
- !YamlSource
  identifier: mixed
  driver_name: source_combiner
  driver_kwargs:
    subsets: {a: !CatalogKey {identifier: train, version: 2}}
"""


def test_a_catalog_of_squirrel_is_read(here):
    Path("catalog.yaml").write_text(SQUIRREL)
    catalog = Catalog.load("catalog.yaml")
    assert [version.name for version in catalog] == ["mixed@1", "no@1", "train@2"]
    assert expand_urls("catalog.yaml#train") == ["shards/train-0.tar", "shards/train-1.tar"]
    assert catalog["train"].metadata == {"author": "A"}
    assert catalog["no"].format == "msgpack"
    with pytest.raises(UrlError, match=r"no@1 is of msgpack, not of tar shards"):
        expand_urls("catalog.yaml#no@1")
    with pytest.raises(UrlError, match=r"mixed@1 needs Squirrel's driver source_combiner, which is not"):
        expand_urls("catalog.yaml#mixed")
    with pytest.raises(UrlError, match="of Squirrel is read-only"):
        catalog.save()


def test_msgpack_shards_of_a_catalog_of_squirrel_are_streamed(here):
    samples = [{"__key__": f"{number}", "x": number} for number in range(5)]
    Path("d/cifar10").mkdir(parents=True)
    for shard in range(2):
        write_msgpack(samples[3 * shard :][:3], f"d/cifar10/{shard}.gz")
    Path("d/catalog.yaml").write_text(SQUIRREL.replace("gs://project/", ""))
    stream = Catalog.load("d/catalog.yaml").stream("no")
    assert [(sample["__key__"], sample["x"]) for sample in stream] == [(f"{number}", number) for number in range(5)]
    assert len(list(stream)) == 5, "again"
    Path("d/cifar10/0.gz").write_bytes(b"damaged")
    assert len(list(Catalog.load("d/catalog.yaml").stream("no", on_error="skip"))) == 2


@pytest.mark.interop
def test_a_catalog_that_squirrel_wrote(here, squirrel):
    from squirrel.catalog import Catalog as TheirCatalog
    from squirrel.catalog import CatalogKey, Source

    theirs = TheirCatalog()
    for number, driver in enumerate(["messagepack", "jsonl", "csv", "parquet", "zarr", "webdataset"]):
        for version in (1, 2):
            source = Source(driver, {"url": f"d{number}/v{version}"}, {"license": "MIT", "tags": [1, {"a": None}]})
            theirs[f"set-{number}"] = source
    theirs["on"] = Source("source_combiner", {"subsets": {"a": CatalogKey("set-1", 1)}})
    theirs.to_file("theirs.yaml")
    ours = Catalog.load("theirs.yaml")
    assert [version.name for version in ours] == ["on@1", *[f"set-{i}@{v}" for i in range(6) for v in (1, 2)]]
    assert [ours[f"set-{i}"].format for i in range(6)] == ["msgpack", "jsonl", "csv", "parquet", "zarr", "tar"]
    assert expand_urls("theirs.yaml#set-5@{1,2}") == ["d5/v1", "d5/v2"]
    assert ours["set-0"].metadata == {"license": "MIT", "tags": [1, {"a": None}]}
    assert Shard("d5/v2") in ours.shards("set-5")


def waits_for_the_lock_of(folder: Path, process: subprocess.Popen) -> bool:
    with suppress(OSError):  # it has ended, or closed a file meanwhile
        return any(file.readlink() == folder for file in Path(f"/proc/{process.pid}/fd").iterdir())
    return False


def test_versions_that_two_processes_add_at_once_are_both_kept(here):
    write("a")
    tool = Path(__file__).parents[2] / "bin" / "tarcatalog"
    command = [sys.executable, str(tool), "add", "new.yaml", "d@2", "train=a/train.shards.json"]
    with Catalog.locked("new.yaml", create=True) as catalog:
        catalog.add("d@1", {"train": "a/train.shards.json"})
        other = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while other.poll() is None and not waits_for_the_lock_of(here, other):
            time.sleep(0.01)
        catalog.save()
    assert other.wait(60) == 0
    assert list(Catalog.load("new.yaml").entries()) == ["d@1/train", "d@2/train"]
