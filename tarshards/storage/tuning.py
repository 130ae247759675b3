"""The constants of reading over a network, each with its unit, its reason, and the effect of half or double.

"Without" is a factor of time or CPU with the mechanism switched off; `benchmarks/PROFILE.md` has the rows ("Remote
reading: each heuristic switched off" and "Constants of remote reading"). Half and double were measured only if an entry
mentions them. Numbers that follow from these, or from `Remote.connections`, are named here.
"""

from __future__ import annotations

#: Seconds after which an idle connection is not used again. Servers close them after about a minute: double would hand
#: out closed ones, and each costs a failed request; half would reopen connections between two epochs.
IDLE_SECONDS = 50.0

#: Seconds to the beginning of a response, above which a server is far. All connections then serve large requests, and
#: streams begin with large requests: at 200 ms, small ones take 1.41 times as long; near, large ones take 1.05. With
#: half, 50 ms is far: shuffled 110 KB samples take 1.4 times the requests. Double: no measured row is between.
FAR_SECONDS = 0.1

#: Seconds after which a body is judged, or twice the time of the fastest response.
#:
#: - It is late if it is slower than half the pace of others, and the rest would take this long, or five times the
#:   fastest response: idle connections fetch its rest. Without: shuffled 1.04, at 200 ms 1.09; streams 1.12. Half
#:   shares out 1 MiB at 3.3 MB/s, in 17 requests instead of 1, to gain 0.2 s; double leaves 2 MiB as they come, in 0.65
#:   s.
#: - It has stalled after twice as long without a byte, or five times the fastest response, if others received 1 MiB
#:   meanwhile: a packet that is lost repeatedly is sent after increasing pauses. Linux resends one after 0.2 s and a
#:   round trip, so half would give up on a connection that lost only one. Without losses, moving bodies makes no
#:   difference.
LATE_SECONDS = 0.25

#: Times that the rest of a range moves to another connection because it has stalled; then it stays until the timeout,
#: so a server that always stalls is not asked forever. With a timeout of 4 s, two stalls in turn take 1.0 s, and 4.9
#: with half; five take 5.9 s, and 2.1 with double, which asks a server that always stalls for each range twice as
#: often.
MOST_MOVES = 3

#: Bytes of a request of a file that is read sequentially, and of a block if no plan gives its size. They take 26 ms of
#: a line of 80 MB/s, so that with a few under way round trips of 50 ms cost little. Half takes 1.5 to 1.9 times the
#: requests and 1.3 to 1.45 times the CPU, double 0.56 to 0.74 and 0.65 to 0.78 times; but then fewer connections share
#: a small epoch.
#:
#: - A quarter is a large request, whose body takes longer than the wait for its response. Those to a near server use
#:   half of the connections, which fill the link; more would overflow its buffers. Without: shuffled 110 KB samples
#:   1.30, TLS 1.43, streams 1.17.
#: - One sample for as many bytes of a dataset is fetched singly, at most.
REQUEST_BYTES = 1 << 21

#: Bytes of the first request of a file, which are wasted if only its beginning is read. The budget of one file begins
#: as four of them. Half: one shard takes 1.15 times the requests, and its beginning a third round trip. Double: 0.85
#: times the requests, and the beginning 1.3 to 2 times the bytes. Indexes are fetched in parts of this size, or, from a
#: server that is far, of four times this size. Without, each comes over one connection: together they overflow the
#: buffers of the link, and late ones hold up the first batch of 256 of 1e8 samples, which takes 1.5 times as long.
#:
#: - The budget is divided into as many requests as half of the connections, for a far server an eighth. Connections are
#:   slow at their beginning, so many at once fill the line sooner; but each waits for a round trip, and of all to a
#:   near server, half may be large. Near an eighth: four streamed shards take 1.17 times as long; far a half: 1.41.
#: - An eighth, between two members or two reads, is fetched with them: it takes less time than another request.
FIRST_BYTES = 1 << 18

#: Bytes that arrive over a new connection in its first round trip: 10 packets (RFC 6928), one of them for the headers.
#: The first requests for whole files, such as indexes, have this size; later ones three times as much, which comes in
#: two round trips, and over a used connection in one. Idle connections fetch the rest, or that of a late request, in
#: parts no smaller. Without parts: first batch of 2 KB samples 1.22. Half: of 110 KB samples 1.05; double: of 500
#: shards 1.10. Blocks of this size arrive as soon as a sample would; only if they are larger are the first samples
#: fetched one by one. Before the size of a file is known, parts of half of FIRST_BYTES are requested at most.
WINDOW_BYTES = 13_000

#: Samples at the beginning of an epoch whose indexes are loaded before anything else: a small batch. With 0, the first
#: batch of 256 takes 1.10 times as long; with 256, 1.4 times in 500 shards. Four times as many are fetched one by one,
#: a large batch, and no more than one of so many: a quarter takes 6.2 s for a first batch of 256, not 1.4. Without the
#: latter, short epochs of 110 KB samples take 1.8 times the requests.
SOON_SAMPLES = 64

#: Seconds before the second attempt, doubled with every further one. The default 5 retries pause for 8 to 16 s in all,
#: in which most servers restart; half and double change that in proportion.
PAUSE_SECONDS = 0.5

#: Seconds of the longest pause; and for which further requests for a file go to the target of its last redirect. Hubs
#: limit the rate of requests to them: half doubles these. The signed URLs that they redirect to are valid for longer.
LONGEST_SECONDS = 60.0
