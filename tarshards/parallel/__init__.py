"""Work beside the main thread: calls of any executor, a pool of processes, and child processes that end together.

- ``signals``: handlers of signals that raise, held back where an exception would leave a lock or a resource
- ``calls``: ``settled_map`` and ``bounded_map`` over any executor, ``shared_map`` of works that threads share in parts;
  ``DaemonThreads`` wait for a network, and ``EventLoop`` runs coroutines
- ``forks``: what a forked process does not share with its parent: files with locks, values, locks
- ``children``: a program with its descendants
- ``host``: how many cores, and how much memory, this process may use
- ``process_pool``: calls in processes; one that dies fails only its own call
"""
