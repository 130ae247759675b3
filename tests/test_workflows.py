"""The workflows run pinned code with the least rights, and the issue forms ask for what an answer needs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")

GITHUB = Path(__file__).parents[1] / ".github"
WORKFLOWS = sorted(GITHUB.glob("workflows/*.yml"))
workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[Any, Any]:
    return yaml.safe_load(path.read_text())


@workflows
def test_actions_are_pinned_with_their_version(path):
    used = re.findall(r"uses: (?!\./)(.*)", path.read_text())  # those of this repository are of its own commit
    assert used
    for action in used:
        assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # (v[\d.]+|release/v[\d.]+)", action)


@workflows
def test_rights_are_given_to_jobs_alone_and_checkouts_keep_no_token(path):
    workflow = read(path)
    assert workflow["permissions"] in ({}, {"contents": "read"})
    for job in workflow["jobs"].values():
        rights = job.get("permissions", {})
        assert rights.keys() <= {"contents", "id-token", "attestations"}
        assert rights.get("contents", "read") == "read"
        if "uses" in job:  # a workflow, which is checked itself
            continue
        assert "timeout-minutes" in job
        for step in job["steps"]:
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_all_supported_pythons_are_tested():
    jobs = read(GITHUB / "workflows/check.yml")["jobs"]
    pythons = {"3.11", *jobs["pythons"]["strategy"]["matrix"]["python"]}
    assert jobs["debian"]["container"]["image"].startswith("python:3.11-")
    setup = (GITHUB.parent / "setup.cfg").read_text()
    assert {*re.findall(r"Python :: (3\.\d+)", setup)} == {name for name in pythons if not name.endswith("t")}
    assert "3.14t" in pythons


def test_updates_wait_before_they_are_proposed():
    for update in read(GITHUB / "dependabot.yml")["updates"]:
        assert update["cooldown"]["default-days"] >= 7


def test_the_form_for_bugs_asks_for_the_installation():
    fields = read(GITHUB / "ISSUE_TEMPLATE/bug.yml")["body"]
    (report,) = [field for field in fields if "python -m tarshards" in field["attributes"]["label"]]
    assert report["validations"]["required"] is True


@pytest.mark.interop
def test_zizmor_finds_nothing():
    zizmor = Path(sys.prefix, "bin/zizmor")
    if not zizmor.exists():
        pytest.skip("needs zizmor")
    done = subprocess.run([zizmor, "--offline", "--no-progress", GITHUB], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
