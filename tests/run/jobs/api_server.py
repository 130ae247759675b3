"""A Kubernetes API server on the loopback: it validates objects strictly, and runs the pods of Jobs here.

Faults are planned by ``plan_fault("POST jobs", 429)``: statuses, "lost" (done, but the answer never comes), "dropped".
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import subprocess
import threading
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kubernetes_validate
from aiohttp import web
from object_checks import check_object

GROUPS = {
    "/api/v1": ("configmaps", "pods", "services"),
    "/apis/apps/v1": ("deployments",),
    "/apis/batch/v1": ("jobs",),
}
NAMES = {"configmaps": "ConfigMap", "deployments": "Deployment", "jobs": "Job", "pods": "Pod", "services": "Service"}
API = {kind: path.split("/", 2)[2] for path, kinds in GROUPS.items() for kind in kinds}
VERSION = "1.33"


class ApiServer:
    """Serves at ``url`` until ``stop``; *path* is the PATH of the pods, which run in the working directory."""

    def __init__(self, folder: Path, path: str = os.defpath):
        self.folder, self.path = folder, path
        self.objects: dict[str, dict[str, dict]] = {kind: {} for kind in NAMES}
        self.logs: dict[str, str] = {}
        self.requests: list[str] = []
        self.faults: dict[str, deque] = defaultdict(deque)
        self.version = self.oldest = 100
        self.events: list[tuple[int, dict]] = []
        self.lock = threading.RLock()
        self.stopped = False
        self.pods = ThreadPoolExecutor(2)
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self.thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self.thread.start()
        started.wait()

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        application = web.Application()
        for path in ("/version", "/api", "/apis", *GROUPS):
            application.router.add_route("GET", path, self._discover)
        for prefix in GROUPS:
            place = f"{prefix}/namespaces/{{namespace}}/{{kind}}"
            application.router.add_route("*", place, self._answer)
            application.router.add_route("*", f"{place}/{{name}}", self._answer)
            application.router.add_route("GET", f"{place}/{{name}}/log", self._log)
        self.runner = web.AppRunner(application, shutdown_timeout=0.1)

        async def begin() -> None:
            await self.runner.setup()
            site = web.TCPSite(self.runner, "127.0.0.1", 0)
            await site.start()
            self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
            started.set()

        self.loop.run_until_complete(begin())
        self.loop.run_forever()

    def stop(self) -> None:
        self.stopped = True
        self.pods.shutdown(cancel_futures=True)
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()

    def plan_fault(self, request: str, *faults: object) -> None:
        self.faults[request].extend(faults)

    def compact(self) -> None:
        """Forget all events, so that a watch from before is 410."""
        with self.lock:
            self.oldest = self.version = self.version + 10

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        kind, name = request.match_info["kind"], request.match_info.get("name")
        watched = request.query.get("watch") in ("1", "true", "True")
        tested = request.query.get("dryRun") == "All"
        what = f"{'WATCH' if watched else 'DRY RUN' if tested else request.method} {kind}"
        self.requests.append(what)
        fault = self.faults[what].popleft() if self.faults[what] else None
        if isinstance(fault, int):
            return _status(fault, "planned", {"Retry-After": "1"} if fault == 429 else {})
        if watched:
            return await self._watch(request, kind, fault)
        body = await request.json() if request.can_read_body else None
        with self.lock:
            response = getattr(self, f"_{request.method.lower()}")(request, kind, name, body)
        if fault == "lost":
            request.transport.close()
        return response

    async def _discover(self, request: web.Request) -> web.Response:
        """Tell a client such as kubectl which kinds of objects there are."""
        if request.path in GROUPS:
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            kinds = [{"name": name, "kind": NAMES[name], "verbs": verbs} for name in GROUPS[request.path]]
            kinds = [{**each, "namespaced": True, "singularName": each["kind"].lower()} for each in kinds]
            group = request.path.removeprefix("/apis/").removeprefix("/api/")
            return web.json_response({"kind": "APIResourceList", "groupVersion": group, "resources": kinds})
        groups = [path.split("/")[2] for path in GROUPS if path.startswith("/apis/")]
        answers = {
            "/version": {"major": "1", "minor": VERSION.partition(".")[2], "gitVersion": f"v{VERSION}.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/apis": {
                "kind": "APIGroupList",
                "groups": [
                    {"name": name, "versions": [{"groupVersion": f"{name}/v1", "version": "v1"}]} for name in groups
                ],
            },
        }
        return web.json_response(answers[request.path])

    async def _log(self, request: web.Request) -> web.Response:
        return web.Response(text=self.logs[request.match_info["name"]])

    def _post(self, request: web.Request, kind: str, _: str, body: dict) -> web.Response:
        problem = refused(body, NAMES[kind])
        if problem:
            return _status(422, problem)
        name = body["metadata"]["name"]
        if name in self.objects[kind]:
            return _status(409, f'{kind} "{name}" already exists')
        if request.query.get("dryRun") == "All":
            return web.json_response(body, status=201)
        if kind == "jobs" and name not in self.objects["configmaps"]:
            return _status(422, "the ConfigMap is not there yet")
        body["metadata"].setdefault("namespace", request.match_info["namespace"])
        made = self._store(kind, {**body, "status": {}} if kind == "jobs" else body)
        if kind == "jobs":
            self.pods.submit(self._run, name)
        return web.json_response(made, status=201)

    def _get(self, request: web.Request, kind: str, name: str | None, _: object) -> web.Response:
        if name is not None:
            found = self.objects[kind].get(name)
            return web.json_response(found) if found else _status(404, f'{kind} "{name}" not found')
        items = [each for each in self.objects[kind].values() if selected(each, request.query.get("labelSelector", ""))]
        if request.query.get("fieldSelector") == "status.phase=Failed":
            items = [each for each in items if each["status"]["phase"] == "Failed"]
        head = {"apiVersion": API[kind], "kind": f"{NAMES[kind]}List"}
        return web.json_response({**head, "metadata": {"resourceVersion": str(self.version)}, "items": items})

    def _patch(self, request: web.Request, kind: str, name: str, body: dict) -> web.Response:
        return web.json_response(self._store(kind, merged(self.objects[kind][name], body)))

    def _delete(self, request: web.Request, kind: str, name: str, body: dict | None) -> web.Response:
        if name not in self.objects[kind]:
            return _status(404, f'{kind} "{name}" not found')
        gone = self.objects[kind].pop(name)
        self._event("DELETED", gone)
        for other in list(self.objects["configmaps"].values()):  # the garbage collector
            owners = other["metadata"].get("ownerReferences", [])
            if any(owner["uid"] == gone["metadata"]["uid"] for owner in owners):
                del self.objects["configmaps"][other["metadata"]["name"]]
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _watch(self, request: web.Request, kind: str, fault: object) -> web.StreamResponse:
        since = int(request.query.get("resourceVersion") or 0)
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            await response.write(json.dumps({"type": "ERROR", "object": gone}).encode() + b"\n")
            return response
        seconds = float(request.query.get("timeoutSeconds", 5))
        end = self.loop.time() + seconds
        while self.loop.time() < end and not self.stopped:
            with self.lock:
                fresh = [event for version, event in self.events if version > since]
                since = self.version
            for event in fresh:
                if selected(event["object"], request.query.get("labelSelector", "")):
                    await response.write(json.dumps(event).encode() + b"\n")
            if fault == "dropped":
                await response.write(b'{"type": "MODI')
                request.transport.close()
                return response
            await asyncio.sleep(0.02)
        return response

    def _store(self, kind: str, body: dict) -> dict:
        name = body["metadata"]["name"]
        self.version += 1
        fresh = name not in self.objects[kind]
        metadata = {"uid": f"uid-{self.version}", "creationTimestamp": "2026-01-01T00:00:00Z", **body["metadata"]}
        metadata["resourceVersion"] = str(self.version)
        made = {"apiVersion": API[kind], "kind": NAMES[kind], **body, "metadata": metadata}
        self.objects[kind][name] = made
        if kind == "jobs":
            self._event("ADDED" if fresh else "MODIFIED", made)
        return made

    def _event(self, what: str, made: dict) -> None:
        self.events.append((self.version, {"type": what, "object": copy.deepcopy(made)}))

    # The Job controller and the kubelet.

    def _run(self, name: str) -> None:
        """Run every index of a job, as backoffLimitPerIndex and podFailurePolicy say."""
        with self.lock:
            job = self.objects["jobs"][name]
            spec, status = job["spec"], job["status"]
        done: list[int] = []
        failed: list[int] = []
        for index in range(spec["completions"]):
            for attempt in range(spec["backoffLimitPerIndex"] + 1):
                if self.stopped or name not in self.objects["jobs"]:
                    return
                status["active"] = 1
                code = self._pod(job, index, attempt)
                if code == 0 or code in spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]:
                    break
            (failed if code else done).append(index)
            with self.lock:
                if name not in self.objects["jobs"]:
                    return
                status.update(active=0, completedIndexes=ranges(done), failedIndexes=ranges(failed))
                status.update(succeeded=len(done), failed=len(failed))
                if len(done) + len(failed) == spec["completions"]:
                    kind = {"type": "Failed", "reason": "FailedIndexes", "message": "Job has failed indexes"}
                    kind = kind if failed else {"type": "Complete", "reason": "CompletionsReached"}
                    status["conditions"] = [{**kind, "status": "True"}]
                self._store("jobs", {**job, "status": copy.deepcopy(status)})

    def _pod(self, job: dict, index: int, attempt: int) -> int:
        name = f"{job['metadata']['name']}-{index}-{attempt:05d}"
        template = job["spec"]["template"]
        (container,) = template["spec"]["containers"]
        volume = template["spec"]["volumes"][0]["configMap"]["name"]
        mount = self.folder / volume
        mount.mkdir(exist_ok=True)
        for file, text in self.objects["configmaps"][volume]["data"].items():
            (mount / file).write_text(text)
        place = container["volumeMounts"][0]["mountPath"]
        command = [word.replace(place, str(mount)) for word in container["command"]]
        environment = {"PATH": self.path, "JOB_COMPLETION_INDEX": str(index)}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        labels = {
            **template["metadata"]["labels"],
            "batch.kubernetes.io/job-name": job["metadata"]["name"],
            "batch.kubernetes.io/job-completion-index": str(index),
        }
        code = done.returncode if done.returncode >= 0 else 128 - done.returncode
        reason = "OOMKilled" if code == 137 else "Error" if code else "Completed"
        end = {"exitCode": code, "reason": reason}
        state = {"name": "tarjob", "image": "x", "imageID": "x", "ready": False, "restartCount": 0}
        status = {
            "phase": "Failed" if code else "Succeeded",
            "containerStatuses": [{**state, "state": {"terminated": end}}],
        }
        with self.lock:
            self.logs[name] = done.stdout
            metadata = {"name": name, "namespace": job["metadata"]["namespace"], "labels": labels}
            self._store("pods", {"metadata": metadata, "spec": template["spec"], "status": status})
        return code


def merged(made: dict, patch: dict) -> dict:
    """Return an object with the changes of a patch that has no lists."""
    return {**made, **{k: merged(made.get(k, {}), v) if isinstance(v, dict) else v for k, v in patch.items()}}


def refused(body: dict, kind: str) -> str | None:
    if body.get("kind") != kind:
        return f"not a {kind}"
    try:
        kubernetes_validate.validate(body, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        return str(error.message)
    try:
        check_object(body)
    except ValueError as error:
        return str(error)
    return None


def selected(made: dict, selector: str) -> bool:
    labels = made["metadata"].get("labels", {})
    return all(
        labels.get(key) == value for key, _, value in (pair.partition("=") for pair in selector.split(",") if pair)
    )


def ranges(indexes: list[int]) -> str:
    """Write indexes as the Job controller does: ``1,3-5``."""
    pieces: list[list[int]] = []
    for index in sorted(indexes):
        if pieces and pieces[-1][-1] == index - 1:
            pieces[-1].append(index)
        else:
            pieces.append([index])
    return ",".join(str(piece[0]) if len(piece) == 1 else f"{piece[0]}-{piece[-1]}" for piece in pieces)


def _status(code: int, message: str, headers: dict | None = None) -> web.Response:
    head = {"apiVersion": "v1", "kind": "Status", "status": "Failure"}
    return web.json_response({**head, "code": code, "message": message}, status=code, headers=headers)
