"""The feeders of one consumer: their connections, the assignment of batches, and what happens if one is silent."""

from __future__ import annotations

import logging
import socket as sockets
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from time import monotonic
from typing import Any

from tarshards.errors import OpenError, UrlError, shortened, visible
from tarshards.feed.encryption import check_address, client_keys
from tarshards.feed.identity import differences
from tarshards.feed.messages import ANSWERS, TOGETHER, decode, decoded_error, encode
from tarshards.parallel.forks import renew_in_children
from tarshards.parallel.signals import TICK, defer_signals
from tarshards.samples.codecs.registry import require
from tarshards.storage.expressions import expand_braces

log: logging.Logger = logging.getLogger("tarshards")

LOOK_UP = 10.0  # seconds between queries of a name server


_CONNECTED = ("_feeders", "_by_socket", "_context", "_poller")  # attributes of no other process


class _Feeder:
    """One feeder: its connection, the batches *asked* of it, and the time of its last message (*heard*)."""

    def __init__(self, address: str, context: Any, keys: str | None):
        self._zmq = zmq = require("zmq", extra="feed")
        self.address: str = address
        self.asked: set[int] = set()
        self.instance: str | None = None  # identifies the process that answered; None until it has
        self.capacity = self.threads = 0
        self.refusal = ""  # the reason why it is not used, if any
        self.heard: float = monotonic()
        self.pinged: float = self.heard
        self.socket: Any = context.socket(zmq.DEALER)
        self.socket.linger, self.socket.sndhwm, self.socket.rcvhwm = 0, 0, 0
        self.socket.ipv6 = "[" in address
        self.socket.reconnect_ivl, self.socket.reconnect_ivl_max = 100, 2000
        if keys is not None:
            self.socket.curve_serverkey, self.socket.curve_publickey, self.socket.curve_secretkey = client_keys(keys)
        self.events: Any = self.socket.get_monitor_socket()
        self.socket.connect(address)

    @property
    def is_ready(self) -> bool:
        return self.instance is not None and not self.refusal

    def may_answer(self, patience: float) -> bool:
        """Whether it may still become ready: it is not refused, and silent for less than *patience* seconds."""
        return self.instance is None and not self.refusal and monotonic() - self.heard < patience

    def send(self, kind: str, **words: Any) -> None:
        self.socket.send_multipart(encode({"kind": kind, **words}))

    def ping(self) -> None:
        self.pinged = monotonic()
        self.send("hello")

    def receive(self) -> dict[str, Any] | None:
        """Return the next message, None if there is none; raise ValueError for what a feeder does not send."""
        try:
            frames = self.socket.recv_multipart(self._zmq.NOBLOCK, copy=False)
        except self._zmq.Again:
            return None
        return decode(frames, ANSWERS)

    def changes(self) -> Iterable[str]:
        """Yield what has happened to the connection: "open", "closed", or a reason why it cannot be used."""
        zmq = self._zmq
        from zmq.utils.monitor import recv_monitor_message

        while True:
            try:
                event = recv_monitor_message(self.events, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                yield "open"
            elif event == zmq.EVENT_DISCONNECTED:
                yield "closed"
            elif event in (zmq.EVENT_HANDSHAKE_FAILED_AUTH, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL):
                yield "it has other keys, or one side does not encrypt"

    def close(self) -> None:
        self.socket.disable_monitor()
        self.events.close(0)
        self.socket.close(0)


class Feeders:
    """The feeders at *addresses*: ``tcp://host:port`` with braces, or ``dns:name:port``, all addresses of a name.

    Only feeders with this *identity* are used; for any other, a warning says how it differs. If a feeder is silent for
    *patience* seconds, others make its batches; it is used again when it answers. Names are looked up every 10 seconds,
    so feeders may join and leave.

    Raises UrlError for an invalid address, and OpenError for keys that cannot be read.
    """

    def __init__(
        self,
        addresses: str | Iterable[str],
        identity: Mapping[str, str],
        *,
        keys: str | None,
        encrypted: bool,
        patience: float,
        timeout: float,
    ):
        self.renew()
        renew_in_children(self)
        named = [addresses] if isinstance(addresses, str) else list(addresses)
        self._names = [name for each in named for name in expand_braces(each)]
        self._identity, self._keys, self._encrypted = identity, keys, encrypted
        for name, value in (("patience", patience), ("timeout", timeout)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} must be a number of seconds above 0, not {shortened(value)}")
        self.patience = patience
        self.timeout = timeout
        if keys is not None:
            client_keys(keys)
        for name in self._names:
            if not name.startswith("dns:"):
                check_address(name, keys, encrypted)
            elif name.count(":") != 2 or (keys is None and encrypted):
                check_address(name.replace("dns:", "tcp://", 1), keys, encrypted)

    def renew(self) -> None:
        """Have no connections; a forked process leaves those of its parent to it."""
        self._feeders: dict[str, _Feeder] = {}
        self._by_socket: dict[Any, _Feeder] = {}
        self._context: Any = None
        self._poller: Any = None
        self._looked_up = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _CONNECTED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.renew()
        renew_in_children(self)

    @property
    def ready(self) -> list[_Feeder]:
        """The feeders that answer and have the same identity."""
        return [feeder for feeder in self._feeders.values() if feeder.is_ready]

    def connect(self) -> None:
        """Connect to all feeders; look up names again, and close connections to feeders that are gone."""
        has_names = any(name.startswith("dns:") for name in self._names)
        if self._feeders and not (has_names and monotonic() > self._looked_up + LOOK_UP):
            return
        if self._context is None:
            zmq = require("zmq", extra="feed")
            self._context, self._poller = zmq.Context(), zmq.Poller()
        self._looked_up = monotonic()
        addresses = [address for name in self._names for address in self._addresses(name)]
        for address in addresses:
            if address not in self._feeders:
                with defer_signals():
                    self._add(_Feeder(address, self._context, self._keys))
        for address in [address for address in self._feeders if address not in addresses]:
            if not self._feeders[address].asked:
                self._remove(self._feeders[address])

    def _add(self, feeder: _Feeder) -> None:
        self._feeders[feeder.address] = feeder
        for socket in (feeder.socket, feeder.events):
            self._by_socket[socket] = feeder
            self._poller.register(socket, require("zmq", extra="feed").POLLIN)

    def _remove(self, feeder: _Feeder) -> None:
        del self._feeders[feeder.address]
        for socket in (feeder.socket, feeder.events):
            del self._by_socket[socket]
            self._poller.unregister(socket)
        feeder.close()

    def _addresses(self, name: str) -> list[str]:
        if not name.startswith("dns:"):
            return [name]
        _, host, port = name.split(":")
        try:
            found = sockets.getaddrinfo(host, int(port), type=sockets.SOCK_STREAM)
        except OSError:  # no feeder of this name is running yet
            return []
        except ValueError as error:
            raise UrlError("feeders of a name are dns:name:port", url=name) from error
        hosts = sorted({str(each[4][0]) for each in found})
        return [f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}" for host in hosts]

    def close(self) -> None:
        """Close all connections; a pass that is alive then raises OpenError."""
        with defer_signals():
            for feeder in self:
                self._remove(feeder)
            if self._context is not None:
                self._context.term()
            self.renew()

    def __del__(self) -> None:
        self.close()

    def active(self, seconds: float) -> set[_Feeder]:
        """Wait for *seconds* at most; return the feeders that sent something or whose connection changed."""
        if self._poller is None:
            raise OpenError("the connections to the feeders were closed during a pass")
        wait = 1000 * max(0.0, min(seconds, TICK))  # less than none would be forever
        return {self._by_socket[socket] for socket, _ in self._poller.poll(wait)}

    def refuse(self, feeder: _Feeder, reason: str) -> None:
        """Leave a feeder out; raise OpenError if no other one can be used."""
        if feeder.refusal != reason:
            log.warning("feeder %s is not used: %s", feeder.address, reason)
        feeder.refusal = reason
        if all(each.refusal for each in self._feeders.values()):
            words = "; ".join(f"{each.address}: {each.refusal}" for each in self._feeders.values())
            raise OpenError(f"no feeder can be used: {words}")

    def welcome(self, feeder: _Feeder, words: Mapping[str, Any]) -> bool:
        """Record a feeder's identity and capacity; return whether it is a new process."""
        is_new = feeder.instance != words["instance"]
        feeder.instance, feeder.capacity, feeder.threads = words["instance"], words["capacity"], words["threads"]
        if found := differences(self._identity, words["identity"]):
            self.refuse(feeder, f"it differs in {visible(found)}")
        else:
            feeder.refusal = ""
        return is_new

    def __iter__(self) -> Any:
        return iter(list(self._feeders.values()))

    def late(self, number: int) -> OpenError:
        """Return the error to raise if batch *number* does not come, though other feeders could have made it."""

        def state(feeder: _Feeder) -> str:
            if feeder.is_ready:
                return f"answers, but does not make batch {number}" if number in feeder.asked else "answers"
            return feeder.refusal or f"silent for {monotonic() - feeder.heard:.0f} s"

        words = "; ".join(f"{feeder.address}: {state(feeder)}" for feeder in self) or ", ".join(self._names)
        what = "no feeder has made a batch" if self.ready else "no feeder has answered"
        return OpenError(f"{what} for {self.timeout:.0f} s: {words}")


class Delivery:
    """The *total* batches of one pass, in order; each is requested from a feeder by *request* and its number.

    At most *window* batches are held or being made (default: twice what all feeders make at once). One feeder makes
    each *group* of this many successive batches if possible, since they share blocks of the data.
    """

    def __init__(
        self, feeders: Feeders, name: str, request: Mapping[str, Any], total: int, *, window: int | None, group: int = 1
    ):
        self._feeders, self._name, self._request, self._total = feeders, name, request, total
        self._window, self._group = window, max(1, group)
        self._position = 0  # the number of the next batch to take
        self._heard = monotonic()  # when the last answer to a request came
        self._end, self._waiting = 0, set[int]()  # waiting: batches below the end that no feeder is making
        self._failed: dict[int, dict[str, BaseException]] = {}  # by number and feeder
        self._group_feeders: dict[int, str] = {}  # the address of the feeder that began each group
        self._arrived: dict[int, tuple[_Feeder, dict[str, Any]]] = {}
        self.again: int = 0  # batches that were requested again

    def take(self, number: int) -> tuple[str, int, dict[str, Any]]:
        """Wait for batch *number*, the next one; return its feeder's address, all feeders' threads, and its message.

        If no batch comes for half of the timeout, others make those of its feeder too. Raises OpenError if no feeder
        can be used, none answers a request within the timeout, or all fail to read the data; otherwise the error of a
        batch that cannot be made.
        """
        self._position = number
        entered = monotonic()  # silence before this does not count: no messages were read
        first = number // self._group
        self._group_feeders = {each: name for each, name in self._group_feeders.items() if each >= first}
        self._handle(entered)
        while number not in self._arrived:
            self._feeders.connect()
            self._ask()
            self._handle(entered, self._feeders.patience / 4)
            self._check_failed(number)
            waited = monotonic() - max(entered, self._heard)
            if waited > self._feeders.timeout:
                raise self._feeders.late(number)
            late = [feeder for feeder in self._feeders if number in feeder.asked]
            if waited > self._feeders.timeout / 2 and len(late) == 1:
                self._waiting |= late[0].asked
                self.again += len(late[0].asked)
        feeder, words = self._arrived.pop(number)
        self._ask()
        if words["kind"] == "failed":
            raise decoded_error(words["error"], feeder.address, words["traceback"])
        return feeder.address, sum(each.threads for each in self._feeders.ready), words

    def _check_failed(self, number: int) -> None:
        """Raise the error of batch *number* if every feeder that is ready, or may soon be, has failed to read it."""
        if errors := self._failed.get(number):
            hopeful = [each for each in self._feeders if each.is_ready or each.may_answer(self._feeders.patience)]
            if all(each.address in errors for each in hopeful):
                raise [*errors.values()][-1]

    def leave(self) -> None:
        """Tell feeders that no more batches are needed."""
        for feeder in self._feeders:
            if feeder.asked:
                feeder.send("leave", **{"pass": self._name})
                feeder.asked.clear()

    def _ask(self) -> None:
        """Ask feeders for the next batches, up to their capacity."""
        ready = self._feeders.ready
        window = self._window or 2 * sum(feeder.capacity for feeder in ready)
        end = min(self._total, self._position + window)
        self._waiting.update(range(self._end, end))
        self._end = max(self._end, end)
        while self._waiting and (idle := [each for each in ready if len(each.asked) < each.capacity]):
            asked = [self._ask_one(feeder) for feeder in sorted(idle, key=lambda each: len(each.asked) / each.capacity)]
            if not any(asked):
                return

    def _ask_one(self, feeder: _Feeder) -> bool:
        """Request one batch from *feeder*; return False if there is none for it to make."""
        numbers = [
            number
            for number in self._waiting
            if feeder.address not in self._failed.get(number, ()) and number not in feeder.asked
        ]
        if not numbers:
            return False

        def rank(number: int) -> tuple[bool, bool, int]:
            other = self._group_feeders.get(number // self._group)
            return other != feeder.address, other is not None, number

        number = min(numbers, key=None if self._group == 1 else rank)
        if not feeder.asked:
            feeder.heard = monotonic()
        self._waiting.discard(number)
        feeder.asked.add(number)
        self._group_feeders.setdefault(number // self._group, feeder.address)
        feeder.send("make", **{**self._request, "pass": self._name, "g": number})
        return True

    def _handle(self, entered: float, seconds: float = 0) -> None:
        """Wait up to *seconds* for messages, handle them all, and take back the batches of silent feeders."""
        for feeder in self._feeders.active(seconds):
            for change in feeder.changes():
                if change == "open":
                    feeder.heard = monotonic()
                    feeder.ping()
                elif change == "closed":
                    self._give_back(feeder)
                    feeder.instance = None
                else:
                    self._feeders.refuse(feeder, change)
            self._receive(feeder)
        now = monotonic()
        for feeder in self._feeders:
            silent = now - max(feeder.heard, entered)
            if feeder.instance is not None and silent > self._feeders.patience / 4:
                if now - feeder.pinged > self._feeders.patience / 4:
                    feeder.ping()
                if silent > self._feeders.patience:
                    log.warning("feeder %s is silent; others make its batches", feeder.address)
                    self._give_back(feeder)
                    feeder.instance = None

    def _receive(self, feeder: _Feeder) -> None:
        """Handle the messages of a feeder; leave it out if one of them is none of a feeder's."""
        for _ in range(TOGETHER):
            try:
                words = feeder.receive()
            except ValueError as error:
                self._give_back(feeder)
                feeder.instance = None
                self._feeders.refuse(feeder, visible(str(error)))
                return
            if words is None:
                return
            feeder.heard = monotonic()
            self._arrive(feeder, words)

    def _arrive(self, feeder: _Feeder, words: dict[str, Any]) -> None:
        if words["kind"] == "welcome":
            if self._feeders.welcome(feeder, words):
                self._give_back(feeder)
            return
        number = words.get("g", self._end)
        if words.get("pass") != self._name or number >= self._end:  # a message of an earlier pass
            return
        feeder.asked.discard(number)
        self._heard = monotonic()
        if number < self._position or number in self._arrived:  # another feeder was faster
            return
        if words["kind"] == "failed" and words["again"]:
            errors = self._failed.setdefault(number, {})
            errors[feeder.address] = decoded_error(words["error"], feeder.address, words["traceback"])
            log.warning("feeder %s cannot make a batch, others try: %s", feeder.address, errors[feeder.address])
            if not any(number in each.asked for each in self._feeders):
                self._waiting.add(number)
                self.again += 1
            return
        self._waiting.discard(number)
        self._failed.pop(number, None)
        self._arrived[number] = feeder, words

    def _give_back(self, feeder: _Feeder) -> None:
        for number in feeder.asked:
            if number not in self._arrived and number >= self._position:
                self._waiting.add(number)
                self.again += 1
        feeder.asked.clear()


def ask_status(
    addresses: Iterable[str], *, keys: str | None, encrypted: bool, seconds: float = 5.0
) -> dict[str, dict[str, Any] | None]:
    """Return the status of each feeder, None for one that does not answer within *seconds*."""
    feeders = Feeders(addresses, {}, keys=keys, encrypted=encrypted, patience=seconds, timeout=seconds)
    feeders.connect()
    try:
        answers: dict[str, dict[str, Any] | None] = {feeder.address: None for feeder in feeders}
        for feeder in feeders:
            feeder.send("status")
        end = monotonic() + seconds
        while None in answers.values() and monotonic() < end:
            for feeder in feeders.active(end - monotonic()):
                deque(feeder.changes(), 0)  # those not read would end the next wait at once
                with suppress(ValueError):  # it is no feeder
                    for words in islice(iter(feeder.receive, None), TOGETHER):
                        if words["kind"] == "status":
                            answers[feeder.address] = words
        return answers
    finally:
        feeders.close()
