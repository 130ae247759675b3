"""A tool names its own option where a user types that of tar, grep, sort, split, head or xargs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess

import click
import pytest
from test_options import tools

from tarshards.cli.other_options import ANSWERS, answer_to, options_of

#: Lines that newcomers typed, and what they are told to type.
LINES = {
    "tarcat -v a.tar": "--verbose prints more, and `tarshow` lists samples",
    "tarcat -z a.tar": "-o NAME.tar.gz writes a compressed tar",
    "tarcat -tvf a.tar": "`tarshow` lists samples",
    "tarcat -x a.tar": "`tarexport --format files`",
    "tarcat --exclude '*.json' a.tar": "-f FIELDS takes some fields, and --where EXPR some samples",
    "tarcat -F a.tar": "-f FIELDS takes some fields",
    "tarcat -n 3 a.tar": "-c N takes the first N samples",
    "tarshow -n3 a.tar": "-c N takes the first N samples",
    "tarproc --head 3 -c true a.tar": "--count N takes the first N samples",
    "tarsplit -b 1M a.tar -o out": "-s SIZE limits the bytes of a shard",
    "tarsplit -l 10 a.tar -o out": "-n N limits the samples of a shard",
    "tarsplit -a 3 a.tar -o out": "-o out-%04d.tar",
    "tarsplit -d a.tar -o out": "-o out-%04d.tar",
    "tarsplit --filter 'gzip' a.tar -o out": "--post CMD",
    "tarsplit --shards 4 a.tar -o out": "`tarreshard --shards N`",
    "tarsort -n a.tar": "--sort FIELD:int",
    "tarsort -k cls a.tar": "--sort FIELD sorts by a field",
    "tarsort -s a.tar": "equal samples always keep their order",
    "tarsort -R a.tar": "--shuffle",
    "tarsort -u a.tar": "--unique first",
    "targrep -H text a.tar": "-l writes keys",
    "targrep -n text a.tar": "-l writes keys",
    "targrep -L text a.tar": "-v -l writes the keys",
    "targrep -r text a.tar": "name the shards",
    "lines2tar -0 a.txt": "`tr '\\0' '\\n'`",
    "tarproc -0 -c true a.tar": "--null goes with -T",
    "tarproc -I {} -c true a.tar": "files sample.EXT",
    "tarproc --jobs 4 -c true a.tar": "-p N runs N commands at once",
    "tarjob -I {} -- true": "{} in the command is the item",
    "tarindex --jobs 4 a.tar": "-j N runs N at once",
    "tarcreate -f a.tar": "-o FILE is the tar to write",
    "tarshards cat -n 3 a.tar": "-c N takes the first N samples",
}
#: Lines of other programs that work.
WORK = {
    "targrep -l -w text a.tar": "s0 s1 s2",
    "targrep -c -w tex a.tar": "0",
    "targrep -c -wF 'ext 1' a.tar": "0",
    "targrep -c -wi TEXT a.tar": "3",
    "ls a.tar | tarcat -T - | targrep -c text": "3",
    "tarproc -P2 -c true a.tar | targrep -c text": "3",
    "printf 'a.tar\\0' | tarcat --null -T - | targrep -c text": "3",
}


@pytest.fixture
def shell(tmp_path, path_with_tools):
    """Return a function that runs a line of bash in a folder with a.tar."""
    lines = "for i in 0 1 2; do echo text $i >s$i.txt; done; tar -cf a.tar s?.txt"
    subprocess.run(lines, shell=True, cwd=tmp_path, check=True)

    def run(line: str) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": path_with_tools}
        command = ["bash", "-c", line]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    return run


@pytest.mark.parametrize("line", LINES)
def test_an_option_of_another_program_is_answered(shell, line):
    done = shell(line)
    assert (done.returncode, done.stdout) == (2, "")
    told = done.stderr.splitlines()[-1]
    assert told.startswith("Error: no such option -")
    assert LINES[line] in told


@pytest.mark.parametrize("line", WORK)
def test_lines_of_other_programs_that_work(shell, line):
    done = shell(line)
    assert (" ".join(done.stdout.split()), done.stderr) == (WORK[line], "")


def known_to(command: click.Command) -> set[str]:
    params = command.get_params(click.Context(command))
    return {name for param in params for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: f"{answer.tools} {answer.options}")
def test_an_answer_is_given_for_each_option_and_names_what_there_is(answer):
    known = {tool: known_to(command) for tool, command in tools().items() if tool in (answer.tools.split() or tools())}
    for option in answer.options.split():
        assert any(
            option not in names and answer_to(tool, option, names) == answer.instead for tool, names in known.items()
        ), option
    for line in re.findall("`[| ]*([^`]*)`", answer.instead):
        tool = shlex.split(line)[0]
        if tool in tools():
            assert options_of(line) <= known_to(tools()[tool]), line
