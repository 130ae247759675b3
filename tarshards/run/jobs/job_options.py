"""The options of a job for a scheduler: parallelism, retries, resources, and where the tasks run."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

SUFFIXES = {"": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15} | {
    f"{letter}i": 2.0 ** (10 * power) for power, letter in enumerate("KMGTP", 1)
}
QUANTITY = re.compile(r"(\d+(?:\.\d+)?)([a-zA-Z]*)")
IMAGE = re.compile(r"\S+")


@dataclass(frozen=True)
class Options:
    """The options of all schedulers; quantities have Kubernetes' notation, like 500m or 4Gi.

    *secret_env* are SECRET (all its keys) or NAME=SECRET:KEY, *secret_volume* SECRET:PATH. *patch* is a merge patch for
    each Kubernetes Job, *sbatch* are further lines of ``#SBATCH``.
    """

    parallelism: int | None = None
    retries: int = 3
    max_failed: int | None = None
    deadline: int | None = None
    cpu: str | None = None
    memory: str | None = None
    storage: str | None = None
    gpu: int = 0
    image: str | None = None
    namespace: str | None = None
    service_account: str | None = None
    secret_env: tuple[str, ...] = ()
    secret_volume: tuple[str, ...] = ()
    patch: dict[str, Any] | None = None
    partition: str | None = None
    sbatch: tuple[str, ...] = ()


def parse_quantity(text: str) -> float:
    """Return the value of a quantity; raise ValueError if it is not a quantity.

    >>> parse_quantity("500m"), parse_quantity("4Gi"), parse_quantity("1.5")
    (0.5, 4294967296.0, 1.5)
    """
    match = QUANTITY.fullmatch(str(text))
    if match is None or match[2] not in SUFFIXES:
        raise ValueError(f"{text!r} is not a quantity; write it like 2, 500m, 4Gi or 10G")
    return float(match[1]) * SUFFIXES[match[2]]


def configured_image() -> str:
    """Return the pods' image from the user's configuration file; raise ValueError if there is none.

    The file is ``tarshards/config.toml`` in ``$XDG_CONFIG_HOME`` or ``~/.config``; it holds ``image`` in the table
    ``[tarjob]``.
    """
    import tomllib

    folder = os.environ.get("XDG_CONFIG_HOME", "")
    folder = folder if os.path.isabs(folder) else os.path.expanduser("~/.config")
    path = os.path.join(folder, "tarshards/config.toml")
    try:
        with open(path, "rb") as file:
            settings = tomllib.load(file)
    except FileNotFoundError:
        settings = {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    match settings:
        case {"tarjob": {"image": str(image), **others}, **rest} if not others and not rest:
            if not IMAGE.fullmatch(image):
                raise ValueError(f"{path}: {image!r} is not an image")
            return image
        case _ if settings in ({}, {"tarjob": {}}):
            raise ValueError(
                f"Kubernetes needs --image, TARJOB_IMAGE, or image in the table [tarjob] of {path}: an image with "
                "tarshards, which the Dockerfile of its repository builds"
            )
    raise ValueError(f'{path}: holds more than the table [tarjob] with image = "NAME"')
