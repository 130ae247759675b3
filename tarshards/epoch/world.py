"""Which rank and which worker this process is: the only reader of rank variables and of torch's worker info."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeVar

from tarshards.errors import WorldError, shortened, whole_number

T = TypeVar("T")

log: logging.Logger = logging.getLogger("tarshards")

#: What starts several processes, and the variables in which it tells each its rank and their number. Those of MPI come
#: first: in a job of Slurm, `mpirun` starts its daemons by `srun`, whose variables they pass on.
LAUNCHERS = (
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("mpiexec", "PMI_RANK", "PMI_SIZE"),
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # a script of sbatch has no step
)
#: The items of a job are no ranks.
ITEMS = ("SLURM_ARRAY_TASK_ID", "TARJOB_RUN")


@dataclass(frozen=True)
class World:
    """One worker of one rank: *rank* of *world_size*, *worker* of *num_workers*, all counted from 0.

    *iterator* is a number that all workers of one iterator over a DataLoader share, and no others (None outside of
    workers). Raises WorldError for a rank or worker that does not exist, and TypeError for anything but integers.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    num_workers: int = 1
    iterator: int | None = None

    def __post_init__(self) -> None:
        for name in ("rank", "world_size", "worker", "num_workers"):
            self.__dict__[name] = whole_number(name, getattr(self, name))
        if not (0 <= self.rank < self.world_size and 0 <= self.worker < self.num_workers):
            raise WorldError(
                f"rank {self.rank} of {self.world_size}, worker {self.worker} of {self.num_workers}: out of range"
            )

    @classmethod
    def of(cls, world: World | None) -> World | None:
        """Return the value of ``world=``; raise TypeError unless it is a World or None."""
        if world is not None and not isinstance(world, World):
            raise TypeError(f"world must be a World, such as World(rank=0, world_size=2), not {shortened(world)}")
        return world

    @classmethod
    def detect(cls, ranks: World | None = None) -> World:
        """Ask torch.distributed (if initialised, else RANK and WORLD_SIZE) and torch's worker info.

        If *ranks* is given, its rank and world_size are used, and only the worker is detected. Lightning's launcher
        sets no RANK: on the first node it is LOCAL_RANK. torch is asked only if it is already imported. Raises
        WorldError if the variables make no sense.
        """
        rank, world_size = _detect_rank() if ranks is None else (ranks.rank, ranks.world_size)
        data = sys.modules.get("torch.utils.data")
        info = data.get_worker_info() if data else None
        if info is None:
            return cls(rank, world_size)
        return cls(rank, world_size, info.id, info.num_workers, _iterator_of(info))

    def check_announced(self, epoch: int) -> None:
        """Log a warning, once, if this was detected as the only rank, and a launcher has started several processes.

        Ranks are not taken from the launcher's variables, since parts of a sweep, and jobs that have shards of their
        own, have them too. Of the workers, the first does it in the first *epoch*.
        """
        if self.world_size == 1 and self.worker == 0 and (self.iterator is None or epoch == 0) and not _are_known():
            _log_unannounced()

    def check_ranks(self, count: int, parts: str, cure: str) -> None:
        """Raise WorldError, on every rank, if there are fewer than one for each rank of *count* shards or files.

        The message calls these *parts*, and ends in the advice *cure*.
        """
        if count < self.world_size:
            reason = f"{count} {parts} for {self.world_size} ranks: every rank needs at least one"
            raise WorldError(f"{reason}; write more and smaller {parts}, or {cure}")

    @property
    def processes(self) -> int:
        """The number of workers of all ranks on this host, if the launcher gives the number of these ranks."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        ranks = int(local) if local.isdecimal() and int(local) else self.world_size
        return min(ranks, self.world_size) * self.num_workers

    def share(self, items: Sequence[T]) -> Sequence[T]:
        """The items of this worker: every world_size-th is the rank's, and every num_workers-th of those the worker's.

        >>> World(rank=1, world_size=2, worker=0, num_workers=2).share("abcdefghij")
        'bfj'
        """
        return items[self.rank :: self.world_size][self.worker :: self.num_workers]

    def share_iterator(self, iterator: Iterator[T]) -> Iterator[T]:
        """The items of this worker, divided as in ``share``; the others are consumed and skipped.

        >>> "".join(World(rank=1, world_size=2, worker=0, num_workers=2).share_iterator(iter("abcdefghij")))
        'bfj'
        """
        if self.world_size * self.num_workers == 1:
            return iterator
        return islice(iterator, self.rank + self.worker * self.world_size, None, self.world_size * self.num_workers)

    def positions(self, total: int) -> range:
        """The positions of this worker in a sequence of *total*, divided as in ``share``."""
        return range(self.rank, total, self.world_size)[self.worker :: self.num_workers]


def _iterator_of(info: Any) -> int:
    """Return a number for the iterator that started this worker: of the pipe through which all its workers answer.

    It made that pipe for itself, and no other pipe of the host has the same number meanwhile. Where pipes have none,
    this relies on the iterator having started its workers one after the other; where there are neither, on torch's base
    seed, which iterators share if their generators are equal.
    """
    from multiprocessing import current_process

    process: Any = current_process()
    try:
        queue = process._args[process._target.__code__.co_varnames.index("data_queue")]
        pipe = os.fstat(queue._writer.fileno()).st_ino
        return hash((process._parent_pid, pipe or process._identity[-1] - info.id))
    except (AttributeError, IndexError, OSError, ValueError):
        return int(info.seed) - int(info.id)


def _process_group() -> Any:
    """Return torch.distributed if it is initialised, else None."""
    distributed = sys.modules.get("torch.distributed")
    return distributed if distributed and distributed.is_available() and distributed.is_initialized() else None


def _are_known() -> bool:
    """Return whether a process group or WORLD_SIZE tells the ranks, or these are items of a job."""
    return _process_group() is not None or any(name in os.environ for name in ("WORLD_SIZE", *ITEMS))


@cache
def _log_unannounced() -> None:
    """Log, once per process, that a launcher has started several processes; nothing if none has."""
    for launcher, rank, size in LAUNCHERS:
        if os.environ.get(rank, "").isdecimal() and (count := os.environ.get(size, "")).isdecimal() and int(count) > 1:
            log.warning(
                "%s started %s processes, and each of them reads the whole dataset: give it "
                "world=World(int(os.environ['%s']), int(os.environ['%s'])), or set RANK and WORLD_SIZE to these "
                "variables; world=World() if each shall read everything",
                *(launcher, count, rank, size),
            )
            return
    if os.environ.get("RANK", "").isdecimal():
        log.warning(
            "RANK is %s and WORLD_SIZE is not set, so this process reads the whole dataset: set WORLD_SIZE to the "
            "number of ranks, or give world=World(rank, world_size); world=World() if it shall read everything",
            os.environ["RANK"],
        )


def _detect_rank() -> tuple[int, int]:
    if (distributed := _process_group()) is not None:
        return distributed.get_rank(), distributed.get_world_size()
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    if size is None:
        return 0, 1
    if rank is None and os.environ.get("NODE_RANK") == "0":
        rank = os.environ.get("LOCAL_RANK")  # the ranks of the first node come first, however many a node has
    if rank is None:
        raise WorldError(f"WORLD_SIZE is {size!r} and RANK is not set: call init_process_group() first, or give world=")
    if not (rank.isascii() and rank.isdigit() and size.isascii() and size.isdigit()):
        raise WorldError(f"RANK={rank!r} and WORLD_SIZE={size!r} are not both whole numbers")
    return int(rank), int(size)
