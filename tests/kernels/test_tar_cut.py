"""Members cut out of a buffer are like any others, and the kernel keeps nothing that it made."""

import gc
import pickle
import sys
import tracemalloc
from contextlib import suppress

import pytest
from tar_corpus import entry, header, pack

from tarshards.tar.read import END, Member

BUFFER = b"0123456789"


@pytest.fixture
def cut(tar):
    return tar.cut


def test_cut_makes_members_of_the_regular_files(cut):
    scanned = [("a", 0, 1, 3, ""), ("d/", 3, 3, 3, "directory"), ("b", 4, 10, 10, "")]
    assert cut(BUFFER, scanned, 1 << 40, Member) == [Member("a", b"12", 1 << 40), Member("b", b"", (1 << 40) + 4)]
    assert cut(BUFFER, [], 0, Member) == []


def test_cut_makes_members_like_any_others(cut):
    [member] = cut(BUFFER, [("a", 0, 0, 10, "")], 5, Member)
    assert type(member) is Member
    assert (member.name, member.data, member.offset) == ("a", BUFFER, 5)
    assert hash(member) == hash(Member("a", BUFFER, 5)) == hash(("a", BUFFER, 5))
    assert member in {Member("a", BUFFER, 5)}
    assert pickle.loads(pickle.dumps(member)) == member


@pytest.mark.parametrize("place", [(-1, 1), (1, 0), (0, 11), (11, 11), (9, 1 << 40)])
def test_cut_refuses_what_does_not_lie_in_the_buffer(cut, place):
    with pytest.raises(ValueError, match="lies outside the buffer"):
        cut(BUFFER, [("a", 0, 0, 1, ""), ("a", 0, *place, "")], 0, Member)


@pytest.mark.parametrize("type", [int, list, object])
def test_cut_makes_nothing_but_tuples(cut, type):
    with pytest.raises(TypeError):
        cut(BUFFER, [("a", 0, 0, 1, "")], 0, type)


def test_scan_and_cut_keep_nothing(tar):
    module = tar.kernel
    archive = pack([("a.txt", bytes(1000)), ("b" * 200, bytes(1000))]) + entry(name=b"d/", kind=b"5")

    def use():
        for end in (END, header(kind=b"S"), header(kind=b"x", size=b"?")):
            members = module.scan(archive + end, 0, False, 1 << 20)[0]
            assert len(module.cut(archive, members, 0, Member)) == 2
        for wrong in ([("a", 0, 0, 1 << 30, "")], [("a", 0, 0, None, "")], [("a", 0)]):
            with suppress(ValueError, TypeError, IndexError):
                module.cut(archive, members + wrong, 0, Member)

    use()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(100):
            use()
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 10_000
    finally:
        tracemalloc.stop()
    # What is shared by all, memory does not show.
    counts = sys.getrefcount(Member), sys.getrefcount("directory"), sys.getrefcount(None)
    for _ in range(100):
        use()
    after = sys.getrefcount(Member), sys.getrefcount("directory"), sys.getrefcount(None)
    assert all(abs(new - old) < 50 for new, old in zip(after, counts))
