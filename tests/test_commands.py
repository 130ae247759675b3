"""`pipe:` runs a command only if the user typed it: never from a list, manifest or table, nor without permission."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from tarshards import Stream, map_shards, read_msgpack, read_samples, reshard
from tarshards.errors import TarshardsError, UrlError
from tarshards.samples.lines import read_keys
from tarshards.storage.expressions import expand_urls, find_shards
from tarshards.verbs.cat import interleave, read_parallel
from tarshards.verbs.check import check_shards
from tarshards.verbs.create import read_member_lines, read_plan, read_text
from tarshards.verbs.grep import KeyFilter
from tarshards.verbs.join import join_shards
from tarshards.verbs.jsonl import read_json_lines
from tarshards.verbs.mix import Source, mix_streams
from tarshards.write.split import split_samples
from tests.tool_lines import WRITING, command_of, make_inputs

INPUT = re.compile(r"\{0\}(in-\S+|lines\.txt|rows\.jsonl)")
LINES = {tool: line for tool, line in WRITING.items() if INPUT.search(line)}
#: The tools that read any stream.
STREAMING = sorted(LINES.keys() - {"tarcard", "tarconvert", "tarexport", "tarimport", "tarindex"})


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_inputs(tmp_path)


def run(tool: str, line: list[str]) -> None:
    command_of(tool).main([tool, *line] if tool == "tarjob" else line, standalone_mode=False)


def ran() -> bool:
    return Path("ran").exists()


def line_of(tool: str, source: str) -> list[str]:
    """The line of a tool with *source* for its first input; others of its inputs are the first one."""
    words = LINES[tool].split()
    first = next(number for number, word in enumerate(words) if INPUT.fullmatch(word))
    return [source if number == first else word.format("") for number, word in enumerate(words)]


def file_of(tool: str) -> str:
    return str(INPUT.search(LINES[tool])[1]).replace("{{0..2}}", "0").replace("{{0..1}}", "0")


@pytest.mark.parametrize("scheme", ["pipe", "PIPE"])
@pytest.mark.parametrize("tool", LINES)
def test_no_tool_runs_a_command_from_a_list(tool, scheme):
    Path("list").write_text(f"{scheme}:touch ran; cat {file_of(tool)}\n")
    Path("outer").write_text("@list\n")
    for name in "@list", "@outer":
        with pytest.raises((TarshardsError, click.UsageError), match="a list file may not name a command"):
            run(tool, line_of(tool, name))
        assert not ran()


@pytest.mark.parametrize("tool", LINES)
def test_no_tool_runs_a_command_from_a_manifest(tool):
    text = '{"wids_version": 1, "shardlist": [{"url": "pipe:touch ran; cat %s"}]}'
    Path("x.shards.json").write_text(text % file_of(tool))
    with pytest.raises((TarshardsError, click.UsageError), match="a manifest may not name"):
        run(tool, line_of(tool, "x.shards.json"))
    assert not ran()


@pytest.mark.parametrize("command", ["pipe:touch ran", "pipe:curl http://host/a.tar; touch ran"])
def test_a_job_takes_no_command_from_a_list(command):
    Path("list").write_text(f"{command}\n")
    with pytest.raises((TarshardsError, click.UsageError), match="a list file may not name a command"):
        command_of("tarjob").main(["-s", "@list", "--", "tarcat", "{}", "-o", "out.tar"], standalone_mode=False)
    assert not ran()


@pytest.mark.parametrize("tool", STREAMING)
def test_a_tool_runs_a_command_that_is_typed(tool):
    run(tool, line_of(tool, f"pipe:touch ran; cat {file_of(tool)}"))
    assert ran()


@pytest.mark.parametrize(
    "line",
    [
        ["pipe:touch ran; printf '__key__\\ttxt\\na\\tb\\n'"],
        ["--lines", "pipe:touch ran; echo 'a.txt text:b'"],
        ["--jsonl", 'pipe:touch ran; echo \'{"__key__": "a", "txt": "b"}\''],
    ],
)
def test_a_table_may_come_from_a_command_that_is_typed(line):
    run("tarcreate", [*line, "-q", "-o", "out.tar"])
    assert ran()
    assert Path("out.tar").exists()


@pytest.mark.parametrize(
    ("option", "text"), [([], "__key__\t@txt\na\tpipe:touch ran\n"), (["--lines"], "a.txt\tpipe:touch ran; echo b\n")]
)
def test_a_table_names_no_commands_unless_that_is_allowed(option, text):
    Path("table").write_text(text)
    with pytest.raises(TarshardsError, match="a command runs only"):
        run("tarcreate", [*option, "table", "-q", "-o", "out.tar"])
    assert not ran()
    run("tarcreate", [*option, "table", "-q", "-o", "out.tar", "--allow-pipe"])
    assert ran()


def test_a_mixture_in_a_file_names_no_commands_unless_that_is_allowed():
    Path("mix.yaml").write_text("- shards: 'pipe:touch ran; cat in-0.tar'\n")
    with pytest.raises(TarshardsError, match="a command runs only"):
        run("tarmix", ["--yaml", "mix.yaml", "-q", "-o", "out.tar"])
    assert not ran()
    run("tarmix", ["--yaml", "mix.yaml", "-q", "-o", "out.tar", "--allow-pipe"])
    assert ran()


def test_keys_may_come_from_a_command_that_is_typed():
    run("targrep", ["--keys", "pipe:touch ran; echo 000", "in-0.tar", "-q", "-o", "out.tar"])
    assert ran()


COMMAND = "pipe:touch ran; cat in-0.tar"
WITHOUT_LEAVE = {
    "check_shards": lambda: check_shards([COMMAND]).total("error") and pytest.raises,
    "interleave": lambda: list(interleave(COMMAND, 1)),
    "join_shards": lambda: list(join_shards([COMMAND, "in-0.tar"])),
    "KeyFilter": lambda: list(KeyFilter(["000"]).read(COMMAND)),
    "map_shards": lambda: map_shards(list, COMMAND, "out-%d.tar", progress=False),
    "map_shards to it": lambda: map_shards(list, ["in-0.tar"], ["pipe:touch ran; cat > out.tar"], progress=False),
    "mix_streams": lambda: list(mix_streams([Source(COMMAND)])),
    "read_json_lines": lambda: list(read_json_lines(COMMAND)),
    "read_keys": lambda: list(read_keys(COMMAND)),
    "read_member_lines": lambda: list(read_member_lines(COMMAND)),
    "read_msgpack": lambda: list(read_msgpack(COMMAND)),
    "read_parallel": lambda: list(read_parallel(COMMAND)),
    "read_plan": lambda: list(read_plan(COMMAND)),
    "read_samples": lambda: list(read_samples(COMMAND)),
    "read_text": lambda: list(read_text(COMMAND)),
    "reshard": lambda: reshard(COMMAND, "out-%d.tar"),
    "reshard to it": lambda: reshard("in-0.tar", "pipe:touch ran; cat > out-%d.tar", tmpdir="."),
    "split_samples": lambda: split_samples(read_samples("in-0.tar"), "pipe:touch ran; cat > out-%d.tar"),
    "Stream": lambda: Stream.from_shards(COMMAND).collect(),
}


@pytest.mark.parametrize("name", WITHOUT_LEAVE)
def test_no_function_runs_a_command_without_leave(name):
    if name == "check_shards":
        assert "a command runs only" in check_shards([COMMAND]).findings[0].reason
    else:
        with pytest.raises(TarshardsError, match=r"a command runs only|a stream has no \.done file"):
            WITHOUT_LEAVE[name]()
    assert not ran()


def test_leave_does_not_reach_what_a_list_names():
    Path("list").write_text("in-0.tar\npipe:touch ran; cat in-0.tar\n")
    for read in (
        lambda: list(read_samples("@list", allow_pipe=True)),
        lambda: Stream.from_shards(["in-0.tar", "@list"], allow_pipe=True).collect(),
        lambda: find_shards("@list", allow_pipe=True),
        lambda: expand_urls("@list"),
    ):
        with pytest.raises(UrlError, match=r"^@list: a list file may not name a command: pipe:touch ran; cat in-0.tar"):
            read()
    assert not ran()


def test_a_list_of_a_person_s_own_runs_commands():
    assert len(list(read_samples(["in-0.tar", "pipe:cat in-1.tar"], allow_pipe=True))) == 8
    assert [shard.allow_pipe for shard in find_shards(["a.tar", "pipe:cat b.tar"])] == [False, False]


@pytest.mark.parametrize("word", ["*e:*.tar", "pipe:touch ran;.tar", "./pipe:*"])
def test_a_file_that_is_named_like_a_command_is_a_file(word):
    """As a shell's `*` may give it."""
    Path("pipe:touch ran;.tar").write_bytes(Path("in-0.tar").read_bytes())
    assert len(list(read_samples(word, allow_pipe=True))) == 4
    run("tarcat", [word, "-q", "-o", "out.tar"])
    assert len(list(read_samples("out.tar"))) == 4
    assert not ran()


def test_a_pattern_never_stands_for_stdin():
    Path("-").write_bytes(Path("in-0.tar").read_bytes())
    assert expand_urls("[-]") == ["./-"]
    assert len(list(read_samples("[-]"))) == 4
