"""Feeders on a Kubernetes cluster: a Deployment, and a headless Service whose name resolves to all of its pods."""

from __future__ import annotations

from typing import Any

from tarshards.errors import whole_number


def kubernetes_objects(
    spec: str, image: str, *, name: str, replicas: int, feeders: int, port: int, keys: str | None = None
) -> dict[str, Any]:
    """Return a List of a headless Service and a Deployment of *replicas* pods, each with *feeders* of *spec*.

    *image* contains tarshards with the extra ``feed``, and the spec's module in its working folder or on Python's path.
    Each feeder of a pod has one core; they listen at successive ports, starting with *port*. *keys* names a Secret with
    the files of `tarfeed keys`; None means no encryption. A RemoteLoader in the same namespace reaches all feeders as
    ``dns:NAME:{PORT..LAST}``. Raises ValueError for numbers below 1.
    """
    labels = {"app": name}
    replicas, feeders = whole_number("replicas", replicas, 1), whole_number("feeders", feeders, 1)
    command = ["tarfeed", "serve", spec, "--bind", f"tcp://*:{port}", "-p", str(feeders), "--threads", "1"]
    container: dict[str, Any] = {
        "name": "feeder",
        "image": image,
        "command": [*command, *(["--key-folder", "/keys"] if keys else ["--no-encryption"])],
        "ports": [{"containerPort": port + number} for number in range(feeders)],
        "resources": {"requests": {"cpu": str(feeders)}},
    }
    pod: dict[str, Any] = {"containers": [container]}
    if keys is not None:
        container["volumeMounts"] = [{"name": "keys", "mountPath": "/keys", "readOnly": True}]
        pod["volumes"] = [{"name": "keys", "secret": {"secretName": keys}}]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    deployment = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }
    return {"apiVersion": "v1", "kind": "List", "items": [service, deployment]}
