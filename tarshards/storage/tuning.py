"""The constants of reading over a network, each with its unit, its reason, and the effect of half or double.

"Without" is a factor of time or CPU with the mechanism switched off; `benchmarks/PROFILE.md` has the rows ("Remote
reading: each heuristic switched off" and "Constants of remote reading"). Half and double were measured only if an entry
mentions them.
"""

from __future__ import annotations

# Connections.

#: Seconds after which an idle connection is not used again. Servers close them after about a minute: double would hand
#: out closed ones, and each costs a failed request; half would reopen connections between two epochs.
IDLE = 50.0

#: Seconds between two searches of the pool for connections that servers have closed. Each is a system call for every
#: idle connection: half doubles these calls, double lets twice as many closed connections wait.
SWEEP = 1.0

#: Bytes of an error's body that are read so that its connection can be reused: on most links, they arrive in less time
#: than a new connection takes. The bodies of most errors are much shorter, so half and double change little.
DRAINED = 1 << 16

# Bodies.

#: Bytes that must have arrived before a waiting thread is woken (SO_RCVLOWAT). Without: CPU of shuffled 110 KB samples
#: 1.9, of streams 2.1. With more, the kernel keeps its receive window small.
WAKE = 1 << 15

#: Records of TLS, of 16 KiB each, that must have arrived before a thread is woken. One: CPU 1.18. Double: not measured.
RECORDS = 2

#: Bytes of a body that are read or sent at once. Drops, late requests and early responses are noticed between two
#: pieces: double delays them at 1 MB/s from 0.26 to 0.5 s; half makes twice as many calls.
PIECE = 1 << 18

#: Seconds to the beginning of a response, above which a server is far. All connections then serve large requests, and
#: streams begin with large requests: at 200 ms, small ones take 1.41 times as long; near, large ones take 1.05. With
#: half, 50 ms is far: shuffled 110 KB samples take 1.4 times the requests. Double: no measured row is between.
FAR = 0.1

# Stalled connections: a packet that is lost repeatedly is sent after increasing pauses, while others arrive.

#: A body has stalled after STALL seconds without a byte, or after ANSWERS times the time of the fastest response,
#: whichever is longer. Linux resends a packet after 0.2 s and a round trip: half would give up on a connection that
#: lost only one. Without losses, moving bodies makes no difference (1.00 to 1.03).
STALL, ANSWERS = 0.5, 5

#: Bytes that other connections must have received in this time: otherwise the server, or the link, is slow. With STALL,
#: bodies stay where they are below 2 MB/s in all; half and double move this limit to 1 and 4 MB/s. Eight bodies that
#: pause for 0.8 s, at 1.3 MB/s in all, take 8 requests, with half 17, and without any limit 24.
ELSEWHERE = 1 << 20

#: Times that the rest of a range moves to another connection; then it stays until the timeout, so a server that always
#: stalls is not asked forever. With a timeout of 4 s, two stalls in turn take 1.0 s, and 4.9 with half; five take 5.9
#: s, and 2.1 with double, which asks a server that always stalls for each range twice as often.
MOVES = 3

# Large requests, whose bodies take longer than the wait for their responses.

#: Bytes of a large request: at 80 MB/s, 6.5 ms. Large requests to a near server use half of the connections, which fill
#: the link; more would overflow its buffers. Without: shuffled 110 KB samples 1.30, TLS 1.43, streams 1.17. Half and
#: double: these samples, whose blocks have 1 to 2 MiB, take as many requests. Double no longer counts blocks of less
#: than 1 MiB, half counts blocks of 256 KiB, which take 3.3 ms.
LARGE = 1 << 19

#: A large request is judged by its pace after LATE seconds, or twice the time of the fastest response. Idle connections
#: fetch its rest if it is slower than half the pace of others, and the rest would take more than LATE seconds, or five
#: times the time of the fastest response. Without: shuffled 1.04, at 200 ms 1.09; streams 1.12. Half shares out 1 MiB
#: at 3.3 MB/s, in 17 requests instead of 1, to gain 0.2 s; double leaves 2 MiB as they come, in 0.65 s.
LATE = 0.25

# Files that are read sequentially, and blocks of samples.

#: Bytes of a request of a file that is read sequentially, and of a block if no plan gives its size. They take 26 ms of
#: a line of 80 MB/s, so that with a few under way round trips of 50 ms cost little. Half takes 1.5 to 1.9 times the
#: requests and 1.3 to 1.45 times the CPU, double 0.56 to 0.74 and 0.65 to 0.78 times; but then fewer connections share
#: a small epoch.
REQUEST = 1 << 21

#: Bytes of the first request of a file, which are wasted if only its beginning is read. The budget of one file begins
#: as four of them. Half: one shard takes 1.15 times the requests, and its beginning a third round trip. Double: 0.85
#: times the requests, and the beginning 1.3 to 2 times the bytes. Indexes are fetched in parts of this size, or, from a
#: server that is FAR, of four times this size. Without, each comes over one connection: together they overflow the
#: buffers of the link, and late ones hold up the first batch of 256 of 1e8 samples, which takes 1.5 times as long.
FIRST = 1 << 18

#: Requests that the budget is divided into while it is small, for a near server and for one that is FAR. Connections
#: are slow at their beginning, so many at once fill the line sooner; but each waits for a round trip, and of 32 to a
#: near server, half may be large. NEAR as 8: four streamed shards take 1.17 times as long, as 32: 1.45 to 1.9 times the
#: requests. DISTANT as 16: at 200 ms 1.41, as 8: 1.14 to 1.65 times the requests, as 2: one round trip more.
NEAR, DISTANT = 16, 4

#: Bytes between two members, or two reads, that are fetched with them: they take 0.4 ms at 80 MB/s, less than another
#: request. Half makes two requests for members that are 16 to 32 KiB apart; double fetches up to 64 KiB that are not
#: needed.
GAP = 1 << 15

# The first samples of a shuffled epoch.

#: Samples at the beginning of an epoch whose indexes are loaded before anything else: a small batch. With 0, the first
#: batch of 256 takes 1.10 times as long; with 256, 1.4 times in 500 shards.
SOON = 64

#: The most samples that are fetched one by one: a large batch. A quarter: the first batch of 256 takes 6.2 s, not 1.4.
SINGLES = 256

#: The dataset has at least this many samples, and bytes, for each sample that is fetched singly: 180 MB of 2 KB samples
#: take 1.03 times as long with twice as many; with half as many, their first batch of 64 takes 1.7 s, not 0.57. Without
#: PER_SINGLE, short epochs of 110 KB samples take 1.8 times the requests.
PER_SINGLE, BYTES_PER_SINGLE = 64, 1 << 21

#: Bytes that arrive over a new connection in its first round trip: 10 packets (RFC 6928), one of them for the headers.
#: The first requests for whole files, such as indexes, have this size; later ones three times as much, which comes in
#: two round trips, and over a used connection in one. Idle connections fetch the rest, or that of a late request, in
#: parts no smaller. Without parts: first batch of 2 KB samples 1.22. Half: of 110 KB samples 1.05; double: of 500
#: shards 1.10. Blocks of this size arrive as soon as a sample would; only if they are larger are the first samples
#: fetched one by one.
INITIAL_WINDOW = 13_000

#: The most parts of a file that are requested before its size is known; those beyond its end are refused. 3: first
#: batch of 2 KB samples 1.05; without a limit, an epoch of one shard after the other takes 24 requests more.
PARTS_AHEAD = 8

# Failures.

#: Seconds before the second attempt, doubled with every further one, and the longest pause. The default 5 retries
#: pause for 8 to 16 s in all, in which most servers restart; half and double change that in proportion.
PAUSE, LONGEST_PAUSE = 0.5, 60.0

#: Redirects of one request, at most; browsers follow 20.
REDIRECTS = 10

#: Seconds for which further requests for a file go to the target of its last redirect. Hubs limit the rate of requests
#: to them: half doubles these. The signed URLs that they redirect to are valid for longer.
REMEMBERED = 60.0
