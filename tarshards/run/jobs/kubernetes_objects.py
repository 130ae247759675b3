"""A plan as Kubernetes objects: for each chunk of it an Indexed Job, and the ConfigMap that holds its items."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Any

from tarshards.run.jobs.job_options import IMAGE, Options, parse_quantity
from tarshards.run.jobs.job_plan import JobPlan
from tarshards.run.jobs.worker import PERMANENT
from tarshards.storage.location import Location

Object = dict[str, Any]

LABEL = "tarshards.dev/job"
RUN_LABEL = "tarshards.dev/run"
DIGEST = "tarshards.dev/digest"
MOUNT = "/etc/tarjob"
WORKER = ["tarjob", "worker", f"{MOUNT}/plan.json"]
MAX_BYTES = 1_000_000  # of a plan; a ConfigMap holds 1 MiB
MAX_COMPLETIONS = 100_000  # with more, a Job may have only 10,000 failures
MEMORY = "1Gi"
#: The volumes that end with the pod, or that it cannot write.
PASSING_VOLUMES = {"configMap", "downwardAPI", "emptyDir", "ephemeral", "gitRepo", "image", "projected", "secret"}
VARIABLE = re.compile(r"[A-Za-z_.-][A-Za-z0-9_.-]*")


def split_plan(plan: JobPlan) -> Iterator[JobPlan]:
    """Yield the chunks of *plan* that each fit into one ConfigMap and one Job."""
    head = len(plan._replace(tasks=()).dumps().encode())
    start, size = 0, head
    for index, task in enumerate(plan.tasks):
        extra = len(plan._replace(tasks=(task,)).dumps().encode()) - head + 2
        if index > start and (size + extra > MAX_BYTES or index - start == MAX_COMPLETIONS):
            yield plan._replace(tasks=plan.tasks[start:index])
            start, size = index, head
        size += extra
    yield plan._replace(tasks=plan.tasks[start:])


def make_objects(plan: JobPlan, options: Options, *, run: int = 1) -> list[tuple[Object, Object]]:
    """Return a pair of ConfigMap and Job for every chunk of *plan*; raise ValueError for wrong options."""
    if options.image is None:
        raise ValueError("Kubernetes needs --image, an image in which tarshards is installed")
    if not IMAGE.fullmatch(options.image):
        raise ValueError(f"--image {options.image!r} is not an image")
    if plan.has_credentials:
        raise ValueError(
            "a ConfigMap would show the credentials in a URL of the command or the items; pass a secret with "
            "--secret-env, and write its variable into the command in their place"
        )
    chunks = list(split_plan(plan))
    return [_pair(chunk, options, run, f"{plan.name}-{run}-{i}") for i, chunk in enumerate(chunks)]


def check_outputs(plan: JobPlan, patch: Object) -> None:
    """Raise ValueError if an output or a marker would be on a pod's own disk, not on a volume of *patch*."""
    folder, mounts = _mounts(patch)

    def check(url: str) -> None:
        location = Location(url)
        if location.scheme not in ("", "file"):
            return
        path = posixpath.normpath(posixpath.join(folder, location.path or url))
        around = [mount for mount in mounts if f"{path}/".startswith(f"{mount.rstrip('/')}/")]
        if not around or not mounts[max(around, key=len)]:
            raise ValueError(
                f"{url}: the disk of a pod ends with the pod; write to an object store, like s3://bucket/"
                f"{posixpath.basename(path)}, or to an absolute path on a volume that --patch mounts"
            )

    if plan.state is not None:
        check(plan.state)
    for item in plan.items:
        for url in plan.lasting_outputs(item):
            check(url)


def _mounts(patch: Object) -> tuple[str, dict[str, bool]]:
    """Return the working directory that *patch* sets, and for each mount of it whether its files outlive the pod."""
    pod = patch
    for name in ("spec", "template", "spec"):
        pod = pod.get(name) or {}
    volumes = {volume.get("name") for volume in pod.get("volumes") or [] if not PASSING_VOLUMES & volume.keys()}
    ours: Object = next((each for each in pod.get("containers") or [] if each.get("name") == "tarjob"), {})
    mounts = [mount for mount in ours.get("volumeMounts") or [] if mount.get("mountPath")]
    lasting = {mount["mountPath"]: mount.get("name") in volumes and not mount.get("readOnly") for mount in mounts}
    return ours.get("workingDir") or "", lasting


def _pair(plan: JobPlan, options: Options, run: int, name: str) -> tuple[Object, Object]:
    from tarshards.storage.markers import digest_of

    text = plan.dumps()
    labels = {"app.kubernetes.io/name": "tarjob", LABEL: plan.name, RUN_LABEL: str(run)}
    metadata: Object = {"name": name, "labels": labels, "annotations": {DIGEST: digest_of(text)}}
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
    spec: Object = {
        "completionMode": "Indexed",
        "completions": completions,
        "parallelism": min(options.parallelism or 100, completions),
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
        "ttlSecondsAfterFinished": 7 * 24 * 3600,
        "template": {"metadata": {"labels": {**labels}}, "spec": _pod(plan, options, name)},
    }
    if options.deadline is not None:
        spec["activeDeadlineSeconds"] = options.deadline
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}
    return config, _patched(job, options)


def _patched(job: Object, options: Options) -> Object:
    """Return the Job with --patch applied; raise ValueError if tarjob would not find it again."""
    patched = merged(job, options.patch or {})
    kept: list[Any] = [("metadata", "name"), ("metadata", "annotations"), ("spec", "completions")]
    kept += [("metadata", "labels", label) for label in (LABEL, RUN_LABEL)]
    for keys in kept:
        before, after = job, patched
        for key in keys:
            before, after = before[key], after.get(key) if isinstance(after, dict) else None
        if after != before:
            raise ValueError(f"--patch must not change {'.'.join(keys)}, by which tarjob knows the Job")
    return patched


def merged(document: Any, patch: Any) -> Any:
    """Return *document* with a merge patch (RFC 7396) applied: objects are merged, null removes, other values replace.

    Lists of named objects, such as containers and volumes, are merged by these names, as ``kubectl patch`` does.

    >>> merged({"a": {"b": 1, "c": 2}, "d": [1, 2]}, {"a": {"b": None}, "d": [3]})
    {'a': {'c': 2}, 'd': [3]}
    >>> merged([{"name": "a", "x": 1}], [{"name": "b"}, {"name": "a", "y": 2}])
    [{'name': 'a', 'x': 1, 'y': 2}, {'name': 'b'}]
    """
    if isinstance(document, list) and isinstance(patch, list):
        items = {_name_in_list(item): item for item in document}
        changes = {_name_in_list(item): item for item in patch}
        if changes and None not in items.keys() | changes.keys():
            return [merged(items.get(name), changes.get(name, {})) for name in items | changes]
    if not isinstance(patch, dict):
        return patch
    result = dict(document) if isinstance(document, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def _name_in_list(item: Any) -> Any:
    """Return the name that identifies an object in a list, or None."""
    return item.get("mountPath", item.get("name")) if isinstance(item, dict) else None


def _pod(plan: JobPlan, options: Options, name: str) -> Object:
    volumes: list[Object] = [{"name": "plan", "configMap": {"name": name}}]
    mounts: list[Object] = [{"name": "plan", "mountPath": MOUNT, "readOnly": True}]
    for number, text in enumerate(options.secret_volume):
        secret, colon, path = text.partition(":")
        if not colon or not path.startswith("/"):
            raise ValueError(f"--secret-volume {text}: write SECRET:/PATH")
        volumes.append({"name": f"secret-{number}", "secret": {"secretName": secret}})
        mounts.append({"name": f"secret-{number}", "mountPath": path, "readOnly": True})
    container: Object = {
        "name": "tarjob",
        "image": options.image,
        "command": WORKER,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": _resources(plan, options),
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
            raise ValueError(f"--secret-env {text}: write SECRET or NAME=SECRET:KEY, never a value")
    if env:
        container["env"] = env
    if env_from:
        container["envFrom"] = env_from
    pod: Object = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    return pod


def _resources(plan: JobPlan, options: Options) -> Object:
    """Return the given amounts as requests and limits, and default requests for the others."""
    defaults = {"cpu": str(plan.cores or 1), "memory": MEMORY}
    named = {"cpu": options.cpu, "memory": options.memory, "ephemeral-storage": options.storage}
    limits = {kind: amount for kind, amount in named.items() if amount is not None}
    for kind, amount in limits.items():
        try:
            parse_quantity(amount)
        except ValueError as error:
            raise ValueError(f"{kind}: {error}") from error
    if options.gpu:
        limits["nvidia.com/gpu"] = str(options.gpu)
    resources = {"requests": {**defaults, **limits}}
    return {**resources, "limits": limits} if limits else resources
