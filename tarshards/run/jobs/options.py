"""What a person asks of an engine: how much at once, how often again, on what kind of machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Options:
    """One set for all engines; quantities are in Kubernetes' notation, like 500m or 4Gi.

    *secret_env* are SECRET (all its keys) or NAME=SECRET:KEY, *secret_volume* SECRET:PATH, *toleration*
    KEY[=VALUE][:EFFECT], *node_selector* and *label* KEY=VALUE, *sbatch* further lines of ``#SBATCH``.
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
    node_selector: tuple[str, ...] = ()
    toleration: tuple[str, ...] = ()
    priority_class: str | None = None
    label: tuple[str, ...] = ()
    ttl: int | None = None
    partition: str | None = None
    sbatch: tuple[str, ...] = ()
