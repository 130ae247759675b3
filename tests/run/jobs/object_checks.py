"""What an API server refuses although the schema allows it: names, quantities, fields that require others.

The rules are those of Kubernetes' own validation of Jobs and Pods, versions 1.30 to 1.37.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tarshards.run.jobs.job_options import parse_quantity
from tarshards.run.jobs.kubernetes_objects import VARIABLE

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
DNS_SUBDOMAIN = re.compile(r"(?=.{1,253}$)[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*")
MANY = 100_000  # completions from which on there are stricter limits
MANY_FAILED = MANY_PARALLEL = 10_000
MAX_PARALLELISM = MAX_FAILED = 100_000
MAX_CONFIG = 1 << 20  # bytes
EFFECTS = (None, "NoSchedule", "PreferNoSchedule", "NoExecute")


def check_object(made: dict[str, Any]) -> None:
    """Raise ValueError with all faults of a Job, Deployment, ConfigMap or Service in one line."""
    kind = made.get("kind")
    checks = {"Job": _job, "Deployment": _deployment, "ConfigMap": _config, "Service": _service}
    if kind not in checks:
        raise ValueError(f"a Job, a Deployment, a ConfigMap or a Service, not {kind}")
    problems = [*_metadata(made["metadata"]), *checks[kind](made)]
    if problems:
        raise ValueError(f"{kind} {made['metadata'].get('name')}: {'; '.join(problems)}")


def _metadata(metadata: dict[str, Any]) -> Iterator[str]:
    if not DNS_SUBDOMAIN.fullmatch(metadata.get("name", "")):
        yield f"the name {metadata.get('name')!r} is no DNS name"
    if "namespace" in metadata and not DNS_LABEL.fullmatch(metadata["namespace"]):
        yield f"the namespace {metadata['namespace']!r} is no DNS label"
    yield from _labels(metadata.get("labels", {}), "label")
    for key in metadata.get("annotations", {}):
        if not is_label_key(key):
            yield f"the annotation {key!r} is no qualified name"


def _labels(labels: dict[str, str], what: str) -> Iterator[str]:
    for key, value in labels.items():
        if not is_label_key(key):
            yield f"the {what} {key!r} is no qualified name"
        if not LABEL_VALUE.fullmatch(value):
            yield f"the {what} {key} has the value {value!r}: at most 63 of letters, digits, '-', '_' and '.'"


def _config(made: dict[str, Any]) -> Iterator[str]:
    size = sum(len(text.encode()) for text in made.get("data", {}).values())
    if size > MAX_CONFIG:
        yield f"{size} bytes of data, more than {MAX_CONFIG}"


def _service(made: dict[str, Any]) -> Iterator[str]:
    if not DNS_LABEL.fullmatch(made["metadata"].get("name", "")):
        yield "the name is no DNS label"
    yield from _labels(made["spec"].get("selector", {}), "selector")
    ports = made["spec"].get("ports", [])
    if len(ports) > 1 and not all("name" in port for port in ports):
        yield "several ports need names"
    for port in ports:
        if not 0 < port["port"] < 1 << 16 or not DNS_LABEL.fullmatch(port.get("name", "x")):
            yield f"{port} is no port"


def _deployment(made: dict[str, Any]) -> Iterator[str]:
    spec, template = made["spec"], made["spec"]["template"]
    if spec.get("replicas", 1) < 0:
        yield "replicas is negative"
    wanted, labels = spec["selector"].get("matchLabels", {}), template.get("metadata", {}).get("labels", {})
    if not wanted or any(labels.get(key) != value for key, value in wanted.items()):
        yield "the selector does not match the labels of the pod"
    if template["spec"].get("restartPolicy", "Always") != "Always":
        yield "the pods of a Deployment have restartPolicy Always"
    for container in template["spec"]["containers"]:
        for port in container.get("ports", []):
            if not 0 < port["containerPort"] < 1 << 16:
                yield f"{port} is no port"
    yield from _labels(labels, "label of the pod")
    yield from _pod(template["spec"])


def _job(made: dict[str, Any]) -> Iterator[str]:
    spec = made["spec"]
    pod = spec["template"]["spec"]
    completions, parallelism = spec.get("completions", 0), spec.get("parallelism", 1)
    indexed = spec.get("completionMode") == "Indexed"
    per_index, most_failed = spec.get("backoffLimitPerIndex"), spec.get("maxFailedIndexes")
    # A pod's host name is the job's name, a dash and the index.
    if indexed and len(f"{made['metadata'].get('name', '')}-{completions - 1}") > 63:
        yield "the name and an index are more than 63 characters"
    fields = ("completions", "parallelism", "backoffLimitPerIndex", "maxFailedIndexes")
    for name in (*fields, "ttlSecondsAfterFinished"):
        if (spec.get(name) or 0) < 0:
            yield f"{name} is negative"
    if spec.get("activeDeadlineSeconds", 1) < 1:
        yield "activeDeadlineSeconds is not positive"
    if indexed and "completions" not in spec:
        yield "completionMode Indexed needs completions"
    if indexed and parallelism > MAX_PARALLELISM:
        yield f"parallelism is more than {MAX_PARALLELISM}"
    if per_index is not None and not indexed:
        yield "backoffLimitPerIndex needs completionMode Indexed"
    if most_failed is not None and per_index is None:
        yield "maxFailedIndexes needs backoffLimitPerIndex"
    if most_failed is not None and most_failed > completions:
        yield "maxFailedIndexes is more than completions"
    if most_failed is not None and most_failed > MAX_FAILED:
        yield f"maxFailedIndexes is more than {MAX_FAILED}"
    if per_index is not None and completions > MANY:
        if most_failed is None or most_failed > MANY_FAILED:
            yield f"more than {MANY} completions need maxFailedIndexes of at most {MANY_FAILED}"
        if parallelism > MANY_PARALLEL:
            yield f"more than {MANY} completions need parallelism of at most {MANY_PARALLEL}"
    yield from _failure_policy(spec, pod)
    yield from _labels(spec["template"].get("metadata", {}).get("labels", {}), "label of the pod")
    yield from _pod(pod)


def _failure_policy(spec: dict[str, Any], pod: dict[str, Any]) -> Iterator[str]:
    restart = pod.get("restartPolicy", "Always")
    if restart not in ("Never", "OnFailure"):
        yield f"restartPolicy {restart}: a Job has Never or OnFailure"
    if spec.get("backoffLimitPerIndex") is not None and restart != "Never":
        yield "backoffLimitPerIndex needs restartPolicy Never"
    if "podFailurePolicy" not in spec:
        return
    if restart != "Never":
        yield "podFailurePolicy needs restartPolicy Never"
    containers = {container["name"] for container in pod["containers"]}
    for rule in spec["podFailurePolicy"]["rules"]:
        if rule["action"] == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            yield "the action FailIndex needs backoffLimitPerIndex"
        if ("onExitCodes" in rule) == ("onPodConditions" in rule):
            yield "a rule of podFailurePolicy has one of onExitCodes and onPodConditions"
        codes = rule.get("onExitCodes", {})
        if codes.get("operator") == "In" and 0 in codes["values"]:
            yield "an exit code of 0 is no failure"
        if codes.get("containerName", next(iter(containers))) not in containers:
            yield f"podFailurePolicy: there is no container {codes['containerName']}"


def _pod(pod: dict[str, Any]) -> Iterator[str]:
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    for name in volumes:
        if not DNS_LABEL.fullmatch(name):
            yield f"the volume {name!r} is no DNS label"
    for key in ("serviceAccountName", "priorityClassName"):
        if key in pod and not DNS_SUBDOMAIN.fullmatch(pod[key]):
            yield f"{key} {pod[key]!r} is no DNS name"
    yield from _labels(pod.get("nodeSelector", {}), "node selector")
    for toleration in pod.get("tolerations", []):
        if toleration.get("effect") not in EFFECTS:
            yield f"a toleration has the effect {toleration['effect']!r}, not {', '.join(map(str, EFFECTS[1:]))}"
        if not is_label_key(toleration.get("key", "x")):
            yield f"the toleration {toleration['key']!r} is no qualified name"
    for volume in pod.get("volumes", []):
        secret = volume.get("secret", {}).get("secretName", "x")
        if not DNS_SUBDOMAIN.fullmatch(secret):
            yield f"the secret {secret!r} is no DNS name"
    for container in pod["containers"]:
        yield from _container(container, volumes)


def _container(container: dict[str, Any], volumes: set[str]) -> Iterator[str]:
    if not DNS_LABEL.fullmatch(container["name"]):
        yield f"the container {container['name']!r} is no DNS label"
    image = container.get("image") or ""
    if not image or image != image.strip() or " " in image:
        yield f"{image!r} is no image"
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    if len(set(paths)) < len(paths):
        yield "two volumes have one mountPath"
    for mount in container.get("volumeMounts", []):
        if mount["name"] not in volumes:
            yield f"there is no volume {mount['name']}"
        if ":" in mount["mountPath"]:
            yield f"the mountPath {mount['mountPath']!r} has a colon"
    env = container.get("env", [])
    for entry in env:
        if not VARIABLE.fullmatch(entry["name"]):
            yield f"{entry['name']!r} is no name of a variable"
        if "value" in entry and "valueFrom" in entry:
            yield f"the variable {entry['name']} has two values"
    for entry in [*container.get("envFrom", []), *(entry["valueFrom"] for entry in env if "valueFrom" in entry)]:
        secret = (entry.get("secretRef") or entry.get("secretKeyRef") or {"name": "x"})["name"]
        if not DNS_SUBDOMAIN.fullmatch(secret):
            yield f"the secret {secret!r} is no DNS name"
    resources = container.get("resources", {})
    requests, limits = resources.get("requests", {}), resources.get("limits", {})
    for kind, text in [*requests.items(), *limits.items()]:
        try:
            parse_quantity(text)
        except ValueError as error:
            yield f"{kind}: {error}"
            return
    for kind, text in requests.items():
        if kind in limits and parse_quantity(text) > parse_quantity(limits[kind]):
            yield f"the request for {kind} is more than its limit"
    for kind in {*requests, *limits}:
        if "/" in kind and requests.get(kind, limits.get(kind)) != limits.get(kind):
            yield f"{kind} is not overcommitted: its request is its limit"


def is_label_key(text: str) -> bool:
    """Whether *text* is the key of a label: a name of at most 63 characters, perhaps after a domain and a slash."""
    domain, slash, name = text.rpartition("/")
    return bool(name and LABEL_VALUE.fullmatch(name) and (not slash or DNS_SUBDOMAIN.fullmatch(domain)))
