"""Jobs on Kubernetes: submitted, watched, read and cancelled through the official client, whatever the server does."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from api_server import VERSION, ApiServer
from programs import need

from tarshards import read_samples, write_samples
from tarshards.errors import OpenError, StateError
from tarshards.feed.encryption import make_keys
from tarshards.run.jobs import kubernetes as backend
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options
from tarshards.run.jobs.job_plan import JobPlan, make_plan
from tarshards.run.jobs.kubernetes import Kubernetes
from tarshards.run.jobs.scheduler import status_of, submit, wait
from tarshards.run.jobs.status import survey

pytestmark = pytest.mark.interop

BIN = Path(__file__).parents[3] / "bin"
OPTIONS = Options(image="me/image:1", retries=2)
KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: test
contexts: [{{name: test, context: {{cluster: test, user: test, namespace: mine}}}}]
clusters: [{{name: test, cluster: {{server: "{url}"}}}}]
users: [{{name: test, user: {{}}}}]
"""


@pytest.fixture
def server(folder, path_with_tools, monkeypatch):
    place = folder / "cluster"
    place.mkdir()
    server = ApiServer(place, path_with_tools)
    (place / "config").write_text(KUBECONFIG.format(url=server.url))
    monkeypatch.setenv("KUBECONFIG", str(place / "config"))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(place / "config"))
    monkeypatch.setattr(backend, "WATCH", 1)
    monkeypatch.setattr(backend, "PATIENCE", (0.05, 0.1, 0.2))
    yield server
    server.stop()


@pytest.fixture
def plan(folder) -> JobPlan:
    return make_plan(["echo {} >>ran; echo hello {}; test {} != 3"], ["{0..5}"], state="state", name="words")


@pytest.fixture
def shared(folder) -> Path:
    """A patch by which the pods work in the working directory, as on a shared file system."""
    place = str(folder)
    ours = {"name": "tarjob", "workingDir": place, "volumeMounts": [{"name": "shared", "mountPath": place}]}
    pod = {"volumes": [{"name": "shared", "hostPath": {"path": place}}], "containers": [ours]}
    (folder / "shared.yaml").write_text(yaml.safe_dump({"spec": {"template": {"spec": pod}}}))
    return folder / "shared.yaml"


def run(plan: JobPlan, **options) -> tuple[JobPlan, object, list[str]]:
    submit(plan, JobFolder(plan.name), "kubernetes", OPTIONS, **options)
    return wait(JobFolder(plan.name), lambda status: None)


def test_submit_watch_status_and_logs(server, plan, tarjob):
    _, status, notes = run(plan)
    assert (sorted(status.done), sorted(status.failed), status.ended) == ([0, 1, 2, 4, 5], [3], True)
    assert notes == ["words-1-0: FailedIndexes: Job has failed indexes"]
    assert Path("ran").read_text().split() == ["0", "1", "2", "3", "3", "3", "4", "5"]
    (config,) = server.objects["configmaps"].values()
    (job,) = server.objects["jobs"].values()
    assert config["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    assert JobPlan.loads(config["data"]["plan.json"]) == plan
    code, out, _ = tarjob("status", "words")
    assert code == 1
    assert "done     5\nrunning  0\nfailed   1\n" in out
    assert "  3 3: status 1: hello 3\n" in out
    assert tarjob("logs", "words", "4")[1] == "hello 4\n"
    assert tarjob("logs", "words")[1].splitlines().count("hello 3") == 3  # one of each try


def test_a_resumed_job_has_only_the_rest(server, plan):
    run(plan)
    Path("ran").unlink()
    fixed = make_plan(["echo {} >>ran; echo hello {}; test {} != 3"], ["{0..5}"], state="state", name="words")
    run(fixed)
    assert set(Path("ran").read_text().split()) == {"3"}
    assert server.objects["jobs"]["words-2-0"]["spec"]["completions"] == 1


def test_nothing_is_submitted_when_all_is_done(server, folder):
    plan = make_plan(["true {}"], ["{0..2}"], state="state", name="words")
    run(plan)
    before = list(server.requests)
    status = submit(plan, JobFolder("words"), "kubernetes", OPTIONS)
    assert status.complete
    assert [request for request in server.requests[len(before) :] if request.startswith("POST")] == []


def test_42_fails_an_index_for_good(server, folder):
    plan = make_plan(["echo {} >>ran; test {} = 0 || exit 42"], ["{0..1}"], state="state", name="words")
    run(plan)
    assert Path("ran").read_text().split() == ["0", "1"]
    run(plan)
    assert Path("ran").read_text().split() == ["0", "1"]
    run(plan, again=True)
    assert Path("ran").read_text().split() == ["0", "1", "1"]


def test_posts_are_repeated_after_429_and_lost_answers(server, plan):
    server.plan_fault("POST configmaps", 429, 503, "lost")
    server.plan_fault("POST jobs", "lost", 429)
    server.plan_fault("PATCH configmaps", 429)
    _, status, _ = run(plan)
    assert len(status.done) == 5
    assert server.requests.count("POST configmaps") == 4
    assert server.requests.count("POST jobs") == 3
    assert list(server.objects["jobs"]) == ["words-1-0"]


def test_an_object_of_somebody_else_is_a_conflict(server, plan):
    other = make_plan(["false {}"], ["{0..5}"], state="state", name="words")
    list(Kubernetes(OPTIONS).submit(other, 1))
    with pytest.raises(StateError, match="the cluster already has another ConfigMap words-1-0"):
        list(Kubernetes(OPTIONS).submit(plan, 1))


def test_dropped_watches_go_on_and_old_ones_list_anew(server, plan):
    server.plan_fault("WATCH jobs", "dropped", 503, "dropped", 410)
    scheduler = Kubernetes(OPTIONS)
    parts = list(scheduler.submit(plan, 1))
    seen = set()
    lists = server.requests.count("GET jobs")
    for turn in range(200):
        poll = scheduler.poll(parts)
        seen.add(tuple(sorted(poll.done)))
        if poll.ended:
            break
        if turn == 2:
            server.compact()
        scheduler.wait(parts)
    assert poll.ended
    assert sorted(poll.done) == [0, 1, 2, 4, 5]
    assert poll.failed == {3}
    assert server.requests.count("WATCH jobs") >= 4
    assert 3 <= server.requests.count("GET jobs") - lists <= 6  # at first, and after each 410 and 503
    assert len(survey(plan).done) == 5


def test_a_drop_alone_lists_nothing_anew(server, plan):
    server.plan_fault("WATCH jobs", "dropped", "dropped", "dropped")
    scheduler = Kubernetes(OPTIONS)
    parts = list(scheduler.submit(plan, 1))
    while not scheduler.poll(parts).ended:
        scheduler.wait(parts)
    assert server.requests.count("GET jobs") == 1


def test_lists_are_repeated_after_429(server, plan):
    server.plan_fault("GET jobs", 429, 500)
    scheduler = Kubernetes(OPTIONS)
    assert scheduler.poll(list(scheduler.submit(plan, 1))).done is not None


def test_what_does_not_pass_is_an_error(server, plan):
    server.plan_fault("POST configmaps", 403)
    with pytest.raises(OpenError, match="Kubernetes: 403: planned"):
        list(Kubernetes(OPTIONS).submit(plan, 1))
    server.plan_fault("POST configmaps", *[429] * 9)
    with pytest.raises(OpenError, match="Kubernetes: 429: planned"):
        Kubernetes(OPTIONS, pause=lambda seconds: None).submit(plan, 1).__next__()


def test_a_server_that_is_not_there(server, plan):
    scheduler = Kubernetes(OPTIONS)
    scheduler._api()
    asyncio.run_coroutine_threadsafe(server.runner.cleanup(), server.loop).result(60)
    with pytest.raises(OpenError, match="no answer from the cluster"):
        list(scheduler.submit(plan, 1))


def test_cancel_deletes_the_jobs_and_their_items(server, tarjob):
    slow = make_plan(["echo {} >>ran; sleep 0.2"], ["{0..40}"], state="state", name="words")
    submit(slow, JobFolder("words"), "kubernetes", OPTIONS)
    assert tarjob("status", "words")[0] == 3
    with pytest.raises(StateError, match="words is already running"):
        submit(slow, JobFolder("words"), "kubernetes", OPTIONS)
    assert "words: cancelled" in tarjob("cancel", "words")[2]
    assert server.objects["jobs"] == server.objects["configmaps"] == {}
    code, out, _ = tarjob("status", "words")
    assert code == 1
    assert "not run" in out
    assert "nothing was running" in tarjob("cancel", "words")[2]


def test_pods_that_are_killed_say_why(server, folder):
    plan = make_plan(["test {} != 1 || kill -9 $PPID"], ["{0..2}"], state="state", name="words")
    _, status, notes = run(plan)
    assert sorted(status.done) == [0, 2]
    assert notes == ["words-1-0: FailedIndexes: Job has failed indexes", "items 1: OOMKilled"]


def test_kujob_waits_and_shows_what_failed(server, tarjob, shared):
    command = "echo hello {}; test {} != 1"
    code, out, errors = tarjob(
        *(
            "-b",
            "kubernetes",
            "--image",
            "x",
            "-s",
            "{0..2}",
            "--state",
            "state",
            "--patch",
            shared,
            "--retries",
            0,
            "--wait",
            "--",
            command,
        )
    )
    assert (code, out) == (1, "")
    assert "  1 1: status 1: hello 1\n" in errors


# The package gcsfs, with its buckets in a folder.
BUCKETS = """\
from fsspec.implementations.local import LocalFileSystem


class GCSFileSystem(LocalFileSystem):
    protocol = "gs", "gcs"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("gs://", "{folder}/"))
"""


def test_the_line_of_the_slides_runs_as_printed(server, folder, path_with_tools, monkeypatch):
    (folder / "gcsfs.py").write_text(BUCKETS.format(folder=folder))
    (folder / "g1000").mkdir()
    for number in range(3):
        write_samples([{"__key__": "page", "png": b"scan %d" % number}], f"g1000/scanned-000{number}.tar")
    (folder / "bin").mkdir()
    programs = {"run-ocr": 'for page; do tr a-z A-Z <"$page" >"${page%.png}.txt"; done'}
    for tool in ("tarjob", "kujob", "tarproc"):
        programs[tool] = f'PYTHONPATH={folder} exec {sys.executable} {BIN}/{tool} "$@"'
    for name, text in programs.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("TARJOB_IMAGE", "me/ocr:1")
    server.path = os.environ["PATH"]
    line = (
        "kujob -s '{0000..0999}' -- tarproc -p 16 -c 'run-ocr *.png' gs://g1000/scanned-{}.tar -o gs://g1000/ocr-{}.tar"
    )
    few = line.replace("0999", "0002")  # books; the rest is the same
    done = subprocess.run(["bash", "-c", few], capture_output=True, text=True)
    assert (done.returncode, done.stderr[:21]) == (0, "kujob: submitted 3 it"), done.stderr
    assert subprocess.run(["tarjob", "status", "--wait"], capture_output=True).returncode == 0
    for number in range(3):
        (sample,) = read_samples(f"g1000/ocr-000{number}.tar")
        assert sample["txt"] == b"SCAN %d" % number
    (job,) = server.objects["jobs"].values()
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == "me/ocr:1"
    words = "kujob: 3 of 3 items kept from an earlier run\nkujob: 3 items done\n"
    assert subprocess.run(["bash", "-c", few], capture_output=True, text=True).stderr == words


def test_no_place_for_markers_and_no_image(tarjob):
    code, _, errors = tarjob("-b", "kubernetes", "--image", "x", "-s", "{0..2}", "--", "echo {}")
    assert (code, "no place for the markers" in errors) == (2, True)
    code, _, errors = tarjob("-b", "kubernetes", "-s", "{0..2}", "--state", "/shared", "--", "echo {}")
    assert (code, "Kubernetes needs --image" in errors) == (2, True)


@pytest.fixture
def config(folder) -> Path:
    """The user's configuration file, in a folder that exists."""
    (folder / "config/tarshards").mkdir(parents=True)
    return folder / "config/tarshards/config.toml"


def test_the_image_is_that_of_the_option_else_the_environment_else_the_file(tarjob, config):
    def image(*options: str, **environment: str) -> str:
        line = "-b", "kubernetes", *options, "--print", "-s", "{0..2}", "--state", "s3://b/s", "--", "echo {}"
        code, out, errors = tarjob(*line, **environment)
        assert (code, errors) == (0, "")
        _, job = yaml.safe_load_all(out)
        return job["spec"]["template"]["spec"]["containers"][0]["image"]

    config.write_text('[tarjob]\nimage = "me/file:1"\n')
    assert image() == image(TARJOB_IMAGE="") == "me/file:1"
    assert image(TARJOB_IMAGE="me/environment:1") == "me/environment:1"
    assert image("--image", "me/option:1", TARJOB_IMAGE="me/environment:1") == "me/option:1"
    home = config.parents[1].rename(config.parents[2] / ".config").parent  # where it is unless XDG_CONFIG_HOME says
    assert image(XDG_CONFIG_HOME="", HOME=str(home)) == image(XDG_CONFIG_HOME="x", HOME=str(home)) == "me/file:1"


def test_without_an_image_the_error_tells_the_three_ways(tarjob, folder):
    # This comes first: the place of the markers cannot be read.
    code, _, errors = tarjob("-b", "kubernetes", "-s", "{0..2}", "--state", "none://x", "--", "echo {}")
    message = errors.splitlines()[-1]
    assert code == 2
    file = f"image in the table [tarjob] of {folder}/config/tarshards/config.toml"
    assert [way for way in ("--image", "TARJOB_IMAGE", file, "Dockerfile") if way not in message] == []


ODD = "[tarjob]\nimage = 1", '[tarjob]\nimmage = "x"', 'image = "x"', "tarjob = 1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tarjob", "Expected ']'"),
        ('[tarjob]\nimage = "a b"', "'a b' is not an image"),
        *[(text, "holds more than the table [tarjob] with image") for text in ODD],
    ],
)
def test_a_wrong_configuration_file_is_an_error_of_one_line(tarjob, config, text, message):
    config.write_text(text)
    code, _, errors = tarjob("-b", "kubernetes", "-s", "{0..2}", "--state", "/shared", "--", "echo {}")
    assert (code, f"{config}: " in errors.splitlines()[-1]) == (2, True)
    assert message in errors.splitlines()[-1]


@pytest.mark.parametrize("text", ["", "[tarjob]"])
def test_a_configuration_file_without_an_image(tarjob, config, text):
    config.write_text(text)
    assert "Kubernetes needs --image" in tarjob("-b", "kubernetes", "-s", "a", "--state", "/shared", "--", "true {}")[2]


def test_the_configuration_file_matters_to_kubernetes_only(tarjob, config):
    config.write_text("[tarjob")
    assert tarjob("-s", "{0..2}", "--", "true {}")[0] == 0


def test_no_cluster(tarjob, shared):
    code, _, errors = tarjob(
        *("-b", "kubernetes", "--image", "x", "-s", "a", "--state", "s", "--patch", shared, "--", "echo {}"),
        KUBECONFIG="/nowhere",
        HOME="/nowhere",
    )
    assert code == 1
    assert "no cluster found by a kubeconfig or a service account" in errors


def test_the_record_holds_no_secret(server, folder):
    options = Options(image="x", secret_env=("TOKEN=vault:token",), secret_volume=("vault:/secrets",))
    plan = make_plan(["true {}"], ["{0..1}"], state="state", name="words")
    submit(plan, JobFolder("words"), "kubernetes", options)
    wait(JobFolder("words"), lambda status: None)
    record = json.loads(Path(".tarjob/words/job.json").read_text())
    assert record["options"]["secret_env"] == ["TOKEN=vault:token"]
    (job,) = server.objects["jobs"].values()
    assert os.environ.get("TOKEN") is None
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "vault", "key": "token"}}}]


def test_the_server_checks_all_objects_before_the_first_is_created(server, folder):
    plan = make_plan(["true {}"], ["{0..1}"], state="state", name="words")
    wrong = [
        (Options(image="x", service_account="Wrong"), "422: Job words-1-0: serviceAccountName 'Wrong' is no DNS name"),
        (Options(image="x", namespace="Wrong"), "422: ConfigMap words-2-0: the namespace 'Wrong' is no DNS label"),
    ]
    for options, message in wrong:
        with pytest.raises(OpenError, match=f"Kubernetes: {message}"):
            submit(plan, JobFolder("words"), "kubernetes", options)
    assert not any(server.objects.values())
    assert not [request for request in server.requests if request.startswith("POST")]


def test_a_patch_is_kept_for_the_next_run(server, plan, tarjob, shared):
    patch = yaml.safe_load(shared.read_text())
    patch["spec"]["template"]["spec"]["priorityClassName"] = "low"
    Path("patch").write_text(yaml.safe_dump(patch))
    Path("1").touch()
    options = "-b", "kubernetes", "--image", "x", "--retries", 0, "--patch", "patch", "--wait", "--name", "words"
    assert tarjob(*options, "-s", "{0..2}", "--state", "state", "--", "test -e {}")[0] == 1
    Path("patch").unlink()
    assert tarjob("retry", "words", "--wait")[0] == 1
    jobs = server.objects["jobs"]
    assert [(name, jobs[name]["spec"]["completions"]) for name in jobs] == [("words-1-0", 3), ("words-2-0", 2)]
    assert {job["spec"]["template"]["spec"]["priorityClassName"] for job in jobs.values()} == {"low"}


def test_options_of_an_earlier_version(server, plan):
    run(plan)
    path = Path(".tarjob/words/job.json")
    record = json.loads(path.read_text())
    record["options"] |= {"toleration": [], "ttl": None, "patch": []}
    path.write_text(json.dumps(record))
    assert status_of(JobFolder("words"))[1].ended
    record["options"]["node_selector"] = ["a=b"]
    path.write_text(json.dumps(record))
    with pytest.raises(StateError, match="submitted with --node-selector; submit it again with --patch"):
        status_of(JobFolder("words"))
    record["options"] |= {"node_selector": [], "patch": [{"op": "remove", "path": "/spec/suspend"}]}
    path.write_text(json.dumps(record))
    with pytest.raises(StateError, match="a JSON Patch of 1 operations; submit it again with"):
        status_of(JobFolder("words"))


@pytest.fixture
def kubectl(server, folder):
    """Return a function that runs kubectl, a client that is not ours, and returns its stdout."""
    need("kubectl")

    def run(*arguments: str, stdin: str = "") -> str:
        environment = {**os.environ, "HOME": str(folder)}
        done = subprocess.run(["kubectl", *arguments], env=environment, input=stdin, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return run


def test_kubectl_creates_what_is_printed(server, tarjob, kubectl, shared):
    place = "--state", "state", "--patch", shared
    options = "-b", "kubernetes", "--image", "x", "--name", "words", "-s", "{0..2}", *place
    code, printed, errors = tarjob(*options, "--print", "--", "echo hello {}")
    assert (code, errors) == (0, "")
    made = kubectl("create", "--validate=false", "-f", "-", stdin=printed)
    assert made == "configmap/words-1-0 created\njob.batch/words-1-0 created\n"
    ended = kubectl("wait", "--for=condition=complete", "--timeout=60s", "job/words-1-0")
    assert ended == "job.batch/words-1-0 condition met\n"
    assert kubectl("logs", "words-1-0-2-00000") == "hello 2\n"
    code, _, errors = tarjob(*options, "--wait", "--", "echo hello {}")
    assert (code, errors) == (0, "tarjob: 3 of 3 items kept from an earlier run\ntarjob: 3 items done\n")


def test_kubectl_sees_what_is_submitted(server, tarjob, kubectl, plan):
    run(plan)
    job = json.loads(kubectl("get", "job", "words-1-0", "-o", "json"))
    assert (job["spec"]["completions"], job["status"]["failedIndexes"]) == (6, "3")
    found = kubectl("get", "pods", "-l", "batch.kubernetes.io/job-completion-index=3", "-o", "name")
    assert found.split() == [f"pod/words-1-0-3-0000{attempt}" for attempt in range(3)]
    assert kubectl("delete", "job", "words-1-0", "--wait=false").startswith('job.batch "words-1-0" deleted')
    assert (server.objects["jobs"], server.objects["configmaps"]) == ({}, {})


def test_kubectl_applies_feeders(server, kubectl, path_with_tools):
    """The Service and the Deployment that tarfeed prints, as kubectl makes, keeps and changes them."""
    tool = [shutil.which("tarfeed", path=path_with_tools), "kubernetes", "batches:train", "--image", "registry/train:1"]
    options = ["--feeders", "8", "--key-secret", "feed-keys"]

    def apply(replicas: int) -> list[str]:
        command = [*tool, *options, "--replicas", str(replicas)]
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return kubectl("apply", "--validate=false", "-f", "-", stdin=printed).splitlines()

    names = ["service/feeders", "deployment.apps/feeders"]
    assert apply(20) == [f"{name} created" for name in names]
    assert apply(20) == [f"{name} unchanged" for name in names]
    assert apply(30) == [f"{names[0]} unchanged", f"{names[1]} configured"]
    made = json.loads(kubectl("get", "deployment", "feeders", "-o", "json"))
    assert made["spec"]["replicas"] == 30
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["command"][:5] == ["tarfeed", "serve", "batches:train", "--bind", "tcp://*:7700"]
    assert [port["containerPort"] for port in container["ports"]] == [*range(7700, 7708)]
    found = json.loads(kubectl("get", "service", "feeders", "-o", "json"))
    assert found["spec"]["clusterIP"] == "None"
    assert found["spec"]["selector"] == made["spec"]["template"]["metadata"]["labels"]
    gone = kubectl("delete", "service,deployment", "feeders", "--wait=false")
    assert gone == 'service "feeders" deleted\ndeployment.apps "feeders" deleted\n'


def test_the_folder_of_keys_makes_the_secret_that_feeders_mount(kubectl, folder):
    make_keys(str(folder / "keys"))
    words = ["create", "secret", "generic", "feed-keys", "--from-file=keys", "--dry-run=client", "-o", "json"]
    made = json.loads(kubectl(*words))
    kubernetes_validate.validate(made, VERSION, strict=True)
    assert sorted(made["data"]) == sorted(path.name for path in (folder / "keys").iterdir())
