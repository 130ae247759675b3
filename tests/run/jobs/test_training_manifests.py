"""The manifests of examples/: the schemas accept them, and their parts agree with each other and with the script."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from object_checks import VERSIONS, check_object

pytestmark = pytest.mark.interop

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def parsed(monkeypatch):
    """Return a function that parses a command as torchrun and examples/train.py do, to the options of both."""
    run = pytest.importorskip("torch.distributed.run")
    monkeypatch.syspath_prepend(EXAMPLES)

    def parse(command: list[str]) -> tuple[Any, dict[str, Any]]:
        assert command[0] == "torchrun"
        options = run.get_args_parser().parse_args(command[1:])
        return options, import_module("train").main.make_context("train", options.training_script_args).params

    yield parse
    sys.modules.pop("train", None)


def valid(text: str) -> list[dict[str, Any]]:
    documents = list(yaml.safe_load_all(text))
    for document in documents:
        check_object(document)
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    return documents


def mounts(pod: dict[str, Any]) -> dict[str, str]:
    """The mounts of the pod's container: the kind of volume by path."""
    (container,) = pod["containers"]
    kinds = {volume["name"]: next(key for key in volume if key != "name") for volume in pod["volumes"]}
    return {mount["mountPath"]: kinds[mount["name"]] for mount in container["volumeMounts"]}


def check_places(pod: dict[str, Any], script: str, output: Path) -> None:
    assert Path(script).name == "train.py"
    assert mounts(pod)[str(Path(script).parent)] == "configMap"
    assert mounts(pod)[str(output.parent)] == "persistentVolumeClaim"
    assert pod["securityContext"] == {"fsGroup": 1000}
    assert "USER 1000:1000\n" in (EXAMPLES.parent / "Dockerfile").read_text()


def test_several_pods(parsed):
    service, job = valid((EXAMPLES / "train.yaml").read_text())
    name, spec, pod = job["metadata"]["name"], job["spec"], job["spec"]["template"]["spec"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}  # which the Job's controller sets
    assert service["spec"]["clusterIP"] == "None"
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    torchrun, train = parsed(container["args"])
    assert int(torchrun.nnodes) == spec["completions"] == spec["parallelism"]
    assert spec["completionMode"] == "Indexed"  # it gives the pods the names NAME-INDEX
    (port,) = service["spec"]["ports"]
    assert torchrun.rdzv_endpoint == f"{name}-0.{pod['subdomain']}:{port['port']}"
    ranks = int(torchrun.nnodes) * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert train["batch"] % ranks == 0 == 192 % ranks
    check_places(pod, torchrun.training_script, train["output"])


def test_a_pod_for_each_item(parsed, tarjob, monkeypatch):
    (line,) = re.findall(r"^kujob ((?:.*\\\n)*.*)", (EXAMPLES / "README.md").read_text(), re.MULTILINE)
    words = shlex.split(line.replace("\\\n", "").replace("examples/", f"{EXAMPLES}/"))
    code, out, errors = tarjob("-b", "kubernetes", *words)
    assert (code, errors) == (0, "")
    _, job = valid(out)
    pod = job["spec"]["template"]["spec"]
    torchrun, train = parsed([word.replace("{}", "3") for word in words[words.index("--") + 1 :]])
    assert (train["seed"], job["spec"]["completions"]) == (3, 5)
    assert train["batch"] % int(pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]) == 0
    check_places(pod, torchrun.training_script, train["output"])
