"""Batches over the network: feeders make them on any number of hosts, and a RemoteLoader delivers them in order.

- ``identity``: the specification of a loader, and what must be equal on both sides
- ``messages``: batches and errors as frames of ZeroMQ
- ``encryption``: keys, and which addresses require it
- ``feeder``: the server, which makes batches that it is asked for
- ``feeders``: the consumer's side: its feeders, and which of them makes which batch
- ``remote_loader``: ``RemoteLoader``; ``cluster``: feeders on Kubernetes
"""
