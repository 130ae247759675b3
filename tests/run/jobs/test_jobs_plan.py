"""Items, placeholders, markers and tasks."""

from __future__ import annotations

import re
from pathlib import Path
from shlex import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tarshards.errors import StateError, UrlError
from tarshards.run.jobs.job_folder import JobFolder
from tarshards.run.jobs.job_plan import LONGEST_SCRIPT, PLACEHOLDER, TOOLS, Item, JobPlan, fill, group_tasks, make_plan
from tarshards.storage.markers import digest_of

SEED = ["tarproc", "-p", "16", "-c", "run-ocr *.png", "gs://g1000/scanned-{}.tar", "-o", "gs://g1000/ocr-{}.tar"]


def commands(plan: JobPlan) -> list[str]:
    return [" ".join(plan.arguments(item)) for item in plan.items]


def test_the_line_of_the_seed():
    plan = make_plan(SEED, ["{0000..0999}"])
    assert len(plan.tasks) == 1000
    assert plan.arguments(plan.items[7]) == [
        *("tarproc", "-p", "16", "-c", "run-ocr *.png"),
        *("gs://g1000/scanned-0007.tar", "-o", "gs://g1000/ocr-0007.tar"),
    ]
    assert plan.marker(plan.items[7]) == "gs://g1000/ocr-0007.tar.done"


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{}", "d/a.b.tar.gz"),
        ("{.}", "d/a.b"),
        ("{/}", "a.b.tar.gz"),
        ("{#}", "8"),
        ("{1}{2}", "d/a.b.tar.gzx.y/z"),
        ("{2.}{2/}", "x.y/zz"),
        ("{{}}", "{d/a.b.tar.gz}"),
        ("%06d {shard:06d} {a,b} ${x} {3}x"[:-5], "%06d {shard:06d} {a,b} ${x}"),
    ],
)
def test_placeholders(word, filled):
    assert fill(word, Item(7, ("d/a.b.tar.gz", "x.y/z"))) == filled


def test_lists_from_files_and_products_and_pairs(tmp_path):
    (tmp_path / "list").write_text("b\n# no\n\nc\n")
    sources = ["a", f"@{tmp_path}/list"], ["{1..2}", "{3..4}"]
    plan = make_plan(["cat", "{1}{2}"], [list(sources[0]), "{1..2}"], state="s")
    assert commands(plan) == ["cat a1", "cat a2", "cat b1", "cat b2", "cat c1", "cat c2"]
    plan = make_plan(["cat", "{1}{2}"], sources[1], zipped=True, state="s")
    assert commands(plan) == ["cat 13", "cat 24"]


def test_inputs_and_outputs_are_pairs():
    plan = make_plan(["cp", "{1}", "{2}"], inputs="in-{0..1}.tar", outputs="s3://b/out-{0..1}.tar")
    assert commands(plan) == ["cp in-0.tar s3://b/out-0.tar", "cp in-1.tar s3://b/out-1.tar"]
    assert [plan.marker(item) for item in plan.items] == ["s3://b/out-0.tar.done", "s3://b/out-1.tar.done"]


def test_a_line_of_bash_gets_quoted_items():
    plan = make_plan(["cat {} | wc -c"], [["a b", "c"]], state="s")
    assert [plan.arguments(item) for item in plan.items] == [
        ["bash", "-c", "cat 'a b' | wc -c"],
        ["bash", "-c", "cat c | wc -c"],
    ]


HOSTILE = "it's $(touch hit).tar"
DOUBLE_QUOTED = "test -f '{}' && cat \"{}\""


@pytest.mark.parametrize(
    ("command", "filled"),
    [
        ([DOUBLE_QUOTED], ["bash", "-c", "test -f ''{}'' && cat \"\"{}\"\""]),
        (["echo ${1} ${#} $# {#} {}"], ["bash", "-c", "echo ${1} ${#} $# 1 {}"]),
        (["echo", "${1}", "{}"], ["echo", "${1}", HOSTILE]),
        (["nice", "bash", "-c", "cat {}; echo ${1}"], ["nice", "bash", "-c", "cat {}; echo ${1}"]),
        (["tarproc", "-c", 'cp sample.txt "{}"', "{}"], ["tarproc", "-c", 'cp sample.txt ""{}""', HOSTILE]),
        (["tarproc", "--command=cp a {}", "{}"], ["tarproc", "--command=cp a {}", HOSTILE]),
        (["tarsplit", "--post", "cp {} x"], ["tarsplit", "--post", "cp {} x"]),
        (["wc", "-c", "{}"], ["wc", "-c", HOSTILE]),
        (["tarcat", "{}", "-o", "pipe:cat >x-{}"], ["tarcat", HOSTILE, "-o", "pipe:cat >x-{}"]),
        (['eval "x=$(printf %q {})"'], ["bash", "-c", 'eval "x=$(printf %q {})"']),
    ],
)
def test_a_value_is_quoted_for_the_shell_that_reads_it(command, filled):
    plan = make_plan(command, [[HOSTILE, "b"]], state="s")
    assert plan.arguments(plan.items[0]) == [word.replace("{}", quote(HOSTILE)) for word in filled]


@pytest.mark.parametrize(
    "command",
    [
        *(["echo `cat {}`"], ['x="${x:-{}}"; y'], ["echo $(( {} + 1 ))"], ["cat <<E\n{}\nE\n"], ["echo \\{}"]),
        *(["bash -c 'test -f {}'"], ['ssh host "cat {}"'], ['x=$(bash -c "cat {}")'], ["eval 'x={}'"]),
        *(["ssh", "host", "cat {}"], ["python3", "-c", "open('{}')"], ["perl", "-ne", "print '{}'"]),
        *(["tarcat x -o 'pipe:cat >{}'"], ["x=\"$(tarcat --output=pipe:'cat >'{})\""], ["awk", "/{}/", "a"]),
        *(["sed", "-i", "-e", "s/x/{}/", "a"], ["tarproc --command='cp a {}' b"]),
        *(["x='{} "], ['"$(case a in b) echo {};; esac)"'], ["(( x<<2 )); echo {}"]),
    ],
)
def test_a_value_that_would_be_code_is_refused(command):
    message = r"\$\(touch hit\).* cannot replace \{\} (in|after) .*: (begin the line with|pass)"
    with pytest.raises(ValueError, match=message):
        make_plan(command, [["a.tar", HOSTILE]], state="s")
    plan = make_plan(command, [["a.tar"]], state="s")
    assert plan.arguments(plan.items[0])[-len(command) :] == [word.replace("{}", "a.tar") for word in command]
    with pytest.raises(StateError, match=r"not a plan of tarjob: .* cannot replace"):
        JobPlan.loads(plan._replace(tasks=((Item(0, (HOSTILE,)),),)).dumps())


def test_a_long_word_is_searched_once_for_credentials():
    """It took hours where each of its letters began a search."""
    assert not JobPlan("a", ("a" * 1_000_000 + " ://?",), None, None, ()).has_credentials


@pytest.mark.parametrize("name", ["step.py", "step.sh"])
def test_a_script_counts_up_to_a_mebibyte(tmp_path, name):
    def code(text: str) -> str:
        (tmp_path / name).write_text(text)
        return make_plan([f"{tmp_path}/{name}", "{}"], [["a"]], state="s").code

    line = f"{'#' * 1023}\n"
    same = line * (LONGEST_SCRIPT // len(line))
    assert code(same + "x = 1\n") == code(same + "x = 2\n") != code("x = 2\n" + same)


def test_a_refusal_shows_no_credentials():
    with pytest.raises(ValueError, match="cannot replace") as caught:
        make_plan(["echo `cat {}`"], [["http://me:secret@host/a.tar?X-Amz-Signature=hidden"]], state="s")
    assert "http://host/a.tar" in str(caught.value)
    assert not re.search("secret|hidden", str(caught.value))


def test_the_base_name_of_a_file_is_no_command():
    plan = make_plan(["tarcat", "{}", "-o", "{/}", "x-{/}"], [["in/pipe:touch hit"]], state="s")
    assert plan.arguments(plan.items[0])[1:] == ["in/pipe:touch hit", "-o", "./pipe:touch hit", "x-pipe:touch hit"]


@pytest.mark.parametrize(
    ("command", "item"),
    [("tarcat '{}' -o \"x{/}\"; cat {} <<E\n{} `echo {}`\nE\n", "d/a.tar"), ("tarcat {} >out-{.}", "d/a b.tar")],
)
def test_markers_of_earlier_versions_are_still_valid(command, item):
    plan = make_plan([command], [[item]], state="s")
    line = PLACEHOLDER.sub(lambda match: quote(fill(match[0], plan.items[0])), command)
    assert plan.digest(plan.items[0]) == digest_of((item,), ["bash", "-c", line])


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["x", "{}", "-o", "out-{}"], "out-{}"),
        (["x", "{}", "--output=out-{}"], "out-{}"),
        (["x", "{}", "--output", "out-{}"], "out-{}"),
        (["x", "{}", "-o", "out"], None),
        (["x", "{}", "-o", "out-{}-%06d.tar"], None),
        (["x", "{}", "-o", "out-{}-{shard:06d}.tar"], None),
        (["x", "{}"], None),
    ],
)
def test_outputs_are_seen_in_the_command(command, output):
    assert make_plan(command, ["{0..3}"]).output == output
    assert make_plan(command, ["{0..3}"], state="s").output is None


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ([], {"sources": ["a"]}, "no command given"),
        (["x"], {"sources": ["a"]}, "the command has no {}"),
        (["x", "{2}"], {"sources": ["a"]}, "only 1 lists"),
        (["x", "{}"], {}, "give the items either by sources"),
        (["x", "{}"], {"sources": ["a"], "inputs": "a", "outputs": "b"}, "give the items either by sources"),
        (["x", "{}"], {"inputs": "{0..2}", "outputs": "{0..1}"}, "lists of 3 and 2 items"),
        (["x", "{}"], {"sources": ["{0..1}", "{0..2}"], "zipped": True}, "lists of 2 and 3 items"),
        (["x", "{1}", "-o", "{1}"], {"sources": ["{0..1}", "{0..2}"]}, "3 items would write 0"),
        (["x", "{}"], {"sources": ["{a,a}"], "state": "s"}, "2 items have the same command"),
        (["x", "{}"], {"sources": ["a"], "name": "Not_a_name"}, "is not a job name"),
    ],
)
def test_what_makes_no_sense(command, options, message):
    with pytest.raises(ValueError, match=message):
        make_plan(command, options.pop("sources", ()), **options)


def test_markers_are_of_item_and_command():
    first, second = (make_plan(["cat", word], ["{a,b}"], state="s/") for word in ("{}", "x{}"))
    markers = [plan.marker(item) for plan in (first, second) for item in plan.items]
    assert len(set(markers)) == 4
    assert markers[0].startswith("s/")
    assert markers[0].endswith(".done")


@given(st.lists(st.tuples(st.text(max_size=5), st.text(max_size=5)), min_size=1, max_size=5), st.integers(1, 3))
def test_plans_read_back(values, count):
    plan = JobPlan("n", ("cat", "{}"), None, "s", tuple((Item(i, pair),) for i, pair in enumerate(values)))
    plan = group_tasks(plan, count=count)
    assert JobPlan.loads(plan.dumps()) == plan


DAMAGED = make_plan(["cat", "{}"], [["a"]], state="s").dumps().encode().replace(b'"a"', b'"\xff"')


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"format": "tarjob-plan", "version": 9, "tasks": []}', "null", b"", DAMAGED]
)
def test_other_files_are_no_plans(text):
    with pytest.raises(StateError, match=r"x\.json: not a plan of tarjob"):
        JobPlan.loads(text, url="x.json")


def test_a_damaged_plan_of_a_job_is_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    JobFolder("a").save(make_plan(["cat", "{}"], [["a"]], state="s"), engine="local", options={}, parts=[])
    Path(JobFolder("a").plan_path).write_bytes(DAMAGED)
    with pytest.raises(StateError, match=r"plan\.json: not a plan of tarjob"):
        JobFolder("a").load()


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 7))
def test_groups_of_a_number_hold_every_item_once(sizes, count):
    plan = make_plan(["cat", "{}"], [[str(i) for i in range(len(sizes))]], state="s")
    for known in (sizes, []):
        tasks = group_tasks(plan, count=count, sizes=known).tasks
        assert sorted(item for task in tasks for item in task) == plan.items
        assert max(map(len, tasks)) <= count
        assert len(tasks) == -(-len(sizes) // count)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 500))
def test_groups_of_a_size_are_balanced(sizes, size):
    plan = make_plan(["cat", "{}"], [[str(i) for i in range(len(sizes))]], state="s")
    tasks = group_tasks(plan, size=size, sizes=sizes).tasks
    assert sorted(item for task in tasks for item in task) == plan.items
    weights = [sum(sizes[item.number] for item in task) for task in tasks]
    assert max(weights) - min(weights) <= max(sizes)


def test_groups_of_a_size_need_sizes():
    plan = make_plan(["cat", "{}"], ["{a,b}"], state="s")
    with pytest.raises(UrlError, match="sizes of the items are unknown"):
        group_tasks(plan, size=10, sizes=[1, None])


@pytest.mark.parametrize(
    ("words", "files"),
    [
        (["tarcat", "in-{}.tar", "-o", "out-{}.tar"], {"out-a.tar": True}),
        (["nice", "/opt/bin/tarcat", "in-{}.tar", "--output=out-{}.tar"], {"out-a.tar": True}),
        (["torchrun", "train.py", "in-{}.tar", "-o", "model-{}.pt"], {"model-a.pt": False}),
        (["tarcat in-{}.tar -o out-{}.tar; tarindex out-{}.tar"], {"out-a.tar": True}),
        (["tarcat {}>x; sort -o {}.txt <x | mine --output='my {}'"], {"a.txt": False, "my a": False}),
        (["cat {} | tarsort -o {}.sorted && mine -o {}.mine"], {"a.sorted": True, "a.mine": False}),
        (["tarsplit -o out-{}-%06d.tar in-{}.tar"], {}),
        (["tarcat in-{}.tar -o $HOME/out-{}.tar"], {}),
        (["tarcat in-{}.tar -o s3://b/out-{}.tar"], {"s3://b/out-a.tar": True}),
        (["mine in-{}.tar -o s3://b/out-{}.tar"], {}),
        (["tarcat in-{}.tar -o 'pipe:ssh host cat'"], {}),
        (["echo {} -o 'not closed"], {}),
    ],
)
def test_the_files_that_a_command_writes(words, files):
    plan = make_plan(words, ["a"], state="state")
    assert plan.files_of(plan.items[0]) == files
    assert plan.output is None, "markers are in the state, whatever the command writes"


def test_the_tools_that_replace_nothing_are_known():
    found = set()
    root = Path(__file__).parents[3]
    for tool in (root / "bin").iterdir():
        path = root / "tarshards/cli" / f"{tool.name}.py"
        if path.exists() and re.search(
            r"(output|pattern)_options|makes_files|writes_file\(click\.option", path.read_text()
        ):
            found.add(tool.name)
    assert {*found, "tarscat"} == TOOLS
