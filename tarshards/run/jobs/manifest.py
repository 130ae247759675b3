"""A plan as Kubernetes' objects: an Indexed Job and the ConfigMap that holds its items, for each chunk of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tarshards.run.jobs.kinds import VARIABLE
from tarshards.run.jobs.options import Options
from tarshards.run.jobs.plan import Plan
from tarshards.run.jobs.worker import PERMANENT

Manifest = dict[str, Any]

LABEL = "tarshards.dev/job"
RUN_LABEL = "tarshards.dev/run"
DIGEST = "tarshards.dev/digest"
MOUNT = "/etc/tarjob"
WORKER = ["tarjob", "worker", f"{MOUNT}/plan.json"]
MAX_BYTES = 1_000_000  # of a plan; a ConfigMap holds 1 MiB
MAX_COMPLETIONS = 100_000  # more would allow but 10,000 failures, and no ConfigMap holds them
PARALLELISM = 100
TTL = 7 * 24 * 3600
DEFAULT_REQUESTS = {"cpu": "1", "memory": "1Gi"}


def split_plan(plan: Plan, *, max_bytes: int = MAX_BYTES, max_tasks: int = MAX_COMPLETIONS) -> Iterator[Plan]:
    """Yield the chunks of *plan* that each fit into one ConfigMap and one Job.

    >>> from tarshards.run.jobs.plan import make_plan
    >>> plan = make_plan(["cat", "{}"], ["{0..9}"], state="s")
    >>> [len(chunk.tasks) for chunk in split_plan(plan, max_tasks=4)]
    [4, 4, 2]
    """
    head = len(plan._replace(tasks=()).dumps().encode())
    start, size = 0, head
    for index, task in enumerate(plan.tasks):
        extra = len(plan._replace(tasks=(task,)).dumps().encode()) - head + 2
        if index > start and (size + extra > max_bytes or index - start == max_tasks):
            yield plan._replace(tasks=plan.tasks[start:index])
            start, size = index, head
        size += extra
    yield plan._replace(tasks=plan.tasks[start:])


def make_manifests(plan: Plan, options: Options, *, run: int = 1) -> list[tuple[Manifest, Manifest]]:
    """Return a pair of ConfigMap and Job for every chunk of *plan*; raise ValueError for options that say nothing."""
    if options.image is None:
        raise ValueError("Kubernetes needs --image, one in which tarshards is installed")
    chunks = list(split_plan(plan))
    return [_pair(chunk, options, run, f"{plan.name}-{run}-{i}") for i, chunk in enumerate(chunks)]


def _pair(plan: Plan, options: Options, run: int, name: str) -> tuple[Manifest, Manifest]:
    from tarshards.storage.markers import digest_of

    text = plan.dumps()
    labels = {
        **_pairs(options.label, "--label"),
        "app.kubernetes.io/name": "tarjob",
        LABEL: plan.name,
        RUN_LABEL: str(run),
    }
    metadata: Manifest = {"name": name, "labels": labels, "annotations": {DIGEST: digest_of(text)}}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": {"plan.json": text},
    }
    completions = len(plan.tasks)
    spec: Manifest = {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": min(options.parallelism or PARALLELISM, completions),
        "backoffLimitPerIndex": options.retries,
        "maxFailedIndexes": completions if options.max_failed is None else min(options.max_failed, completions),
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailIndex",
                    "onExitCodes": {"containerName": "tarjob", "operator": "In", "values": [PERMANENT]},
                },
            ]
        },
        "ttlSecondsAfterFinished": TTL if options.ttl is None else options.ttl,
        "template": {"metadata": {"labels": labels}, "spec": _pod(options, name)},
    }
    if options.deadline is not None:
        spec["activeDeadlineSeconds"] = options.deadline
    return config, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _pod(options: Options, name: str) -> Manifest:
    volumes: list[Manifest] = [{"name": "plan", "configMap": {"name": name}}]
    mounts: list[Manifest] = [{"name": "plan", "mountPath": MOUNT, "readOnly": True}]
    for number, text in enumerate(options.secret_volume):
        secret, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            raise ValueError(f"--secret-volume {text}: write SECRET:/PATH")
        volumes.append({"name": f"secret-{number}", "secret": {"secretName": secret}})
        mounts.append({"name": f"secret-{number}", "mountPath": path, "readOnly": True})
    container: Manifest = {
        "name": "tarjob",
        "image": options.image,
        "command": WORKER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(options),
        "volumeMounts": mounts,
    }
    env, env_from = [], []
    for text in options.secret_env:
        variable, equals, source = text.partition("=")
        secret, colon, key = source.partition(":")
        if not equals:
            env_from.append({"secretRef": {"name": variable}})
        elif colon and key and VARIABLE.fullmatch(variable):
            env.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
        else:
            raise ValueError(f"--secret-env {text}: write SECRET or NAME=SECRET:KEY; values have no place here")
    if env:
        container["env"] = env
    if env_from:
        container["envFrom"] = env_from
    pod: Manifest = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    if options.priority_class is not None:
        pod["priorityClassName"] = options.priority_class
    if options.node_selector:
        pod["nodeSelector"] = _pairs(options.node_selector, "--node-selector")
    if options.toleration:
        pod["tolerations"] = [_toleration(text) for text in options.toleration]
    return pod


def _resources(options: Options) -> Manifest:
    """What is asked for is requested and is the limit; what is not has a request only."""
    named = {"cpu": options.cpu, "memory": options.memory, "ephemeral-storage": options.storage}
    limits = {kind: amount for kind, amount in named.items() if amount is not None}
    if options.gpu:
        limits["nvidia.com/gpu"] = str(options.gpu)
    resources = {"requests": {**DEFAULT_REQUESTS, **limits}}
    return {**resources, "limits": limits} if limits else resources


def _toleration(text: str) -> Manifest:
    """Parse a taint as kubectl writes it: KEY, KEY=VALUE, KEY:EFFECT or KEY=VALUE:EFFECT."""
    place, colon, effect = text.partition(":")
    key, equals, value = place.partition("=")
    toleration: Manifest = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        toleration["value"] = value
    if colon:
        toleration["effect"] = effect
    return toleration


def _pairs(texts: tuple[str, ...], option: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{option} {text}: write KEY=VALUE")
        pairs[key] = value
    return pairs
