"""The ledger: counts, threshold, merging over processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from collections import Counter
from contextlib import suppress

import pytest

from tarshards import Ledger
from tarshards.errors import AuditError, DecodeError, TarError
from tarshards.samples.ledger import Tally


def test_counts_and_table():
    ledger = Ledger(max_errors=2)
    ledger.count(shards=2, members=20, samples=10)
    ledger.skip("directory")
    ledger.skip("no extension")
    ledger.skip("no extension")
    ledger(TarError("bad header checksum", url="a.tar", offset=512))
    assert (ledger.shards, ledger.members, ledger.samples) == (2, 20, 10)
    assert ledger.skipped == {"directory": 1, "no extension": 2}
    assert not ledger.unaudited
    assert str(ledger).splitlines() == [
        "shards           2",
        "members         20",
        "delivered       10 samples",
        "skipped          3 members: 1 directory, 2 no extension",
        "quarantined      1",
        "  a.tar: offset 512: bad header checksum",
    ]


def test_broken_off_is_unaudited():
    ledger = Ledger()
    ledger.count(broken_off=1)
    assert ledger.unaudited
    assert "1 broken off: unaudited" in str(ledger)


@pytest.mark.parametrize("max_errors", [0, 1, 3])
def test_raises_past_its_threshold(max_errors):
    ledger = Ledger(max_errors=max_errors)
    for _ in range(max_errors):
        ledger(ValueError("odd"))
    with pytest.raises(ValueError, match="odd"):
        ledger(ValueError("odd"))
    assert len(ledger.quarantined) == max_errors + 1


def test_of_any_handler():
    ledger = Ledger()
    assert Ledger.of(ledger) is ledger
    seen = []
    asked = Ledger.of(seen.append)
    asked(ValueError("odd"))
    assert len(seen) == len(asked.quarantined) == 1
    with pytest.raises(ValueError, match="odd"):
        Ledger.of(None)(ValueError("odd"))


def test_merge_and_clear():
    one, two = Ledger(max_errors=1), Ledger(max_errors=1)
    for ledger in (one, two):
        ledger.count(samples=3)
        ledger.skip("directory")
        ledger(ValueError("odd"))
    one.merge(two)
    assert (one.samples, one.skipped, len(one.quarantined)) == (6, {"directory": 2}, 2)
    one.clear()
    assert (one.samples, one.skipped, one.quarantined) == (0, {}, [])
    one(ValueError("odd"))  # the threshold counts anew


def _work(ledger: Ledger, samples: int) -> None:
    ledger.count(samples=samples)
    ledger.skip("directory")
    ledger.leave_out("filter(odd)")
    for record in (ledger, ledger.fail):
        with suppress(TarError):
            record(TarError("bad", url="a.tar", offset=1))
    ledger.report()
    ledger.count(samples=1)
    ledger.report()


METHODS = [pytest.param("fork", marks=pytest.mark.forks), "spawn", "forkserver"]


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_copies_in_other_processes_report_home(method):
    ledger = Ledger()
    ledger.share()
    ledger.count(samples=100)
    processes = [multiprocessing.get_context(method).Process(target=_work, args=(ledger, n)) for n in (10, 20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert ledger.samples == 130
    assert ledger.skipped == {"directory": 2}
    assert ledger.filtered == {"filter(odd)": 2}
    assert [entry.offset for entry in ledger.quarantined] == [1, 1, 1, 1]
    assert ledger.samples == 130, "reports are added once"


def test_a_pickled_ledger_brings_its_counts():
    ledger = Ledger()
    ledger.count(samples=5)
    assert pickle.loads(pickle.dumps(ledger)).samples == 5


def _keep_a_ledger(queue) -> None:
    global kept
    kept = Ledger()
    kept.share()
    queue.put(kept._mailbox.path)


@pytest.mark.usefixtures("quick_spawn")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_mailbox_goes_with_its_process(method):
    context = multiprocessing.get_context(method)
    queue = context.SimpleQueue()
    process = context.Process(target=_keep_a_ledger, args=(queue,))
    process.start()
    path = queue.get()
    process.join()
    assert not os.path.exists(path)


@pytest.mark.forks
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_copy_leaves_the_mailbox():
    ledger = Ledger()
    ledger.share()
    if (child := os.fork()) == 0:
        del ledger
        os._exit(0)
    os.waitpid(child, 0)
    assert os.path.exists(ledger._mailbox.path)


def test_the_mailbox_goes_with_its_owner():
    ledger = Ledger()
    ledger.share()
    path = ledger._mailbox.path
    assert os.path.exists(path)
    assert os.stat(path).st_mode & 0o77 == 0, "private"
    del ledger
    assert not os.path.exists(path)


def account(planned: int, read: dict[str, int], **counts) -> Tally:
    """The tally of an epoch, of whose samples those that are neither quarantined nor dropped were read."""
    samples = sum(read.values()) + sum(counts.get(name, 0) * sign for name, sign in SIGNS.items())
    return Tally(**{"samples": samples} | counts, planned=planned, read=Counter(read), epochs=Counter({"set order": 1}))


SIGNS = {"repeated": 1, "quarantined_samples": -1, "dropped": -1}


@pytest.fixture
def ledger() -> Ledger:
    """One that knows of a dataset of two shards, of 3 and 5 samples."""
    ledger = Ledger()
    ledger.know("set", ["a.tar", "b.tar"], [3, 5])
    return ledger


@pytest.mark.parametrize(
    "counts",
    [
        {},
        {"repeated": 1},
        {"dropped": 2},
        {"quarantined_samples": 8},
        {"failed": 3, "filtered": Counter({"filter(odd)": 5})},
    ],
)
def test_an_account_that_adds_up(ledger, counts):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, **counts))
    ledger.check()


def test_a_count_that_is_short_names_its_shards(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 4}))
    with pytest.raises(AuditError, match=r"^8 samples planned, 7 delivered.*: b\.tar \(4 of 5\)$"):
        ledger.check()


def test_samples_of_the_wrong_shard(ledger):
    ledger.add(account(8, {"a.tar": 4, "b.tar": 4}))
    with pytest.raises(AuditError, match=r"^not every sample was read once .*a\.tar \(4 of 3\), b\.tar \(4 of 5\)$"):
        ledger.check()


def test_a_part_of_an_epoch_is_checked_by_its_number_alone(ledger):
    ledger.add(account(4, {"b.tar": 4}, parts=1))
    ledger.check()
    ledger.add(account(4, {"b.tar": 3}, parts=1))
    with pytest.raises(AuditError, match="8 samples planned, 7"):
        ledger.check()


def test_several_epochs_are_checked_together(ledger):
    for _ in range(3):
        ledger.add(account(8, {"a.tar": 3, "b.tar": 5}))
    ledger.check()
    ledger.add(account(8, {"a.tar": 2, "b.tar": 6}))
    with pytest.raises(AuditError, match=r"a\.tar \(11 of 12\)"):
        ledger.check()


def test_what_was_broken_off_is_not_judged(ledger):
    ledger.add(account(8, {"a.tar": 1}, broken_off=1))
    ledger.check()
    assert ledger.unaudited


def test_the_parts_of_ranks(ledger):
    halves = [account(4, {"a.tar": 2, "b.tar": 2}), account(4, {"a.tar": 1, "b.tar": 3})]
    ledger.audit(halves, all_ranks=True)
    with pytest.raises(AuditError, match=r"a\.tar \(4 of 3\), b\.tar \(4 of 5\)"):
        ledger.audit([halves[0], halves[0]], all_ranks=True)
    other = account(4, {"c.tar": 4})
    other.epochs = Counter({"set another": 1})
    with pytest.raises(AuditError, match=r"rank 1 .* 4 samples of c\.tar, and rank 0 2 samples of a\.tar"):
        ledger.audit([halves[0], other], all_ranks=True)


def test_a_merged_ledger_knows_both_datasets(ledger):
    other = Ledger()
    other.know("other", ["c.tar"], [1])
    other.add(Tally(planned=1, samples=1, read=Counter({"c.tar": 1}), epochs=Counter({"other order": 1})))
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}))
    ledger.merge(other)
    ledger.check()
    assert pickle.loads(pickle.dumps(ledger)).check() is None


def test_the_table_of_a_planned_epoch(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, members=14, dropped=1, repeated=2))
    ledger.check()
    assert str(ledger).splitlines() == [
        "planned          8 samples",
        "members         14",
        "delivered        9 samples",
        "dropped          1 samples, 2 repeated",
        "quarantined      0",
    ]


def test_the_table_of_an_epoch_that_lost_samples_on_its_way(ledger):
    ledger = Ledger(max_errors=9)
    ledger.know("set", ["a.tar", "b.tar"], [3, 5])
    ledger.add(
        account(8, {"a.tar": 3, "b.tar": 5}, quarantined_samples=1, failed=1, filtered=Counter({"filter(odd)": 4}))
    )
    ledger.fail(DecodeError("not an image", url="a.tar", key="3", field="jpg"))
    ledger(TarError("truncated", url="b.tar", offset=512))
    ledger.check()
    assert (ledger.samples, ledger.filtered, ledger.failed) == (2, {"filter(odd)": 4}, 1)
    assert [entry.reason for entry in ledger.quarantined] == ["truncated", "not an image"]
    assert str(ledger).splitlines() == [
        "planned          8 samples",
        "members          0",
        "delivered        2 samples",
        "filtered         4 samples: 4 filter(odd)",
        "failed           1 samples",
        "  a.tar: 3.jpg: not an image",
        "dropped          0 samples, 0 repeated",
        "quarantined      1",
        "  b.tar: offset 512: truncated",
    ]


def test_the_table_of_an_epoch_that_was_left(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 1}, in_flight=1, broken_off=1))
    ledger.check()
    assert ledger.unaudited
    assert str(ledger).splitlines() == [
        "planned          8 samples, 4 not taken (1 broken off: unaudited)",
        "members          0",
        "delivered        3 samples, 1 in flight",
        "dropped          0 samples, 0 repeated",
        "quarantined      0",
    ]


def test_a_streamed_ledger_says_what_was_read_of_what_was_left_out():
    ledger = Ledger()
    ledger.count(shards=1, members=8, samples=4, failed=1, discarded=1)
    ledger.leave_out("filter(odd)")
    assert str(ledger).splitlines() == [
        "shards           1",
        "members          8",
        "read             4 samples",
        "delivered        1 samples",
        "filtered         1 samples: 1 filter(odd)",
        "failed           1 samples",
        "dropped          1 samples",
        "skipped          0 members",
        "quarantined      0",
    ]


@pytest.mark.parametrize("broken_off", [0, 1])
def test_a_sum_that_does_not_close(ledger, broken_off):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, samples=7, broken_off=broken_off))
    with pytest.raises(AuditError, match="8 samples taken, 7 read, quarantined or dropped"):
        ledger.check()


def test_more_left_out_than_read(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, failed=9))
    with pytest.raises(AuditError, match="8 samples read, and 9 filtered, failed"):
        ledger.check()


def test_an_audit_warns_where_filters_left_nothing(ledger, caplog):
    nothing = account(8, {"a.tar": 3, "b.tar": 5}, failed=1, filtered=Counter({"filter(odd)": 7}))
    ledger.audit([nothing])
    assert [record.getMessage() for record in caplog.records] == [
        "no sample of this epoch was delivered: of 8 read, filter(odd) left out 7"
    ]
    caplog.clear()
    ledger.audit([account(8, {"a.tar": 3, "b.tar": 5}, filtered=Counter({"filter(odd)": 7}))])
    ledger.audit([account(8, {"a.tar": 3, "b.tar": 5}, failed=8)])
    ledger.check()
    assert not caplog.records
