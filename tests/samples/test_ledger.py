"""The ledger: counts, threshold, merging over processes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest

from tarshards import Ledger
from tarshards.errors import AuditError, DecodeError, TarError
from tarshards.samples.keys import split_last, split_name
from tarshards.samples.ledger import PassOf, Tally, error_handler, tell_of_dots, wrong_number


def test_on_error_is_a_word_or_a_function(caplog):
    assert error_handler("raise") is error_handler(None) is None
    assert error_handler(print) is print
    error_handler("skip")(TarError("bad header checksum", url="a\n.tar", offset=512))
    assert caplog.record_tuples == [("tarshards", 30, r"left out: a\n.tar: offset 512: bad header checksum")]
    for wrong in ("Skip", 3):
        message = f'on_error must be "raise", "skip", a Ledger, or a function of the error, not {wrong!r}'
        with pytest.raises(ValueError, match=f"^{message}$"):
            error_handler(wrong)

    async def wait(error):
        """Coroutines would not be awaited."""

    with pytest.raises(TypeError, match=r"^on_error= does not await"):
        error_handler(wait)


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


@pytest.mark.parametrize("max_errors", [-1, float("nan"), None])
def test_a_threshold_is_a_number_from_0(max_errors):
    with pytest.raises(ValueError, match=rf'^max_errors must be a number from 0 to float\("inf"\), not {max_errors}$'):
        Ledger(max_errors=max_errors)


def test_of_any_handler():
    ledger = Ledger()
    assert Ledger.of(ledger) is ledger
    seen = []
    asked = Ledger.of(seen.append)
    odd = ValueError("odd")
    asked(odd)
    assert seen == [odd]
    assert asked.quarantined == [(None, None, None, None, "ValueError: odd")]
    with pytest.raises(ValueError, match="odd"):
        Ledger.of(None)(ValueError("odd"))


def test_the_cost_of_an_error_is_part_of_its_reason():
    ledger = Ledger(max_errors=1)
    error = TarError("truncated", url="a.tar", offset=512)
    error.cost = "3 samples lost"
    ledger(error)
    assert ledger.quarantined == [("a.tar", None, None, 512, "truncated; 3 samples lost")]


def test_counts_add_up():
    ledger = Ledger()
    for _ in range(2):
        ledger.count(samples=3, members=4, joined=1, unpaired=2)
        ledger.leave_out("filter(odd)", 2)
    assert (ledger.samples, ledger.members, ledger.filtered) == (2, 8, {"filter(odd)": 4})
    assert (ledger.joined, ledger.unpaired) == (2, 4)


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


def test_a_pickled_ledger_counts_errors_on():
    ledger = Ledger(max_errors=1)
    ledger(ValueError("odd"))
    with pytest.raises(ValueError, match="even"):
        pickle.loads(pickle.dumps(ledger))(ValueError("even"))


def test_a_copy_reports_each_count_once(monkeypatch):
    ledger = Ledger(max_errors=9)
    ledger.share()
    ledger.count(samples=100)
    ledger.report()
    pickled = pickle.dumps(ledger)
    returned = pickle.loads(pickled)
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        copy = pickle.loads(pickled)
        assert copy.samples == 0
        for samples in (10, 20):
            copy.count(samples=samples)
            copy.leave_out("filter(odd)")
            copy(TarError("bad", url="a.tar", offset=1))
            copy.fail(ValueError("odd"))
            copy.report()
            copy.report()
            assert (copy.samples, copy.filtered, copy.quarantined) == (0, {}, [])
    for _ in range(2):
        assert (ledger.samples, ledger.filtered) == (128, {"filter(odd)": 2})
        bad, odd = ("a.tar", None, None, 1, "bad"), (None, None, None, None, "ValueError: odd")
        assert ledger.quarantined == [bad, bad, odd, odd]
    assert str(ledger).endswith("\nquarantined      2\n  a.tar: offset 1: bad\n  a.tar: offset 1: bad")
    with monkeypatch.context() as other:
        other.setattr(os, "getpid", lambda: 1)
        copy.count(samples=1)
        copy.report()
    assert ledger.samples == 129
    assert returned.samples == 100, "a copy in the process of the original gets no reports"


def test_a_copy_whose_original_is_gone_keeps_its_counts(monkeypatch):
    ledger = Ledger()
    ledger.share()
    pickled = pickle.dumps(ledger)
    del ledger
    monkeypatch.setattr(os, "getpid", lambda: 1)
    copy = pickle.loads(pickled)
    copy.count(samples=1)
    copy.report()
    assert copy.samples == 1


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


def test_samples_read_outside_of_planned_epochs_are_not_in_the_sum(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, samples=10, streamed=2))
    ledger.check()


def test_a_count_that_is_short_names_its_shards(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 4}))
    message = "8 samples planned, 7 delivered, filtered, failed, quarantined or dropped"
    with pytest.raises(AuditError, match=rf"^{message}: b\.tar \(4 of 5\)$"):
        ledger.check()


@pytest.mark.parametrize("shards", [5, 6, 8])
def test_at_most_five_shards_are_named(shards):
    ledger = Ledger()
    ledger.know("set", [f"{n}.tar" for n in range(shards)], [2] * shards)
    ledger.add(account(2 * shards, {f"{n}.tar": 1 for n in range(1, shards)}))
    named = ["0.tar (0 of 2)", *(f"{n}.tar (1 of 2)" for n in range(1, 5))]
    with pytest.raises(AuditError) as raised:
        ledger.check()
    more = f" and {shards - 5} more" if shards > 5 else ""
    assert str(raised.value).endswith(f"or dropped: {', '.join(named)}{more}")


@pytest.mark.parametrize("counts", [{}, {"parts": 1}])
def test_shards_are_not_judged_by_a_part_of_an_epoch(ledger, counts):
    """The share of one of two ranks; or parts of two epochs, as many samples as in one."""
    ledger.add(account(8, {"a.tar": 4, "b.tar": 4}, **counts) if counts else account(4, {"a.tar": 4}))
    ledger.check()


def test_an_epoch_of_an_unknown_dataset_is_checked_by_its_number():
    ledger = Ledger()
    ledger.add(account(8, {"a.tar": 4, "b.tar": 4}))
    ledger.check()
    ledger.add(account(8, {"a.tar": 7}))
    with pytest.raises(AuditError, match="16 samples planned, 15"):
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


def test_epochs_in_several_orders_are_checked_together(ledger):
    for order in ("set one", "set two"):
        epoch = account(8, {"a.tar": 3, "b.tar": 5})
        epoch.epochs = Counter({order: 1})
        ledger.add(epoch)
    ledger.check()
    ledger.add(account(8, {"a.tar": 4, "b.tar": 4}))
    with pytest.raises(AuditError, match=r"a\.tar \(10 of 9\), b\.tar \(14 of 15\)"):
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
    message = "rank 1 has read other epochs than rank 0, or with another seed, state or dataset"
    with pytest.raises(AuditError, match=rf"^{message}: 4 samples of c\.tar, and rank 0 2 samples of a\.tar$"):
        ledger.audit([halves[0], other], all_ranks=True)
    with pytest.raises(AuditError, match=r": nothing, and rank 0 2 samples of a\.tar$"):
        ledger.audit([halves[0], Tally()], all_ranks=True)


def test_the_workers_of_a_rank_read_an_epoch_together(ledger):
    """The epoch is counted by one of them."""
    other = account(3, {"a.tar": 1, "b.tar": 2})
    other.epochs.clear()
    workers = [account(5, {"a.tar": 2, "b.tar": 3}), other]
    ledger.audit(workers)
    with pytest.raises(AuditError, match="rank 1 has read other epochs"):
        ledger.audit(workers, all_ranks=True)


def test_an_audit_counts_what_did_not_arrive(ledger):
    lost = account(8, {"a.tar": 3, "b.tar": 5}, in_flight=2)
    with pytest.raises(AuditError, match=r"^2 samples came out of the ops in a worker and did not arrive$"):
        ledger.audit([lost])
    lost.broken_off = 1
    ledger.audit([lost])


class Group:
    """Stands for a process group of two ranks, where the other one sends *other*, and for torch.distributed."""

    def __init__(self, other: Tally, backend: str = "gloo"):
        self.other, self.backend, self.size, self.waited = other, backend, 2, []

    def get_backend(self, group):
        return group.backend

    def monitored_barrier(self, group, *, timeout):
        group.waited.append(timeout)
        if group.other is None:
            raise RuntimeError("Rank 1 failed\nand more")

    def get_world_size(self, group):
        return group.size

    def all_gather_object(self, tallies, tally, *, group):
        assert len(tallies) == group.size
        tallies[:] = tally, group.other


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_check_of_all_ranks(ledger, monkeypatch, backend):
    group = Group(account(4, {"a.tar": 1, "b.tar": 3}), backend)
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    ledger.add(account(4, {"a.tar": 2, "b.tar": 2}))
    ledger.check(group)
    ledger.check(group, timeout=1.5)
    assert group.waited == [timedelta(seconds=300), timedelta(seconds=1.5)] * (backend == "gloo")
    group.other.read = Counter({"a.tar": 2, "b.tar": 2})
    with pytest.raises(AuditError, match=r"^not every sample was read once per epoch: a\.tar \(4 of 3\)"):
        ledger.check(group)
    group.other = None
    if backend == "gloo":
        with pytest.raises(AuditError, match=r"^not all ranks arrived within 2 s: Rank 1 failed$"):
            ledger.check(group, timeout=2)


def test_a_merged_ledger_knows_both_datasets(ledger):
    other = Ledger()
    other.know("other", ["c.tar"], [1])
    other.add(Tally(planned=1, samples=1, read=Counter({"c.tar": 1}), epochs=Counter({"other order": 1})))
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}))
    ledger.merge(other)
    ledger.check()
    assert pickle.loads(pickle.dumps(ledger)).check() is None
    ledger.add(account(8, {"a.tar": 4, "b.tar": 4}))
    with pytest.raises(AuditError, match=r"a\.tar \(7 of 6\), b\.tar \(9 of 10\)$"):
        ledger.check()


def test_the_table_of_a_planned_epoch(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, members=14, dropped=1, repeated=2).within(PassOf(2, 0, 1, 4)))
    ledger.check()
    assert str(ledger).splitlines() == [
        "epoch 2, rank 1 of 4: 8 planned + 2 repeated = 9 delivered + 1 dropped",
        "members         14",
        "delivered        9 samples",
        "dropped          1 samples, 2 repeated",
        "quarantined      0",
    ]


def test_the_table_of_an_epoch_that_lost_samples_on_its_way(ledger):
    ledger = Ledger(max_errors=9)
    ledger.know("set", ["a.tar", "b.tar"], [3, 5])
    ledger.add(
        account(
            8, {"a.tar": 3, "b.tar": 5}, quarantined_samples=2, failed=1, filtered=Counter({"filter(odd)": 3})
        ).within(PassOf(0, 0, 0, 1))
    )
    ledger.fail(DecodeError("not an image", url="a.tar", key="3", field="jpg"))
    ledger(TarError("truncated", url="b.tar", offset=512))
    ledger.check()
    assert (ledger.samples, ledger.filtered, ledger.failed) == (2, {"filter(odd)": 3}, 1)
    assert [entry.reason for entry in ledger.quarantined] == ["truncated", "not an image"]
    assert str(ledger).splitlines() == [
        "epoch 0: 8 planned = 2 delivered + 3 filtered + 1 failed + 2 quarantined",
        "members          0",
        "delivered        2 samples",
        "filtered         3 samples: 3 filter(odd)",
        "failed           1 samples",
        "  a.tar: 3.jpg: not an image",
        "dropped          0 samples, 0 repeated",
        "quarantined      2",
        "  b.tar: offset 512: truncated",
    ]


def test_the_table_of_an_epoch_that_was_left(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 1}, in_flight=1, broken_off=1).within(PassOf(0, 0, 0, 1)))
    ledger.check()
    assert ledger.unaudited
    assert str(ledger).splitlines() == [
        "epoch 0: 8 planned = 3 delivered + 1 in flight + 4 not taken (left early: unaudited)",
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


def test_the_table_of_planned_and_streamed_samples_of_joined_shards(ledger):
    ledger.add(account(8, {"a.tar": 3, "b.tar": 5}, samples=10, streamed=2, joined=1, unpaired=3, dropped=2))
    ledger.count(discarded=1, quarantined_samples=1)
    assert str(ledger).splitlines() == [
        "planned          8 samples",
        "streamed         2 samples",
        "joined           1 archives to the first of their shard",
        "members          0",
        "delivered        9 samples",
        "dropped          3 samples, 0 repeated",
        "unpaired         3 samples of joined shards",
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
    message = "no sample of this epoch was delivered: of 8 read, filter(odd) left out 7"
    assert caplog.record_tuples == [("tarshards", 30, message)]
    nothing.filtered = Counter({"where(one)": 2, "filter(odd)": 5})
    ledger.audit([nothing])
    assert caplog.messages[1].endswith("of 8 read, filter(odd) left out 5, where(one) left out 2")
    caplog.clear()
    ledger.audit([account(8, {"a.tar": 3, "b.tar": 5}, filtered=Counter({"filter(odd)": 7}))])
    ledger.audit([account(8, {"a.tar": 3, "b.tar": 5}, failed=8)])
    ledger.check()
    assert not caplog.records


def merged_by_dots(key: str):
    return {"__key__": key, "__url__": "a.tar"} | {f"{n}.jpg": b"" for n in range(70)}


def test_samples_merged_by_dots_in_keys_are_told_once(caplog):
    plain, merged = {"__key__": "a", "__url__": "a.tar", "jpg": b""}, merged_by_dots("b%s\n")
    tell_of_dots([merged], "a.tar", split_last, None)
    tell_of_dots([plain], "a.tar", split_name, None)
    assert not caplog.records
    ledger = Ledger()
    for samples in ([plain, merged, merged], [merged]):
        tell_of_dots(samples, "a.tar", split_name, ledger)
    [(name, level, message)] = caplog.record_tuples
    assert (name, level) == ("tarshards", 30)
    assert message.startswith(r"a.tar: b%s\n: 70 fields, such as 0.jpg: are there dots in the keys?")
    for _ in range(2):
        tell_of_dots([merged], "a.tar", split_name, None)
    assert len(caplog.records) == 3, "without a ledger, each time"


def test_a_number_of_samples_that_the_manifest_contradicts():
    message = "7 samples, but 10 in the manifest; check the shard with `tarcheck`, or run `tarindex`"
    assert str(wrong_number(7, 10, "a.tar")) == f"a.tar: {message}"
