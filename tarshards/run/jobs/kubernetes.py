"""Runs a plan as Indexed Jobs of a Kubernetes cluster, through the official client."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

from tarshards.errors import OpenError, StateError, did_you_mean
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import JobPlan
from tarshards.run.jobs.kubernetes_objects import DIGEST, LABEL, RUN_LABEL, Object, make_objects
from tarshards.run.jobs.scheduler import WATCH, Poll, tasks_of

PATIENCE = (0.5, 1, 2, 4, 8, 15, 30)  # seconds before a request is made again
PASSING = {429, 500, 502, 503, 504}
MODEL = re.compile(r"(?P<list>list\[)?(?P<model>V1\w+)\]?")
JOB_NAME = "batch.kubernetes.io/job-name"
JOB_INDEX = "batch.kubernetes.io/job-completion-index"


class Kubernetes:
    """The cluster of the kubeconfig, or the one in which this process is a pod."""

    def __init__(
        self, options: Options, folder: JobFolder | None = None, *, pause: Callable[[float], Any] = time.sleep
    ):
        self.options = options
        self.pause = pause
        self._clients: tuple[Any, Any, str] | None = None
        self._jobs: dict[str, Any] = {}
        self._version: str | None = None

    def preview(self, plan: JobPlan) -> str:
        yaml = _import("yaml")
        documents = [each for pair in make_objects(plan, self.options) for each in pair]
        dumper = _block_dumper(yaml)
        return "---\n".join(yaml.dump(document, Dumper=dumper, sort_keys=False, width=1000) for document in documents)

    def submit(self, plan: JobPlan, number: int) -> Iterator[dict[str, Any]]:
        pairs = make_objects(plan, self.options, run=number)
        batch, core, namespace = self._api()
        for config, job in pairs:  # the server checks all of them before the first is created
            self._call(core.create_namespaced_config_map, namespace, config, dry_run="All", conflict=None)
            self._call(batch.create_namespaced_job, namespace, job, dry_run="All", conflict=None)
        for (config, job), chunk in zip(pairs, _chunks(plan, pairs)):
            name = job["metadata"]["name"]
            self._create(core.create_namespaced_config_map, core.read_namespaced_config_map, namespace, config)
            made = self._create(batch.create_namespaced_job, batch.read_namespaced_job, namespace, job)
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": made.metadata.uid}
            # The ConfigMap is deleted with the Job.
            body = {"metadata": {"ownerReferences": [owner]}}
            self._call(core.patch_namespaced_config_map, name, namespace, body)
            yield {"id": name, "tasks": tasks_of(chunk)}

    def poll(self, parts: list[dict[str, Any]]) -> Poll:
        if self._version is None and parts:
            self._list(parts)
        poll = Poll(done=set(), failed=set())
        for part in parts:
            job = self._jobs.get(part["id"])
            if job is None:  # deleted, perhaps after its time to live
                poll.done = poll.failed = None
                continue
            status = job.status
            poll.running += status.active or 0
            ended = [c for c in status.conditions or [] if c.type in ("Complete", "Failed") and c.status == "True"]
            poll.ended = poll.ended and bool(ended)
            poll.notes += [f"{part['id']}: {c.reason}: {c.message}" for c in ended if c.type == "Failed"]
            if poll.done is not None and poll.failed is not None:
                poll.done |= _numbers(part, status.completed_indexes)
                poll.failed |= _numbers(part, status.failed_indexes)
            if ended and status.failed_indexes:
                poll.notes += self._reasons(part)
        return poll

    def wait(self, parts: list[dict[str, Any]]) -> None:
        """Watch the Jobs for some seconds; continue after a dropped watch; after an expired one list the Jobs again."""
        batch, _, namespace = self._api()
        http, api = _import("urllib3").exceptions.HTTPError, _import("kubernetes").client.ApiException
        options = {"label_selector": _selector(parts), "resource_version": self._version, "timeout_seconds": WATCH}
        begun = time.monotonic()
        try:
            for event in _import("kubernetes.watch").Watch().stream(batch.list_namespaced_job, namespace, **options):
                self._take(event)
        except http:
            self.pause(PATIENCE[0])
            return
        except api as error:
            if error.status != HTTPStatus.GONE and error.status not in PASSING:
                raise _failure(error) from error
            self._version = None
        if self._version is None or time.monotonic() - begun < PATIENCE[0]:
            self.pause(PATIENCE[0])  # do not flood a server that closes watches at once

    def log(self, part: dict[str, Any], index: int) -> str:
        _, core, namespace = self._api()
        selector = f"{JOB_NAME}={part['id']},{JOB_INDEX}={index}"
        pods = self._call(core.list_namespaced_pod, namespace, label_selector=selector).items
        pods.sort(key=lambda pod: str(pod.metadata.creation_timestamp))
        read = core.read_namespaced_pod_log  # the client would decode it to the repr of bytes
        logs = [self._call(read, pod.metadata.name, namespace, _preload_content=False).data for pod in pods]
        return b"".join(logs).decode(errors="replace")

    def cancel(self, parts: list[dict[str, Any]]) -> None:
        batch, _, namespace = self._api()
        for part in parts:
            self._call(
                batch.delete_namespaced_job, part["id"], namespace, propagation_policy="Background", missing=None
            )
        self._version = None

    def _api(self) -> tuple[Any, Any, str]:
        """Return the clients for Jobs and for Pods, and the namespace."""
        if self._clients is None:
            kubernetes = _import("kubernetes")
            config = kubernetes.config
            namespace = "default"
            try:
                try:
                    config.load_kube_config()
                    context = config.list_kube_config_contexts()[1]
                    namespace = context["context"].get("namespace", namespace)
                except config.ConfigException:
                    config.load_incluster_config()
                    with open("/var/run/secrets/kubernetes.io/serviceaccount/namespace") as file:
                        namespace = file.read().strip()
            except (config.ConfigException, OSError) as error:
                raise OpenError(f"no cluster found by a kubeconfig or a service account: {error}") from error
            client = kubernetes.client
            self._clients = client.BatchV1Api(), client.CoreV1Api(), self.options.namespace or namespace
        return self._clients

    def _list(self, parts: list[dict[str, Any]]) -> None:
        batch, _, namespace = self._api()
        jobs = self._call(batch.list_namespaced_job, namespace, label_selector=_selector(parts))
        self._jobs = {job.metadata.name: job for job in jobs.items}
        self._version = jobs.metadata.resource_version

    def _take(self, event: Any) -> None:
        job = event["object"]
        self._version = job.metadata.resource_version
        if event["type"] == "DELETED":
            self._jobs.pop(job.metadata.name, None)
        elif event["type"] in ("ADDED", "MODIFIED"):
            self._jobs[job.metadata.name] = job

    def _reasons(self, part: dict[str, Any]) -> list[str]:
        """Return why pods of failed indexes ended, except for those that just exited with a status."""
        _, core, namespace = self._api()
        selector = f"{JOB_NAME}={part['id']}"
        pods = self._call(
            core.list_namespaced_pod, namespace, label_selector=selector, field_selector="status.phase=Failed"
        )
        found = {}
        for pod in pods.items:
            index = int((pod.metadata.labels or {}).get(JOB_INDEX, -1))
            ends = [status.state.terminated for status in pod.status.container_statuses or []]
            reasons = [end.reason for end in ends if end and end.reason not in ("Error", "Completed")]
            reason = next(filter(None, [*reasons, pod.status.reason]), None)
            if reason and 0 <= index < len(part["tasks"]):
                found[index] = f"items {' '.join(map(str, part['tasks'][index]))}: {reason}"
        return [found[index] for index in sorted(found)]

    def _create(self, create: Any, read: Any, namespace: str, body: Object) -> Any:
        """Create an object; an equal one that exists was created by a request whose response did not arrive."""
        made = self._call(create, namespace, body, conflict=None)
        if made is None:
            name = body["metadata"]["name"]
            made = self._call(read, name, namespace)
            if (made.metadata.annotations or {}).get(DIGEST) != body["metadata"]["annotations"][DIGEST]:
                raise StateError(f"the cluster already has another {body['kind']} {name}")
        return made

    def _call(self, function: Any, *arguments: Any, **options: Any) -> Any:
        """Make a request, and retry it after transient errors; return *conflict* or *missing* for a 409 or 404."""
        client = _import("kubernetes").client
        http = _import("urllib3").exceptions.HTTPError
        known = {code: options.pop(name) for code, name in ((409, "conflict"), (404, "missing")) if name in options}
        for pause in (*PATIENCE, None):
            try:
                return function(*arguments, **options)
            except client.ApiException as error:
                if error.status in known:
                    return known[error.status]
                if error.status not in PASSING or pause is None:
                    raise _failure(error) from error
                after = (error.headers or {}).get("Retry-After", "")
                self.pause(float(after) if after.isdecimal() else pause)
            except http as error:
                if pause is None:
                    raise OpenError(f"no answer from the cluster: {error}") from error
                self.pause(pause)
        raise AssertionError("the last attempt returns or raises")


def read_patch(path: str) -> dict[str, Any]:
    """Return the merge patch in a file of JSON or YAML; raise ValueError for anything else, and for unknown fields."""
    with open(path, encoding="utf-8") as file:
        text = file.read()
    try:
        patch = json.loads(text)
    except ValueError:
        yaml = _import("yaml")
        try:
            patch = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(patch, dict):
        raise ValueError(f"{path}: a merge patch is a map of fields of the Job, like {{spec: {{suspend: true}}}}")
    try:
        check_fields(patch, "V1Job")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return patch


def check_fields(value: Any, type_name: str, path: str = "") -> None:
    """Raise ValueError for a field in *value* that the client's model of this type does not have.

    The types are like ``V1PodSpec``, ``list[V1Container]``, ``dict[str, str]`` and ``int``.
    """
    match = MODEL.fullmatch(type_name)
    if match is None or value is None:
        return
    if match["list"]:
        if not isinstance(value, list):
            raise ValueError(f"{path} is a list")
        for number, each in enumerate(value):
            check_fields(each, match["model"], f"{path}[{number}]")
        return
    if not isinstance(value, dict):
        raise ValueError(f"{path} is a map of fields")
    kubernetes = _import("kubernetes")
    model = getattr(kubernetes.client, match["model"])
    types = {name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()}
    for name, each in value.items():
        inner = f"{path}.{name}".lstrip(".")
        if name not in types:
            hint = did_you_mean(str(name), types) or f"; known: {' '.join(sorted(types))}"
            raise ValueError(f"{inner} is no field of a Job in version {kubernetes.__version__} of the client{hint}")
        check_fields(each, types[name], inner)


def _import(name: str) -> Any:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise OpenError(
            "Kubernetes needs a package that is not installed: pip install 'tarshards[kubernetes]'"
        ) from error


def _failure(error: Any) -> OpenError:
    """Return the server's complaint as an error."""
    try:
        message = json.loads(error.body)["message"]
    except (ValueError, KeyError, TypeError):
        message = error.reason
    return OpenError(f"Kubernetes: {error.status}: {message}")


def _selector(parts: list[dict[str, Any]]) -> str:
    """Return the label selector for the run of *parts*."""
    name, run, _ = parts[0]["id"].rsplit("-", 2)
    return f"{LABEL}={name},{RUN_LABEL}={run}"


def _chunks(plan: JobPlan, pairs: list[tuple[Object, Object]]) -> Iterator[JobPlan]:
    start = 0
    for _, job in pairs:
        stop = start + job["spec"]["completions"]
        yield plan._replace(tasks=plan.tasks[start:stop])
        start = stop


def _numbers(part: dict[str, Any], indexes: str | None) -> set[int]:
    """Return the items of the tasks with these indexes, which Kubernetes writes like ``1,3-5``."""
    numbers: set[int] = set()
    for piece in filter(None, (indexes or "").split(",")):
        low, _, high = piece.partition("-")
        for index in range(int(low), int(high or low) + 1):
            numbers.update(part["tasks"][index])
    return numbers


def _block_dumper(yaml: Any) -> Any:
    """Return a YAML dumper that writes multi-line strings as blocks and uses no aliases."""

    class BlockDumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    BlockDumper.add_representer(str, text)
    return BlockDumper
