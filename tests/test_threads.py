"""Whatever is read from web servers, the threads of a process are few: 8, and one for 4 requests under way."""

import threading

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from range_server import serving
from tar_corpus import pack

from tarshards import Remote, Stream
from tarshards.index.inventory import has_index
from tarshards.storage.expressions import find_shards
from tarshards.storage.wire import LOADERS
from tarshards.tar.read import END
from tarshards.verbs.create import read_plan

COUNT = 100
REMOTE = Remote()
MOST = 8 + REMOTE.connections // 4
OURS = ("tarshards-wire", "tarshards-call", "tarshards-load", "ThreadPoolExecutor")  # how names of threads begin


@pytest.fixture
def site(tmp_path):
    counts = []
    with serving(tmp_path) as site:

        def find(path, login):
            counts.append(sum(each.name.startswith(OURS) for each in threading.enumerate()))
            return path

        site.find, site.hold = find, 0.02
        yield site
    assert 0 < max(counts) <= MOST


@pytest.fixture
def urls(site):
    for number in range(COUNT):
        (site.folder / f"{number}.tar").write_bytes(pack([(f"{number}.txt", b"%d" % number)]) + END)
    return [f"{site.url}/{number}.tar" for number in range(COUNT)]


def test_indexes_that_are_looked_for(site, urls):
    (site.folder / "7.tar.index").write_bytes(b"there")
    assert has_index(find_shards(urls)) == [number == 7 for number in range(COUNT)]
    assert site.rounds <= COUNT // 10, "many are asked for at once"


def test_indexes_that_are_there_are_found_over_few_connections(site, urls):
    for number in range(COUNT):
        (site.folder / f"{number}.tar.index").write_bytes(bytes(3000))
    assert all(has_index(find_shards(urls)))
    assert site.connections <= 2 * REMOTE.connections < len(site.requests)


def test_fields_that_are_fetched(site, urls):
    plan = site.folder / "plan.tsv"
    plan.write_text("__key__\t@tar\n" + "".join(f"{number}\t{url}\n" for number, url in enumerate(urls)))
    assert [len(sample["tar"]) for sample in read_plan(str(plan))] == [2048] * COUNT
    assert site.rounds <= COUNT // 5


def test_samples_that_are_streamed(urls):
    assert [int(sample["txt"]) for sample in Stream.from_shards(urls, index=False)] == list(range(COUNT))


class Together(MemoryFileSystem):
    """A store that a package reads, which answers when so many files are asked for at once."""

    protocol = "together"
    asked = threading.Barrier(2 * LOADERS)

    def info(self, path, **options):
        self.asked.wait(10)
        return super().info(path, **options)


def test_a_store_that_a_package_reads_is_asked_by_more_threads():
    fsspec.register_implementation("together", Together, clobber=True)
    urls = [f"together://set/{number}.tar" for number in range(2 * LOADERS)]
    assert not any(has_index(find_shards(urls)))
