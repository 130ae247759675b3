"""A loader whose batches are made by feeders on other hosts."""

from __future__ import annotations

import copy
import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from tarshards.epoch.loop import Part
from tarshards.errors import whole_number
from tarshards.feed.feeders import Delivery, Feeders
from tarshards.feed.identity import identity, loader_of
from tarshards.feed.messages import decoded_error
from tarshards.loaders.monitor import BatchWork, Monitor
from tarshards.loaders.passes import Pass, Passes, ResumableLoader
from tarshards.samples.ledger import Tally
from tarshards.storage.traffic import Traffic

FED = 0.5  # if feeders make batches for this fraction of the time or more, they are the limit, not the link


@dataclass
class FeedMonitor(Monitor):
    """A ``Monitor`` with the *threads*, *reading* and *decoding* of the feeders; *again* counts repeated requests.

    >>> print(FeedMonitor(threads=4, waited=0.8, consumed=0.2, decoding=0.4, samples=1000))
    1,000 samples/s; waited 80% for the loader, its threads 90% for the consumer; the limit is link
    """

    again: int = 0

    @property
    def limit(self) -> str:
        """The bottleneck, as of a ``Monitor``, or "link": the network to feeders that are often idle."""
        limit = super().limit
        return limit if limit == "consuming" or self.idle < FED * self.threads * self.seconds else "link"


class RemoteLoader(ResumableLoader):
    """The batches of the loader that *spec* names, made by *feeders* on other hosts: the same ones, in the same order.

    *spec* is ``module:function``, whose function returns a ``ShardLoader`` or ``ArrayLoader`` of indexed shards, here
    and at each feeder (``tarfeed serve SPEC``); only its indexes are read here. *feeders* are addresses
    ``tcp://host:port``, also with braces, or ``dns:name:port``, every address of a name. Batch g depends on the spec,
    the data, epoch, state and rank alone, so that any feeder may make it: one that is silent for *patience* seconds is
    replaced by the others, and each batch is delivered once. Feeders with another source of the spec, other data or
    other versions are not used.

    ``len``, ``state_dict``, ``set_epoch``, the ledger and its audit are those of the loader, and so is what a batch is:
    its device, its pinned memory. Errors of samples go to the dataset's on_error here, and name the feeder. At most
    *prefetch* batches are held here or being made (default: twice what all feeders make at once).

    *keys* is a folder with the keys of ``tarfeed keys``; feeders on other hosts require it, unless *encrypted* is
    False.

    Raises UrlError for an invalid spec or address, and OpenError for keys that cannot be read; iterating raises
    OpenError if no feeder can be used, none answers for *timeout* seconds, or all fail to read a batch's data.
    """

    monitor: FeedMonitor = FeedMonitor()

    def __init__(
        self,
        spec: str,
        feeders: str | Iterable[str],
        *,
        keys: str | os.PathLike[str] | None = None,
        encrypted: bool = True,
        prefetch: int | None = None,
        patience: float = 10.0,
        timeout: float = 300.0,
    ):
        self._local = loader_of(spec)
        self.passes: Passes = self._local.passes
        self._prefetch = None if prefetch is None else whole_number("prefetch", prefetch, 1)
        self._feeders = Feeders(
            feeders,
            identity(spec, self._local),
            keys=None if keys is None else os.fspath(keys),
            encrypted=encrypted,
            patience=patience,
            timeout=timeout,
        )

    def make_batches(self, this: Pass) -> Generator[Any, None, None]:
        return self._local.finished(self._fed(this))

    def _fed(self, this: Pass) -> Generator[Any, None, None]:
        maker, plan, rank = self.passes.maker, this.plan, this.world.rank
        assert plan is not None  # which loader_of has checked
        source = copy.copy(maker.stream.source)
        source.shards = _ReadElsewhere(source.shards)
        shares = maker.shares(plan, rank)
        left_out = maker.left_out(plan, rank)
        loop = source.loop(plan, this.world, shares, whole=this.state is None, left_out=left_out)
        request = {"epoch": this.epoch, "state": this.state, "rank": rank, "ranks": plan.ranks}
        self._feeders.connect()
        near = -(-plan.block_and_reach[1] // (maker.size * plan.ranks))
        delivery = Delivery(self._feeders, uuid4().hex, request, len(shares), window=self._prefetch, near=near)
        try:
            with closing(loop.run(partial(self._receive, delivery))) as batches:
                yield from batches
        finally:
            delivery.leave()
        self.ledger.audit([loop.tally])

    def _receive(self, delivery: Delivery, parts: Iterable[Part]) -> Iterator[Any]:
        """Yield the batches of *parts* as they are delivered, and count what became of their samples."""
        for number, part in enumerate(parts):
            feeder, threads, words = delivery.take(number)
            part.taken, part.quarantined, part.members, left_out = words["counts"]
            if left_out is not None:
                part.leave_out(Tally(**left_out | {"filtered": Counter(left_out.get("filtered", {}))}))
            for was_read, error in words["errors"]:
                (self.ledger.fail if was_read else self.ledger)(decoded_error(error, feeder))
            monitor = self.monitor
            assert isinstance(monitor, FeedMonitor)
            monitor.threads, monitor.again = max(1, threads), delivery.again
            monitor.samples += part.taken - part.quarantined
            seconds, traffic = words["work"]
            monitor.add(BatchWork(seconds, Traffic(*traffic)))
            monitor.traffic += Traffic(*traffic)
            yield words.pop("batch")

    def close(self) -> None:
        """Close the connections to the feeders."""
        self._feeders.close()


class _ReadElsewhere:
    """The shards of a loop whose samples feeders read: their names and counts alone."""

    def __init__(self, shards: Any):
        self._shards = shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shards, name)

    def ahead(self, *_: Any, **__: Any) -> Any:
        return nullcontext(self)

    def verify(self) -> None:
        """The feeders compare what they read."""
