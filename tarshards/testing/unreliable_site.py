"""A web server of several files whose responses fail according to a seeded schedule."""

from __future__ import annotations

import gzip
import random
import re
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tarshards.testing.faulty_server import Answer, Server

#: Transient faults: a client that retries, and resumes at the right byte, gets the right bytes.
PASSING = ("reset", "reset", "close", "close", "status", "status", "drop", "short", "slow", "stall", "redirect")
#: Faults that persist, or deliver wrong bytes: a client must detect them.
WRONG = ("shift", "total", "longer", "shorter", "unnamed", "encoded", "whole", "changed", "resized", "gone", "page")

STATUSES = (
    "408 Request Timeout",
    "429 Too Many Requests",
    "500 Internal Server Error",
    "502 Bad Gateway",
    "503 Service Unavailable",
    "504 Gateway Timeout",
)
DATES = tuple(f"Sat, 21 Nov 2026 0{hour}:00:00 GMT" for hour in range(3))
BUCKET = "/bucket"  # may precede the path, as in S3's path-style URLs
AGAIN = "/again"  # precedes the path of a redirect's target


@dataclass(repr=False)
class UnreliableSite(Server):
    """Serves *files*, each in three versions: unchanged, changed, and of another size.

    Every choice is drawn from the seed, the request's method, path and offset, and the number of earlier equal
    requests. *kinds* are the kinds of faults, *rate* is the fraction of faulty answers. `stored` has the bodies of PUT
    requests.
    """

    files: dict[str, tuple[bytes, bytes, bytes]] = field(default_factory=dict)
    seed: int = 0
    rate: float = 0.0
    kinds: tuple[str, ...] = PASSING
    faults: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    _versions: Counter[str] = field(default_factory=Counter)
    _asked: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        with self._lock:
            return self._choose(method, path.partition("?")[0], headers, body)

    def _choose(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[Answer, bytes]:
        span = re.match(r"bytes=(\d+)", headers.get("range", ""))
        asked = (method, path, span[1] if span else "")
        rng = random.Random(f"{self.seed}/{asked}/{self._asked[asked]}")
        self._asked[asked] += 1
        kind = ""
        if self._asked[asked] <= 2 and rng.random() < self.rate:
            kind = rng.choice(self.kinds)
        if kind == "redirect" and path.startswith(AGAIN):
            kind = ""
        if kind == "stall" and "stall" in self.faults:
            kind = "close"  # one is enough: each costs a timeout
        if kind:
            self.faults.append(kind)
        name = path.removeprefix(AGAIN).removeprefix(BUCKET)
        if method == "PUT":
            return self._stored(kind, name, path, int(headers.get("content-length", 0)), body, rng)
        if name not in self.files:
            return Answer("404 Not Found", etag=None, body=b"", end="keep"), b""
        if kind in ("changed", "resized"):
            self._versions[name] = 1 if kind == "changed" else 2
        number = self._versions[name]
        answer = self._answer(kind, path, len(self.files[name][number]), number, rng)
        return answer, self.files[name][number]

    def _answer(self, kind: str, path: str, size: int, number: int, rng: random.Random) -> Answer:
        ways = random.Random(f"{self.seed}/ways")
        framing = ways.choice(["length", "length", "chunked"])
        named: dict[str, Any] = ways.choice([{}, {}, {"etag": f'W/"v{number}"', "modified": DATES[number]}])
        named = {"etag": f'"v{number}"', **named}
        after = rng.choice(["keep", "keep", "keep", "close"])
        usual = Answer(framing=framing, end=after, **named)
        cut = rng.choice([rng.randrange(300), rng.randrange(300 + size)])
        known: dict[str, Answer] = {
            "reset": Answer(framing=framing, cut=cut, end="reset", **named),
            "close": Answer(framing=framing, cut=cut, **named),
            "stall": Answer(framing=framing, cut=cut, end="stall", **named),
            "drop": Answer(framing=framing, end="drop", **named),
            "short": Answer(framing=framing, most=rng.randrange(1, size), end=after, **named),
            "slow": Answer(framing=framing, pace=rng.choice([50, 700]), end=after, **named),
            "status": self._status(rng),
            "redirect": self._redirect(path, rng),
            "shift": Answer(framing=framing, shift=rng.choice([-1, 1, 512]), end=after, **named),
            "total": Answer(framing=framing, total=rng.choice([-1, 1, 10_240]), end=after, **named),
            "longer": Answer(length=rng.randrange(1, 600), end="drop", **named),
            "shorter": Answer(length=-rng.randrange(1, 200), end="keep", **named),
            "unnamed": Answer(framing=framing, etag=None, cut=rng.choice([None, cut])),
            "encoded": self._encoded(path.removeprefix(AGAIN).removeprefix(BUCKET), number, named),
            "whole": Answer(framing=framing, ranges=False, end=after, **named),
            "gone": Answer("404 Not Found", etag=None, body=b"not found", end=after),
            "page": Answer("200 OK", etag=None, body=b"<html>Please log in.</html>", end=after),
        }
        return known.get(kind, usual)

    def _status(self, rng: random.Random) -> Answer:
        wait = rng.choice([(), (("Retry-After", "1"),), (("Retry-After", "Sat, 21 Nov 2065 08:00:00 GMT"),)])
        return Answer(rng.choice(STATUSES), headers=wait, etag=None, body=b"busy", end=rng.choice(["keep", "close"]))

    def _redirect(self, path: str, rng: random.Random) -> Answer:
        status = rng.choice(["307 Temporary Redirect", "308 Permanent Redirect", "302 Found"])
        return Answer(
            status, headers=(("Location", AGAIN + path),), etag=None, body=b"", end=rng.choice(["keep", "close"])
        )

    def _encoded(self, name: str, number: int, named: dict[str, Any]) -> Answer:
        packed = gzip.compress(self.files[name][number])
        return Answer(headers=(("Content-Encoding", "gzip"),), body=packed, end="keep", **named)

    def _stored(
        self, kind: str, name: str, path: str, size: int, body: bytes, rng: random.Random
    ) -> tuple[Answer, bytes]:
        answers = {
            "status": self._status(rng),
            "redirect": Answer("307 Temporary Redirect", headers=(("Location", AGAIN + path),), body=b"", end="keep"),
            "reset": Answer(cut=0, end="reset"),
            "close": Answer(cut=rng.choice([0, 10])),
            "stall": Answer(cut=0, end="stall"),
            "drop": Answer("201 Created", body=b"", end="drop"),
        }
        if len(body) == size and kind not in ("status", "redirect"):
            self.stored[name] = body  # the answer may be lost
        return answers.get(kind, Answer("201 Created", body=b"", end="keep")), b""
