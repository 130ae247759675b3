"""The skill file for coding agents names what there is; tests/test_guides.py runs its programs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tarshards

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[1]
SKILL = ROOT / "skills/tarshards/SKILL.md"
TEXT = SKILL.read_text()


def test_its_head_is_what_agents_read():
    head = re.match(r"---\nname: (\S+)\ndescription: (.+)\n---\n\n# tarshards\n", TEXT)
    assert head[1] == SKILL.parent.name
    assert len(head[2]) <= 1024


def test_it_is_short():
    assert len(TEXT) < 8_000


def test_it_names_public_names_and_tools():
    table = TEXT.partition("## Choose")[2].partition("\n## ")[0]
    names = set(re.findall(r"\b([A-Z]\w+|mix|map_shards|write_dataset)(?=\()", table)) | {"IndexedShards"}
    assert names <= {*tarshards._MODULE_OF}
    tools = set(re.findall(r"\btar[a-z]{3,}\b", TEXT)) - {"tarshards"}
    assert tools <= {path.name for path in (ROOT / "bin").iterdir()}
