"""The numbers that reading over a network depends on, each with its unit, its reason, and what half or double changes.

"Without" is a factor of time or CPU with the mechanism switched off; `benchmarks/PROFILE.md` has the rows ("Remote
reading: each heuristic switched off"). Where nothing says what half or double does, it was not measured.
"""

from __future__ import annotations

# Connections.

#: Seconds after which an idle connection is not used again. Servers close them after about a minute: double would hand
#: out closed ones, and each costs a failed request; half would open connections again between two epochs.
IDLE = 50.0

#: Seconds between two searches of the pool for connections that servers have closed. Each is a system call for every
#: idle connection: half doubles these calls, double lets twice as many closed connections wait.
SWEEP = 1.0

#: Bytes of an error's body that are read, so that its connection can be used again: most links bring them in less time
#: than a new connection takes. The bodies of most errors are much shorter, so half and double change little.
DRAINED = 1 << 16

# Bodies.

#: Bytes that must have come before a waiting thread is woken (SO_RCVLOWAT). Without: CPU of shuffled 110 KB samples
#: 1.9, of streams 2.1. With more, the kernel keeps its receive window small.
WAKE = 1 << 15

#: Records of TLS, of 16 KiB each, that must have come before a thread is woken. One: CPU 1.18. Double: not measured.
RECORDS = 2

#: Bytes of a body that are read or sent at once. Drops, late requests and early answers are noticed between two pieces:
#: double delays them at 1 MB/s from 0.26 to 0.5 s; half makes twice as many calls.
PIECE = 1 << 18

#: Seconds to the beginning of an answer, above which a server is far. Then all connections are used for large requests,
#: and streams begin with large pieces: at 200 ms, small ones take 1.41 times as long; near, large ones take 1.05.
FAR = 0.1

# Stalled connections: a packet that is lost again and again is sent after ever longer pauses, while others arrive.

#: A body has stalled after STALL seconds without a byte, or after ANSWERS times the time of the fastest answer,
#: whichever is longer. Linux repeats a packet after 0.2 s and a round trip: half would give up on a connection that
#: lost only one. Without losses, moving bodies makes no difference (1.00 to 1.03).
STALL, ANSWERS = 0.5, 5

#: Bytes that other connections must have received meanwhile: otherwise it is the server, or the link, that is slow.
ELSEWHERE = 1 << 20

#: Times that the rest of a range moves to another connection; then it waits for its own until the timeout.
MOVES = 3

# Large requests, whose bodies take longer than the wait for their answers.

#: Bytes of a large request: at 80 MB/s, 6.5 ms. Large requests to a near server use half of the connections, which fill
#: the link; more would overflow its buffers. Without: shuffled 110 KB samples 1.30, TLS 1.43, streams 1.17.
LARGE = 1 << 19

#: A large request is judged by its pace after JUDGED seconds, or twice the time of the fastest answer. Idle connections
#: fetch its rest if it is slower than half the pace of others, and the rest would take more than LATE seconds, or five
#: times the time of the fastest answer. Without: shuffled 1.04, at 200 ms 1.09; streams 1.12.
JUDGED, LATE = 0.1, 0.25

# Whole files, such as indexes.

#: Bytes that come over a new connection in two round trips, by TCP's slow start (10 and 20 packets), less the headers.
#: Idle connections fetch the rest of a file, or of a late request, in parts no smaller. Without: first batch of 2 KB
#: samples 1.22. Half brings fewer bytes in the same time, double takes a third round trip.
BEGINNING = 5 << 13

# Failures.

#: Seconds before the second attempt, doubled with every further one, and the longest pause. The default 5 retries
#: pause for 8 to 16 s in all, in which most servers restart; half and double change that in proportion.
PAUSE, LONGEST_PAUSE = 0.5, 60.0

#: Redirects of one request, at most; browsers follow 20.
REDIRECTS = 10

#: Seconds for which further requests for a file go to the target of its last redirect. Hubs limit the requests to
#: themselves: half doubles these. The signed URLs that they redirect to are valid for longer.
REMEMBERED = 60.0
