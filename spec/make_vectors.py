"""Write `vectors.json`: indexes of some cases, and orders of some epochs and mixtures, as docs/ describes them.

`python spec/make_vectors.py` computes them with tarshards: other programs compare what they read or compute.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tarshards import EpochPlan
from tarshards.epoch.choices import Choices
from tarshards.epoch.proportions import Quotas
from tarshards.index.build import build_index

SPEC = Path(__file__).parent
INDEXED = ("plain", "hard-link", "symlink-before", "sparse-1.0", "pax-path-utf8", "python-latin1", "field-twice")
INDEXED += ("key-again", "append", "empty-archive", "only-directories")
EPOCHS: tuple[tuple[list[int], dict[str, Any]], ...] = (
    ([10], {"seed": 0, "epoch": 0}),
    ([10], {"seed": 0, "epoch": 1}),
    ([10], {"seed": 1, "epoch": 0}),
    ([3, 0, 5, 1], {"seed": 7, "epoch": 2}),
    ([7, 7, 7], {"seed": 0, "epoch": 0, "ranks": 4, "tail": "pad"}),
    ([7, 7, 7], {"seed": 0, "epoch": 0, "ranks": 4, "tail": "drop"}),
    ([500, 300, 200], {"seed": 0, "epoch": 0, "pool": 192, "block": 4}),
    ([200_000, 150_000], {"seed": 0, "epoch": 0}),
    ([400_000], {"seed": 0, "epoch": 0, "sizes": [400_000 * 110_000]}),
)
MIXTURES: tuple[dict[str, Any], ...] = (
    {"weights": [1, 1], "sizes": [12, 12], "until": "first", "seed": 0, "epoch": 0},
    {"weights": [1, 1], "sizes": [12, 12], "until": "first", "seed": 0, "epoch": 1},
    {"weights": [0.5, 0.3, 0.2], "sizes": [20, 5, 7], "until": "last", "seed": 3, "epoch": 0},
    {"weights": [3, 1], "sizes": [10, 10], "until": 24, "seed": 1, "epoch": 2, "lanes": [4, 1]},
    {"weights": [{0: 1, 8: 0}, {0: 1, 16: 3}, 1], "sizes": [9, 40, 40], "until": 32, "seed": 0, "epoch": 0},
)


def indexes() -> list[dict[str, str]]:
    """Return the bytes of the sidecar of each case, in hexadecimal digits."""
    return [{"case": name, "index": build_index(str(SPEC / "cases" / name / "a.tar")).pack().hex()} for name in INDEXED]


def orders() -> list[dict[str, Any]]:
    """Return the shard and sample of the first positions of each epoch, and the state after them."""
    found = []
    for counts, options in EPOCHS:
        plan = EpochPlan(counts, **options)
        count = min(len(plan), 24)
        positions = [list(map(int, plan[position])) for position in range(count)]
        found.append(
            {"samples": counts, **options, "length": len(plan), "first": positions, "state": plan.state(count)}
        )
    return found


def mixtures() -> list[dict[str, Any]]:
    """Return the dataset, and the number of its sample, of the first positions of each mixture."""
    found = []
    for options in MIXTURES:
        lanes = options.get("lanes", [1] * len(options["sizes"]))
        choices = Choices(Quotas(options["weights"]), options["seed"], options["sizes"], options["until"], lanes)
        datasets, numbers = choices.look_up(options["epoch"], np.arange(min(choices.total, 24)))
        first = [list(pair) for pair in zip(datasets.tolist(), numbers.tolist())]
        found.append({**options, "lanes": lanes, "length": choices.total, "first": first})
    return found


def main() -> None:
    vectors = {"indexes": indexes(), "orders": orders(), "mixtures": mixtures()}
    (SPEC / "vectors.json").write_text(json.dumps(vectors, indent=1) + "\n")


if __name__ == "__main__":
    main()
