"""A loader whose batches are made by feeders on other hosts."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from tarshards.epoch.loop import Part
from tarshards.errors import whole_number
from tarshards.feed.feeders import Delivery, Feeders
from tarshards.feed.identity import identity, loader_of
from tarshards.feed.messages import COUNTED, decoded_error
from tarshards.loaders.monitor import Monitor
from tarshards.loaders.passes import Pass, ResumableLoader
from tarshards.samples.ledger import Tally

FED = 0.5  # feeders busy for at least this fraction of the time are the limit; otherwise it is the link


@dataclass
class FeedMonitor(Monitor):
    """A ``Monitor`` with the *threads*, *reading* and *decoding* of the feeders; *again* counts repeated requests.

    >>> print(FeedMonitor(threads=4, waited=0.8, consumed=0.2, decoding=0.4, samples=1000))
    1,000 samples/s; waited 80% for the loader, its threads 90% for the consumer; the limit is link
    """

    again: int = 0

    @property
    def limit(self) -> str:
        """The bottleneck, as in ``Monitor``, or "link": the network to feeders that are often idle."""
        limit = super().limit
        return limit if limit == "consuming" or self.idle < FED * self.threads * self.seconds else "link"


class RemoteLoader(ResumableLoader):
    """The batches of the loader that *spec* names, made by *feeders* on other hosts, the same and in the same order.

    *spec* is ``module:function``, whose function returns a ``ShardLoader`` or ``ArrayLoader`` of indexed shards, here
    and at each feeder (``tarfeed serve SPEC``); only its indexes are read here. *feeders* are addresses
    ``tcp://host:port``, also with braces, or ``dns:name:port``, all addresses of a name. Batch g depends only on the
    spec, the data, epoch, state and rank, so any feeder can make it: if a feeder is silent for *patience* seconds, the
    others take over, and each batch is delivered once. Feeders whose source of the spec, data or versions differ are
    not used.

    ``len``, ``state_dict``, ``set_epoch``, the ledger, its audit, and the device and pinned memory of batches are those
    of the loader. Errors of samples go to the dataset's on_error here, and name the feeder, as do all other errors,
    which are raised here when their batch is due. At most *prefetch* batches are held here or being made (default:
    twice what all feeders make in parallel).

    *keys* is a folder with the keys of ``tarfeed keys``; feeders on other hosts require it, unless *encrypted* is
    False.

    Raises UrlError for an invalid spec or address, and OpenError for keys that cannot be read; iterating raises
    OpenError if no feeder can be used, no batch comes for *timeout* seconds, or all fail to read a batch's data.
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
        self.passes = self._local.passes
        self._prefetch = None if prefetch is None else whole_number("prefetch", prefetch, 1)
        self._connect = partial(
            Feeders,
            feeders if isinstance(feeders, str) else list(feeders),
            identity(spec, self._local),
            keys=None if keys is None else os.fspath(keys),
            encrypted=encrypted,
            patience=patience,
            timeout=timeout,
        )
        self._connected = [self._connect()]
        self._idle = [*self._connected]  # those of no pass: for feeders, each is a consumer, which has one at a time

    def make_batches(self, this: Pass) -> Generator[Any, None, None]:
        return self._local.finished(self._fed(this))

    def _fed(self, this: Pass) -> Generator[Any, None, None]:
        loop = self.passes.loop(this)
        loop.reader = _ReadElsewhere(loop.reader)  # type: ignore[assignment]
        plan, shares = loop.plan, loop.shares
        request = {"epoch": this.epoch, "state": this.state, "rank": this.world.rank, "ranks": plan.ranks}
        group = -(-plan.block_and_reach[1] // (shares.size * plan.ranks))
        with self._feeders() as feeders:
            delivery = Delivery(feeders, uuid4().hex, request, len(shares), window=self._prefetch, group=group)
            try:
                with closing(loop.run(partial(self._receive, delivery))) as batches:
                    yield from batches
            finally:
                delivery.leave()
        self.ledger.audit([loop.tally])

    @contextmanager
    def _feeders(self) -> Iterator[Feeders]:
        """Connect to the feeders for a pass, besides the other passes that are alive."""
        try:
            feeders = self._idle.pop()
        except IndexError:
            feeders = self._connect()
            self._connected.append(feeders)
        try:
            feeders.connect()
            yield feeders
        except GeneratorExit:
            raise
        except BaseException:  # as a signal, which may have come in the middle of a message
            feeders.close()
            raise
        finally:
            self._idle.append(feeders)

    def _receive(self, delivery: Delivery, parts: Iterable[Part]) -> Iterator[Any]:
        """Yield the batches of *parts* as they are delivered, and count their samples."""
        for number, part in enumerate(parts):
            feeder, threads, words = delivery.take(number)
            for was_read, error in words["errors"]:
                (self.ledger.fail if was_read else self.ledger)(decoded_error(error, feeder))
            part.taken, part.quarantined, part.members, left_out = words["counts"]
            if left_out is not None:
                counted = {name: left_out[name] for name in COUNTED}
                part.leave_out(Tally(**counted, filtered=Counter(left_out["filtered"])))
            monitor = self.monitor
            assert isinstance(monitor, FeedMonitor)
            monitor.threads, monitor.again = max(1, threads), delivery.again
            monitor.samples += part.taken - part.quarantined
            monitor.add_sent(*words["work"])
            yield words.pop("batch")

    def close(self) -> None:
        """Close the connections to the feeders."""
        for feeders in self._connected:
            feeders.close()


class _ReadElsewhere:
    """The shards of a loop; only their names and counts are used, since the feeders read the samples."""

    def __init__(self, shards: Any):
        self._shards = shards

    def __getattr__(self, name: str) -> Any:
        return getattr(self._shards, name)

    def ahead(self, *_: Any, **__: Any) -> Any:
        return nullcontext(self)

    def verify(self) -> None:
        """Do nothing: the feeders verify what they read."""
