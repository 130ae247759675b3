"""Kubernetes objects: the schemas of all versions and the rules of a server accept what tarjob makes."""

from __future__ import annotations

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from object_checks import VERSIONS, check_object, is_label_key

from tarshards.run.jobs import kubernetes_objects
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_options import Options, parse_quantity
from tarshards.run.jobs.job_plan import JobPlan, group_tasks, make_plan
from tarshards.run.jobs.kubernetes import Kubernetes, check_fields
from tarshards.run.jobs.kubernetes_objects import check_outputs, make_objects, split_plan

pytestmark = pytest.mark.interop

EXAMPLES = Path(__file__).parents[3] / "examples"
GOLDEN = Path(__file__).with_name("seed.yaml")
SEED = ["tarproc", "-p", "16", "-c", "run-ocr *.png", "gs://g1000/scanned-{}.tar", "-o", "gs://g1000/ocr-{}.tar"]
PATCH = """
metadata:
  labels: {example.com/team: ocr, cost: books}
spec:
  ttlSecondsAfterFinished: 3600
  template:
    spec:
      nodeSelector: {cloud.google.com/gke-nodepool: big}
      tolerations:
      - {key: spot, operator: Exists}
      - {key: team, operator: Equal, value: ocr, effect: NoSchedule}
      - {key: nvidia.com/gpu, operator: Exists, effect: NoExecute}
      priorityClassName: batch-low
"""
FULL = Options(
    parallelism=50,
    retries=5,
    max_failed=10,
    deadline=86400,
    cpu="16",
    memory="32Gi",
    storage="100Gi",
    gpu=1,
    image="registry.example.com/ocr:1",
    namespace="books",
    service_account="reader",
    secret_env=("hub", "TOKEN=vault:token"),
    secret_volume=("gcs:/var/secrets/gcs",),
    patch=yaml.safe_load(PATCH),
)


def objects(options: Options = FULL, count: int = 1000) -> list[dict]:
    plan = make_plan(SEED, [f"{{0000..{count - 1:04d}}}"])
    return [each for pair in make_objects(plan, options) for each in pair]


def test_the_line_of_the_seed_is_this_manifest(tarjob):
    code, out, errors = tarjob("-b", "kubernetes", "--image", "me/ocr:1", "--print", "-s", "{0000..0999}", "--", *SEED)
    assert (code, errors) == (0, "")
    assert out == GOLDEN.read_text()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("options", [FULL, Options(image="x")], ids=["full", "least"])
def test_the_schema_of_every_version_accepts_them(version, options):
    for each in objects(options, 10):
        kubernetes_validate.validate(each, version, strict=True)


def test_the_validator_accepts_the_golden_objects_and_sees_what_is_none(folder):
    program = [Path(sys.executable).with_name("kubernetes-validate"), "-k", "1.37", "--strict"]
    done = subprocess.run([*program, GOLDEN], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    Path("bad.yaml").write_text(GOLDEN.read_text().replace("completionMode", "completionmode"))
    assert subprocess.run([*program, "bad.yaml"], capture_output=True).returncode != 0


def test_every_option_has_its_place():
    config, job = objects()
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["namespace"] == config["metadata"]["namespace"] == "books"
    assert {"example.com/team": "ocr", "cost": "books"}.items() <= job["metadata"]["labels"].items()
    assert {key: spec[key] for key in ("completions", "parallelism", "backoffLimitPerIndex", "maxFailedIndexes")} == {
        "completions": 1000,
        "parallelism": 50,
        "backoffLimitPerIndex": 5,
        "maxFailedIndexes": 10,
    }
    assert (spec["ttlSecondsAfterFinished"], spec["activeDeadlineSeconds"]) == (3600, 86400)
    asked = {"cpu": "16", "memory": "32Gi", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"requests": asked, "limits": asked}
    assert container["env"] == [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "vault", "key": "token"}}}]
    assert container["envFrom"] == [{"secretRef": {"name": "hub"}}]
    assert pod["volumes"][1] == {"name": "secret-0", "secret": {"secretName": "gcs"}}
    assert container["volumeMounts"][1]["mountPath"] == "/var/secrets/gcs"
    assert (pod["serviceAccountName"], pod["priorityClassName"]) == ("reader", "batch-low")
    assert pod["nodeSelector"] == {"cloud.google.com/gke-nodepool": "big"}
    assert pod["tolerations"] == [
        {"key": "spot", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "ocr", "effect": "NoSchedule"},
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoExecute"},
    ]
    for each in (config, job):
        check_object(each)


def test_a_patch_changes_one_place_only():
    config, job = objects()
    assert "cost" not in {**config["metadata"]["labels"], **job["spec"]["template"]["metadata"]["labels"]}
    assert objects(Options(image="x"))[1]["spec"]["ttlSecondsAfterFinished"] == 7 * 24 * 3600


def test_no_secret_and_no_item_is_in_the_command():
    _, job = objects()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["tarjob", "worker", "/etc/tarjob/plan.json"]
    assert "args" not in container


def test_a_hundred_thousand_items_are_several_jobs():
    plan = make_plan(["tarproc", "-c", "true", "s3://b/in-{}.tar", "-o", "s3://b/out-{}.tar"], ["{000000..119999}"])
    pairs = make_objects(plan, Options(image="x"))
    assert len(pairs) > 1
    plans = []
    for config, job in pairs:
        check_object(config)
        check_object(job)
        assert len(config["data"]["plan.json"].encode()) <= 1 << 20
        plans.append(JobPlan.loads(config["data"]["plan.json"]))
        assert job["spec"]["completions"] == len(plans[-1].tasks) <= 100_000
        assert job["spec"]["template"]["spec"]["volumes"][0]["configMap"]["name"] == config["metadata"]["name"]
    assert [task for plan in plans for task in plan.tasks] == list(plan.tasks)
    assert len({job["metadata"]["name"] for _, job in pairs}) == len(pairs)


def test_chunks_are_cut_by_number_and_by_size(monkeypatch):
    plan = make_plan(["cat", "{}"], ["{000..099}"], state="s")
    monkeypatch.setattr(kubernetes_objects, "MAX_COMPLETIONS", 40)
    assert [len(chunk.tasks) for chunk in split_plan(plan)] == [40, 40, 20]
    monkeypatch.undo()
    for size in (1000, 500, 300):
        monkeypatch.setattr(kubernetes_objects, "MAX_BYTES", size)
        chunks = list(split_plan(plan))
        assert [task for chunk in chunks for task in chunk.tasks] == list(plan.tasks)
        assert all(len(chunk.dumps()) <= size for chunk in chunks)
    grouped = group_tasks(plan, count=7)
    assert sum((chunk.tasks for chunk in split_plan(grouped)), ()) == grouped.tasks


@cache
def full_job() -> dict:
    return objects()[1]


def job(spec: dict | None = None, pod: dict | None = None, container: dict | None = None, **metadata) -> dict:
    made = copy.deepcopy(full_job())
    made["metadata"].update(metadata)
    made["spec"].update(spec or {})
    template = made["spec"]["template"]["spec"]
    template.update(pod or {})
    template["containers"][0].update(container or {})
    return made


def resources(**amounts: str) -> dict:
    return {"resources": {"requests": amounts}}


def service(name: str = "x.y", *ports: dict) -> dict:
    return {"kind": "Service", "metadata": {"name": name}, "spec": {"ports": list(ports)}}


MANY = {"completions": 100_001, "maxFailedIndexes": 10}
RULES = "podFailurePolicy"
EXIT = {"operator": "In", "values": [42]}
REFUSED = [
    (job(name="Upper"), "the name 'Upper' is no DNS name"),
    (job(name="a" * 60), "the name and an index are more than 63 characters"),
    (job(name="under_score"), "no DNS name"),
    (job(namespace="a.b"), "the namespace 'a.b' is no DNS label"),
    (job(labels={"a b": "c"}), "the label 'a b' is no qualified name"),
    (job(labels={"a": "b c"}), "the label a has the value 'b c'"),
    (job(labels={"a": "x" * 64}), "at most 63"),
    (job(annotations={"a b": ""}), "the annotation 'a b'"),
    (job({"parallelism": -1}), "parallelism is negative"),
    (job({"activeDeadlineSeconds": 0}), "activeDeadlineSeconds is not positive"),
    (job({"ttlSecondsAfterFinished": -1}), "ttlSecondsAfterFinished is negative"),
    (job({"parallelism": 100_001}), "parallelism is more than 100000"),
    (job({"completionMode": "NonIndexed"}), "backoffLimitPerIndex needs completionMode Indexed"),
    (job({"backoffLimitPerIndex": None}), "maxFailedIndexes needs backoffLimitPerIndex"),
    (job({"backoffLimitPerIndex": None}), "the action FailIndex needs backoffLimitPerIndex"),
    (job({"maxFailedIndexes": 1001}), "maxFailedIndexes is more than completions"),
    (job({**MANY, "maxFailedIndexes": 100_001}), "maxFailedIndexes is more than 100000"),
    (job({**MANY, "maxFailedIndexes": 10_001}), "maxFailedIndexes of at most 10000"),
    (job({**MANY, "maxFailedIndexes": None}), "maxFailedIndexes of at most 10000"),
    (job({**MANY, "parallelism": 10_001}), "parallelism of at most 10000"),
    (job(pod={"restartPolicy": "Always"}), "restartPolicy Always: a Job has Never or OnFailure"),
    (job(pod={"restartPolicy": "OnFailure"}), "backoffLimitPerIndex needs restartPolicy Never"),
    (job(pod={"restartPolicy": "OnFailure"}), "podFailurePolicy needs restartPolicy Never"),
    (job({RULES: {"rules": [{"action": "Ignore"}]}}), "has one of onExitCodes and onPodConditions"),
    (job({RULES: {"rules": [{"action": "FailJob", "onExitCodes": {**EXIT, "values": [0]}}]}}), "exit code of 0"),
    (job({RULES: {"rules": [{"action": "FailJob", "onExitCodes": {**EXIT, "containerName": "x"}}]}}), "no container x"),
    (job(pod={"serviceAccountName": "A"}), "serviceAccountName 'A' is no DNS name"),
    (job(pod={"priorityClassName": "A"}), "priorityClassName 'A' is no DNS name"),
    (job(pod={"nodeSelector": {"a": "b/c"}}), "the node selector a has the value"),
    (job(pod={"tolerations": [{"key": "a", "effect": "Never"}]}), "the effect 'Never'"),
    (job(pod={"tolerations": [{"key": "a b"}]}), "the toleration 'a b'"),
    (job(pod={"volumes": [{"name": "JobPlan"}]}), "the volume 'JobPlan' is no DNS label"),
    (job(pod={"volumes": [{"name": "plan", "secret": {"secretName": "A"}}]}), "the secret 'A' is no DNS name"),
    (job(container={"name": "Tarjob"}), "the container 'Tarjob' is no DNS label"),
    (job(container={"image": ""}), "'' is no image"),
    (job(container={"image": "a b"}), "'a b' is no image"),
    (job(container={"volumeMounts": [{"name": "x", "mountPath": "/x"}]}), "there is no volume x"),
    (job(container={"volumeMounts": [{"name": "plan", "mountPath": "/x"}] * 2}), "two volumes have one mountPath"),
    (job(container={"volumeMounts": [{"name": "plan", "mountPath": "/x:y"}]}), "has a colon"),
    (
        job(container={"env": [{"name": "1x", "valueFrom": {"secretKeyRef": {"name": "a"}}}]}),
        "'1x' is no name of a var",
    ),
    (job(container={"envFrom": [{"secretRef": {"name": "A"}}]}), "the secret 'A' is no DNS name"),
    (job(container=resources(cpu="two")), "cpu: 'two' is not a quantity"),
    (job(container=resources(memory="4gi")), "memory: '4gi' is not a quantity"),
    (job(container={"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1500m"}}}), "more than its limit"),
    (job(container=resources(**{"nvidia.com/gpu": "1"})), "nvidia.com/gpu is not overcommitted"),
    ({"kind": "ConfigMap", "metadata": {"name": "a"}, "data": {"x": "x" * (1 << 20 | 1)}}, "1048577 bytes of data"),
    (job(container={"env": [{"name": "A", "value": "", "valueFrom": {}}]}), "the variable A has two values"),
    (service(), "the name is no DNS label"),
    (service("x", {"port": 0}), "is no port"),
    (service("x", {"port": 1}, {"port": 2}), "several ports need names"),
    ({"kind": "Pod", "metadata": {"name": "a"}}, "a Job, a Deployment, a ConfigMap or a Service, not Pod"),
]


@pytest.mark.parametrize(("each", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_a_server_would_refuse_is_refused(each, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        check_object(each)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"secret_env": ("TOKEN=secret-value",)}, "never a value"),
        ({"secret_env": ("A B=x:y",)}, "NAME=SECRET:KEY"),
        ({"secret_volume": ("a",)}, "SECRET:/PATH"),
        ({"secret_volume": ("a:b",)}, "SECRET:/PATH"),
        ({"cpu": "two"}, "cpu: 'two' is not a quantity"),
        ({"memory": "4gi"}, "memory: '4gi' is not a quantity"),
        ({"image": None}, "Kubernetes needs --image"),
        ({"image": "a b"}, "--image 'a b' is not an image"),
        ({"image": ""}, "is not an image"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        objects(Options(**{"image": "x", **options}))


@pytest.mark.parametrize(
    ("text", "value"), [("0", 0), ("1.5", 1.5), ("250m", 0.25), ("1Ki", 1024), ("2G", 2e9), ("1Pi", 2**50)]
)
def test_quantities(text, value):
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1 Gi", "1g", "x", "1e", "1.", "GiB"])
def test_what_is_no_quantity(text):
    with pytest.raises(ValueError, match="is not a quantity"):
        parse_quantity(text)


@pytest.mark.parametrize(
    ("key", "sound"), [("a", True), ("a.b/c_d", True), ("/a", False), ("a/", False), ("A/b", False), ("", False)]
)
def test_label_keys(key, sound):
    assert is_label_key(key) is sound


def test_the_preview_is_yaml_that_reads_back():
    plan = make_plan(SEED, ["{0000..0019}"])
    scheduler = Kubernetes(FULL, JobFolder("x"))
    assert list(yaml.safe_load_all(scheduler.preview(plan))) == [
        each for pair in make_objects(plan, FULL) for each in pair
    ]


def test_the_fields_of_every_kind_are_known():
    check_fields(yaml.safe_load(PATCH), "V1Job")
    check_fields(yaml.safe_load((EXAMPLES / "volumes.yaml").read_text()), "V1Job")
    for config, job in make_objects(make_plan(SEED, ["{0000..0009}"]), FULL):
        check_fields(config, "V1ConfigMap")
        check_fields(job, "V1Job")


PARALLEL = [
    ("tarproc -p 16 -c x in-{}.tar", "16"),
    ("tarproc -P 16 -c x in-{}.tar", "16"),
    ("tarproc -P16 -c x in-{}.tar", "16"),
    ("tarproc -p16 -c x in-{}.tar", "16"),
    ("nice -n 19 tarproc -p 2 -j 16 -c x in-{}.tar", "16"),
    ("tarsplit --parallel=16 in-{}.tar", "16"),
    ("/opt/bin/tarpcat --parallel 16 in-{}.tar", "16"),
    ("tarproc -p 0 -c x in-{}.tar", "1"),
    ("tarproc -c x in-{}.tar", "1"),
    ("tarproc -p {} -c x", "1"),
    ("make -j 16 {}", "1"),
    ("xargs -p 16 tarcat {}", "1"),
]


@pytest.mark.parametrize(("line", "cores"), PARALLEL)
@pytest.mark.parametrize("is_line", [False, True])
def test_a_pod_has_the_cores_that_the_command_uses(line, cores, is_line):
    def asked(options: Options) -> dict:
        plan = make_plan([line] if is_line else line.split(), ["{0..1}"], state="s3://b/s")
        ((_, job),) = make_objects(plan, options)
        return job["spec"]["template"]["spec"]["containers"][0]["resources"]

    assert asked(Options(image="x")) == {"requests": {"cpu": cores, "memory": "1Gi"}}
    assert asked(Options(image="x", cpu="3"))["requests"]["cpu"] == "3"


def test_the_largest_number_of_a_pipeline_counts():
    plan = make_plan(["tarcat {} | tarproc -p 8 -c 'y -p 99' | tarsplit -j 2 -; make -j 9"], ["a"], state="s3://b/s")
    assert plan.cores == 8


VOLUMES = """
spec:
  template:
    spec:
      volumes:
      - {name: data, persistentVolumeClaim: {claimName: data}}
      - {name: scratch, emptyDir: {}}
      - {name: code, configMap: {name: code}}
      containers:
      - name: tarjob
        volumeMounts:
        - {name: data, mountPath: /data}
        - {name: data, mountPath: /read, readOnly: true}
        - {name: scratch, mountPath: /scratch}
        - {name: code, mountPath: /code}
        - {name: scratch, mountPath: /data/scratch}
      - {name: other, volumeMounts: [{name: data, mountPath: /other}]}
"""
OURS = ["tarcat", "in-{}.tar", "-o"]
LINE = "tarcat in-{}.tar -o /tmp/{}.tar; gsutil cp /tmp/{}.tar gs://b"


@pytest.mark.parametrize(
    ("command", "state", "lost"),
    [
        ([*OURS, "s3://b/{}.tar"], None, None),
        ([*OURS, "/data/{}.tar"], None, None),
        ([*OURS, "file:///data/{}.tar"], None, None),
        ([*OURS, "/data/../tmp/{}.tar"], None, "/data/../tmp/a.tar"),
        ([*OURS, "{}.tar"], None, "a.tar"),
        ([*OURS, "/database/{}.tar"], None, "/database/a.tar"),
        ([*OURS, "/read/{}.tar"], None, "/read/a.tar"),
        ([*OURS, "/scratch/{}.tar"], None, "/scratch/a.tar"),
        ([*OURS, "/code/{}.tar"], None, "/code/a.tar"),
        ([*OURS, "/data/scratch/{}.tar"], None, "/data/scratch/a.tar"),
        (["tarsplit", "in-{}.tar", "-o", "{}-%06d.tar"], "s3://b/s", "a-%06d.tar"),
        (["tarcat", "in-{}.tar", "--output=-"], "s3://b/s", None),
        ([*OURS, "/other/{}.tar"], None, "/other/a.tar"),
        ([*OURS, "{}.tar"], "s3://b/s", "a.tar"),
        (["sh", "x.sh", "{}"], "s3://b/s", None),
        (["sh", "x.sh", "{}"], "/data", None),
        (["sh", "x.sh", "{}"], "/data/s", None),
        (["sh", "x.sh", "{}"], "s", "s"),
        (["train", "{}", "-o", "{}.pt"], None, "a.pt"),
        (["train", "{}", "-o", "{}.pt"], "s3://b/s", None),
        ([LINE], "s3://b/s", None),
    ],
)
def test_what_is_written_lasts_longer_than_the_pod(command, state, lost):
    plan = make_plan(command, ["{a,b}"], state=state)
    if lost is None:
        check_outputs(plan, yaml.safe_load(VOLUMES))
    else:
        with pytest.raises(ValueError, match=f"^{lost}: the disk of a pod ends with the pod; write to an object store"):
            check_outputs(plan, yaml.safe_load(VOLUMES))


def test_a_relative_path_is_in_the_working_directory_of_the_patch():
    patch = yaml.safe_load(VOLUMES)
    patch["spec"]["template"]["spec"]["containers"][0]["workingDir"] = "/data/books"
    check_outputs(make_plan([*OURS, "{}.tar"], ["{a,b}"]), patch)
    with pytest.raises(ValueError, match="the disk of a pod"):
        check_outputs(make_plan([*OURS, "../../{}.tar"], ["{a,b}"]), patch)


@pytest.mark.parametrize("options", [["--dry-run"], []])
def test_kujob_refuses_outputs_on_the_disk_of_the_pod(tarjob, options):
    line = "-b", "kubernetes", "--image", "x", *options, "-s", "{0..1}", "--"
    code, out, errors = tarjob(*line, "tarproc", "-c", "x", "in-{}.tar", "-o", "out-{}.tar")
    assert (code, out) == (2, "")
    assert errors.splitlines()[-1] == (
        "Error: out-0.tar: the disk of a pod ends with the pod; write to an object store, like s3://bucket/out-0.tar, "
        "or to an absolute path on a volume that --patch mounts"
    )


@pytest.mark.parametrize(
    "patch",
    [
        {"metadata": {"name": "other"}},
        {"metadata": {"labels": None}},
        {"metadata": {"labels": {"tarshards.dev/run": "7"}}},
        {"metadata": {"annotations": None}},
        {"spec": {"completions": 3}},
        {"spec": []},
        {"metadata": None},
    ],
)
def test_a_patch_leaves_what_tarjob_finds_the_job_by(patch):
    with pytest.raises(ValueError, match=r"--patch must not change (metadata|spec)\."):
        objects(Options(image="x", patch=patch), 10)


def test_a_patch_that_is_none_is_an_error_of_one_line(tarjob):
    line = (
        "-b",
        "kubernetes",
        "--image",
        "x",
        "--print",
        "-s",
        "{0..1}",
        "--state",
        "s3://b/s",
        "--patch",
        "patch",
        "--",
    )
    for text, message in [
        ("[{op: remove, path: /spec/nothing}]", "patch: a merge patch is a map of fields of the Job"),
        ('"spec"', "patch: a merge patch is a map of fields of the Job, like {spec: {suspend: true}}"),
        ("[", "patch: while parsing"),
        ("{spec: []}", "patch: spec is a map of fields"),
        ("{spec: {template: {spec: {containers: {}}}}}", "patch: spec.template.spec.containers is a list"),
        ("{spec: {ttlSecondsAfterFinishd: 1}}", "patch: spec.ttlSecondsAfterFinishd is no field of a Job in"),
        ("{spec: {ttlSecondsAfterFinishd: null}}", "did you mean 'ttlSecondsAfterFinished'?"),
        ("{spec: {template: {spec: {tolerations: [{kee: x}]}}}}", "spec.template.spec.tolerations[0].kee is no field"),
        ("{speck: {}, 1: 2}", "did you mean 'spec'?"),
        ("{1: 2}", "known: apiVersion kind metadata spec status"),
    ]:
        Path("patch").write_text(text)
        code, out, errors = tarjob(*line, "echo {}")
        assert (code, out) == (2, "")
        assert message in errors.splitlines()[-1]
    Path("patch").write_text('{"spec": {"suspend": true}}')
    code, out, errors = tarjob(*line, "echo {}")
    assert (code, errors) == (0, "")
    assert list(yaml.safe_load_all(out))[1]["spec"]["suspend"] is True
