"""A rank of examples/train.py that records its batches, and ends as RECORD says: for tests, under torchrun.

RECORD is JSON: the *folder* of the records, the number of the *run*, and perhaps the *end* that comes when *rank* has
been given its batch number *batch*: "preempted" (SIGTERM to this rank), or killed is the "rank", or "torchrun" with it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tarshards import ArrayLoader


class RecordingLoader(ArrayLoader):
    """Writes a line when a pass begins, and one for each batch: its keys, and the state after it."""

    count = 0

    def __iter__(self) -> Iterator[Any]:
        record, rank = json.loads(os.environ["RECORD"]), int(os.environ["RANK"])
        with open(Path(record["folder"]) / f"{record['run']}-{rank}.jsonl", "a", buffering=1) as file:
            if self.count == 0:
                file.write(json.dumps({"pid": os.getpid(), "state": self.state_dict()}) + "\n")
            for batch in super().__iter__():
                file.write(json.dumps({"keys": list(batch["__key__"]), "state": self.state_dict()}) + "\n")
                self.count += 1
                if (rank, self.count) == (record.get("rank"), record.get("batch")):
                    end(record["end"])
                yield batch


def end(how: str) -> None:
    if how == "preempted":
        os.kill(os.getpid(), signal.SIGTERM)
        return
    if how == "torchrun":
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import train

    train.ArrayLoader = RecordingLoader
    train.main(sys.argv[1:])
