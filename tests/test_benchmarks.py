"""The benchmark suite stays usable: every peer's file is complete, and a small run of everything checks its results."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from programs import need

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FILES = sorted((BENCHMARKS / "peers").glob("[!_]*.py"))
sys.path.append(str(BENCHMARKS))

import chaos  # noqa: E402
import charts  # noqa: E402
import checks  # noqa: E402
import conformance  # noqa: E402
import cost  # noqa: E402
import environments  # noqa: E402
import figures  # noqa: E402
import measure  # noqa: E402
import quotes  # noqa: E402
import remote  # noqa: E402
import report  # noqa: E402
import results  # noqa: E402
import resumes  # noqa: E402
import run  # noqa: E402
import sets  # noqa: E402
import suite  # noqa: E402
import tables  # noqa: E402
import tokens  # noqa: E402
import wire  # noqa: E402

PEERS = ["cat", "datago", "datasets", "dali", "deeplake", "energon", "ffcv", "gnu_tar", "grain", "lance", "litdata"]
PEERS += ["ray", "simplejpeg", "spdl", "squirrel", "streaming", "tarfile", "torch_files", "torchvision", "webdataset"]
PEERS += ["tarshards", "tarshards_loader", "tarshards_python", "tarshards_rows", "tarshards_unindexed"]
SMOKE = ["stream", "arrays decode", "crop train", "random write index first", "resume", "faults"]  # tasks of a run each
files = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def test_every_peer_is_there():
    assert sorted(peer.name for peer in environments.all_peers()) == sorted(PEERS)


@files
def test_a_peer_does_every_task_or_says_why_not(path):
    peer = environments.read_peer(path)
    for task, function in environments.TASKS.items():
        assert function in peer.functions or {task, function} & peer.cannot.keys(), task
    assert "plain" in peer.functions or not {"stream", "arrays", "decode", "crop", "places"} & peer.functions
    assert "write" in peer.functions or not peer.own
    assert ("start" in peer.functions) == ("restore" in peer.functions)


@files
def test_a_peers_packages_are_of_exact_versions(path):
    for package in environments.read_peer(path).packages:
        assert re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.+]+", package)
        assert package == "torch==2.13.0" or not package.startswith("torch==")


@files
def test_a_peers_file_is_short_and_says_what_it_is(path):
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text))
    assert len(text.splitlines()) < 300


def test_every_reader_and_loader_of_the_tables_has_its_function():
    functions = [reader.function.partition(":")[::2] for reader in conformance.READERS.values()]
    functions += [(loader.file, "load") for loader in chaos.LOADERS.values() if loader.file]
    for file, function in functions:
        path = environments.READERS / f"{file}.py"
        assert file == "tarshards" or function in environments.read_peer(path).functions
    assert {file for file, _ in functions} == {"tarshards", *(path.stem for path in path.parent.glob("[!_]*.py"))}


def test_the_conformance_table_has_a_row_for_each_reader_and_ours_is_without_fault():
    told = conformance.kept()
    assert told.keys() == conformance.READERS.keys()
    cases = len(list(conformance.PAGE.parents[1].glob("spec/cases/*/expected.json")))
    assert told["tarshards"][0].split("|")[3:10] == [f" {cases} ", *["  "] * 6]


def test_the_chaos_table_has_a_row_for_each_loader_and_ours_is_without_fault():
    told = chaos.kept()
    assert told.keys() == chaos.LOADERS.keys()
    assert told["tarshards"][0].split("|")[7:13] == ["  "] * 6
    assert not told["tarshards"][1:]


def test_the_resume_matrix_has_a_row_for_each_loader_and_ours_is_without_fault():
    told = resumes.kept()
    assert told.keys() == resumes.PEERS.keys()
    assert [cell.strip() for cell in told["tarshards_"][0].split("|")[2:-1]] == ["yes"] * len(resumes.CELLS)


def test_every_program_is_in_reach_of_make_bench():
    programs = {
        path.stem
        for path in BENCHMARKS.glob("*.py")
        if re.search("^from measure import.*record", path.read_text(), re.M)
    }
    assert programs == {*run.PROGRAMS, "core"}


def test_rows_of_tokens_have_all_of_them(tmp_path):
    tokens.write_tarshards(tmp_path, 200)
    assert sum(tokens.read_tarshards(tmp_path)) == sum(map(len, tokens.documents(200)))
    packages = environments.read_peer(BENCHMARKS / "tokens.py").packages
    assert packages
    assert all("==" in package for package in packages)


def test_what_was_delivered_is_judged():
    assert checks.judge("stream", [3, 1, 2], [1, 2, 3]) == "yes"
    assert checks.judge("stream", [1, 2], [1, 2, 3]) == "wrong: 2 of 3, 1 lost"
    assert checks.judge("stream", [1, 2, 2], [1, 2, 3]) == "wrong: 3 of 3, 1 lost, 1 repeated"
    assert checks.judge("stream", [1, 2, 4], [1, 2, 3]) == "wrong: 3 of 3, 1 lost, 1 altered"
    assert checks.judge("random", [2, 1], [1, 2]) == "wrong: 2 of 2 places"


def test_a_part_of_an_epoch_is_judged_by_what_the_set_has():
    assert checks.judge_part([2, 1, 1], [1, 2]) == "yes"  # of a set of links, which has each sample several times
    assert checks.judge_part([2, 4], [1, 2]) == "wrong: 1 of 2"
    assert checks.judge_part([1], [1, 2]) == "wrong: 0 of 1"


def test_a_set_of_links_has_the_shards_of_another(tmp_path, monkeypatch):
    monkeypatch.setitem(sets.SETS, "raw-2k", ("raw", 40, sets.raw(10)))
    monkeypatch.setattr(checks, "LINKED", {"links": ("raw-2k", 3)})
    monkeypatch.setitem(sets.SETS, "links", ("raw", 120, sets.raw(10)))
    checks.make("links", tmp_path)
    data, entries = sets.data_of("links", tmp_path, "tarshards_rows")
    assert (data.count, len(data.urls), len(entries)) == (120, 12, 120)
    assert checks.reference(data) == entries
    assert all(Path(f"{url}.index").exists() for url in data.urls)


def test_images_are_judged_by_size_and_colour():
    known = [[0, 300, 400, 10.0, 20.0, 30.0], [1, 300, 400, 90.0, 80.0, 70.0]]
    close = [[1, 300, 400, 91.0, 80.0, 69.0], known[0]]
    assert checks.judge("decode", close, known) == "yes"
    assert checks.judge("decode", [close[0], [0, 300, 400, 30.0, 20.0, 10.0]], known) == "wrong: 1 of another colour"
    assert checks.judge("decode", [close[0], [0, 400, 300, 10.0, 20.0, 30.0]], known) == "wrong: 1 of another shape"
    cropped = [[0, 224, 224, 95.0, 75.0, 70.0], [1, 224, 224, 5.0, 25.0, 30.0]]
    assert checks.judge("crop", cropped, known) == "yes"
    assert checks.judge("crop", cropped[:1], known) == "wrong: 1 of 2, 1 lost"
    assert checks.judge("crop", [[i, 224, 224, 90.0, 80.0, 70.0] for i in (0, 1)], known).startswith(
        "wrong: mean colour"
    )


def test_the_best_of_a_peer_is_right_before_it_is_fast():
    rows = [
        {"peer": "a", "samples": 10, "seconds": [second], "checked": told}
        for second, told in ((1, "wrong: 1"), (2, "yes"))
    ]
    rows += [{"peer": "tarshards", "samples": 10, "seconds": [4], "checked": "yes"}]
    best = figures.bests(rows, "stream")
    assert [row["peer"] for row in best] == ["tarshards", "a"]
    assert best[1]["checked"] == "yes"
    assert figures.ratio(best[1], best, "stream") == 0.5


def row(peer: str, task: str, **settings: object) -> dict[str, object]:
    return {"peer": peer, "samples": 10, "seconds": [1], "checked": "yes", **settings}


def compared(task: str, *rows: dict[str, object]) -> dict[str, set[str]]:
    part = {"task": task, "set": "raw-2k", "rows": list(rows)}
    return {
        report.line_name(part, setting, view): {row["peer"] for row in rows}
        for setting, view, rows in figures.groups(part)
    }


def test_like_is_compared_with_like():
    ours = [
        row(name, "stream", shuffled=False, workers=0) for name in list(figures.FORMS) if name != "tarshards_loader"
    ]
    peers = [row(name, "stream", shuffled=False, workers=0) for name in ("webdataset", "litdata", "lance")]
    processes = [row(name, "stream", shuffled=False, workers=2) for name in ("tarshards", "webdataset", "ffcv")]
    assert compared("stream", *ours, *peers, *processes) == {
        "stream, raw-2k, in order": {"tarshards", "tarshards_unindexed", "webdataset", "litdata"},
        "stream, raw-2k, in order, rows": {"tarshards_rows", "lance", "ffcv"},
        "stream, raw-2k, in order, un-indexed": {"tarshards_unindexed", "webdataset"},
        "stream, raw-2k, in order, 2 processes": {"tarshards", "webdataset"},
    }
    cold = [
        row(name, "cold", shuffled=True, workers=0) for name in ("tarshards", "tarshards_rows", "cat", "webdataset")
    ]
    assert compared("cold", *cold) == {
        "cold, raw-2k, shuffled": {"tarshards", "cat", "webdataset"},
        "cold, raw-2k, shuffled, rows": {"tarshards_rows", "cat"},
    }
    trained = [row(name, "train", workers=2) for name in ("tarshards", "tarshards_loader", "ffcv", "webdataset")]
    assert compared("train", *trained) == {
        "train, raw-2k": {"tarshards", "ffcv", "webdataset"},
        "train, raw-2k, transforms in Python": {"tarshards_loader", "webdataset"},
    }


def test_every_decoder_of_a_peer_is_measured_and_the_best_is_compared():
    rows = [
        row("webdataset", "decode", decoder=name) | {"seconds": [s]} for name, s in (("Pillow", 4), ("simplejpeg", 2))
    ]
    best = figures.bests([row("tarshards", "decode", decoder="simplejpeg"), *rows], "decode")
    assert [figures.named(each) for each in best] == ["tarshards", "webdataset (simplejpeg)", "webdataset (Pillow)"]
    lines = report.summary([measured("decode", "photos256", best)], Path("none"))
    assert "| decode, photos256 | today | 10 | 2.0 |" in lines


def measured(task: str, name: str, rows: list[dict[str, object]]) -> dict[str, object]:
    return {"task": task, "set": name, "rows": rows, "versions": {}, "machine": "2 cores; today"}


def test_rows_that_were_not_measured_now_stay_in_the_summary(tmp_path):
    page = tmp_path / "RESULTS.md"
    for name in "raw-2k", "raw-110k":
        rows = [row("tarshards", "stream", shuffled=True), row("litdata", "stream", shuffled=True)]
        measure.put({"The suite at a glance": report.summary([measured("stream", name, rows)], page)}, page)
    assert [*results.glance(page)] == ["stream, raw-2k, shuffled", "stream, raw-110k, shuffled"]
    assert results.glance(page)["stream, raw-2k, shuffled"] == {
        "measured": "today",
        "tarshards": "10",
        "litdata": "1.00",
    }


def test_what_the_page_shows_is_measured():
    assert {*tables.parts()} <= {*suite.PARTS}
    assert tables.peers() <= {*PEERS}


def test_the_tables_of_the_page_are_those_of_the_results():
    text, known = tables.PAGE.read_text(), results.Results()
    for lines in (
        *(tables.table(head, known.summary) for head in tables.TABLES),
        *(tables.copied(head, known) for head in tables.COPIED),
        tables.behind(known.summary),
    ):
        assert len(lines) > 3
        assert "\n".join(lines) + "\n\n" in text, "python benchmarks/tables.py writes them"


def test_the_charts_are_those_of_the_results_and_each_is_shown():
    known, page = results.Results(), tables.PAGE.read_text()
    assert {path.stem for path in tables.IMAGES.iterdir()} == {*tables.CHARTS}
    for name in tables.CHARTS:
        drawn = tables.figure(name, known)
        assert (tables.IMAGES / f"{name}.svg").read_text() == drawn, "python benchmarks/tables.py writes them"
        assert f"](images/charts/{name}.svg)" in page
        assert len(ElementTree.fromstring(drawn).findall("{*}rect")) >= 3


def test_nothing_in_a_chart_is_wider_than_it():
    bars = [charts.Bar("a long name of a peer", 7, "1,234,567/s", True), charts.Bar("b", 1, "7 x", False)]
    drawn = ElementTree.fromstring(charts.chart("Title", bars, "Measured today."))
    assert drawn.get("width") == str(charts.WIDTH)
    for box in drawn.findall("{*}rect"):
        assert 0 < float(box.get("x")) + float(box.get("width")) < charts.WIDTH - 7 * len("7 x")


def test_bars_of_a_chart_are_rates_or_times():
    cells = {
        "measured": "today",
        "tarshards": "~1,000",
        "webdataset": "~4.0",
        "ffcv": "**0.80**",
        "litdata": "2 (wrong)",
    }
    assert tables.bars(cells) == [
        ("FFCV", 1250, "0.80 x", False),
        ("tarshards", 1000, "~1,000/s", True),
        ("webdataset", 250, "~4.0 x", False),
    ]
    assert tables.bars(cells | {"tarshards": "2.0 ms"}) == [
        ("FFCV", 1.6, "0.80 x", False),
        ("tarshards", 2, "2.0 ms", True),
        ("webdataset", 8, "~4.0 x", False),
    ]


def test_the_figures_of_readme_and_docs_are_those_of_the_results():
    known, used = results.Results(), set()
    for path in quotes.pages():
        text = path.read_text()
        assert quotes.quoted(text, known) == text, f"{path}: make bench ONLY=report writes them"
        names = [found["name"] for found in quotes.QUOTE.finditer(text)]
        assert len(names) == text.count("<!--figures:"), path
        used |= {*names}
    assert used == {*quotes.QUOTES}


def test_a_quote_has_the_cell_of_the_results_and_their_date(tmp_path):
    page = tmp_path / "RESULTS.md"
    lines = ["2 cores; 2026-01-02", "", "**few**", "", "| | rate |", "|---|---|", "| a | ~1,000 |", "", "**many**"]
    measure.put({"Tools": [*lines, "", "| | rate |", "|---|---|", "| a | 2 |"]}, page)
    known = results.Results(page)
    assert known.cell("Tools", "a", "rate") == "~1,000"
    assert results.number("~1,000") == 1000
    assert known.cell("Tools", "a", "rate", after="**many**") == "2"
    assert known.table("Tools", after="**few**") == [["", "rate"], ["a", "~1,000"]]
    assert known.date("Tools") == "2026-01-02"
    with pytest.raises(LookupError, match="no row 'b'"):
        known.cell("Tools", "b", "rate")


def test_rows_whose_rounds_differ_are_marked():
    assert (measure.about([9, 10, 12]), measure.about([9, 10, 12.1]), measure.about([7.9, 10, 11])) == ("", "~", "~")
    rows = [row("tarshards", "stream", cpu=[1]), row("litdata", "stream", cpu=[1]) | {"seconds": [1, 2, 2]}]
    assert report.table(rows, "stream")[3].startswith("| litdata | ~5 | 5 .. 10 |")
    summary = report.summary([measured("stream", "raw-2k", rows)], Path("none"))
    assert "| stream, raw-2k | today | 10 | ~2.0 |" in summary
    slower = {"stream, raw-2k": {"measured": "today", "tarshards": "10", "litdata": "**~0.50**"}}
    assert tables.behind(slower)[2].startswith("| stream, raw-2k | ~0.50 litdata |")
    assert [tables.times(cell) for cell in ("~2.0", "**~0.5**", "3 (wrong)")] == ["~2.0 x", "**~0.5 x**", ""]


def test_work_between_the_rounds_is_reported():
    rows = [
        row(name, "decode") | {"cpu": [1, 1], "outside": [0.03 * (name == "dali"), 0.03]} for name in ("ffcv", "dali")
    ]
    assert report.outside(rows)[0].endswith("in percent of that in them: dali 3 %.")
    assert report.outside(rows[:1]) == []


def test_costs_are_told_in_the_units_of_their_columns():
    spent = {"cpu": 2e-6, "parent": 1e-6, "waits": 0.002, "processes": 2, "threads": 3, "private": 4, "worker": 5}
    spent |= {"idle_cpu": 0.006, "idle_waits": 7, "rate": 1000}
    told = cost.row("ShardLoader", [spent, spent, spent | {"cpu": 9e-6}])
    assert told == "| ShardLoader | ~2.00 | 1.00 | 2.0 | 2 | 3 | 4 | 5 | 6 | 7.0 | 1,000 |"
    peers = {peer.name: peer for peer in environments.all_peers()}
    titles = [case.title(peers[case.peer]) for case in cost.CASES]
    assert len({*titles}) == len(titles)
    assert {"Stream", "ShardLoader, 2 workers", "litdata, 2 workers", "ffcv, 1 thread", "spdl, 2 threads"} <= {*titles}


def test_a_section_takes_the_place_of_its_title(tmp_path):
    page = tmp_path / "RESULTS.md"
    measure.put({"A": ["a"], "B": ["b"]}, page)
    measure.put({"C": ["c"], "B": ["d"]}, page, first=True)
    measure.put({"A": ["e"]}, page)
    assert page.read_text() == "# Results\n\nMade by `make bench`.\n\n## C\n\nc\n\n## B\n\nd\n\n## A\n\ne\n"


@pytest.mark.interop
def test_a_small_run_of_the_wire_delivers_what_is_right(tmp_path, monkeypatch):
    need(*wire.NEEDS)
    monkeypatch.setattr(remote, "ROOT", tmp_path)
    monkeypatch.setattr(wire, "READ", {1: 2, 2: 1})
    monkeypatch.setattr(wire, "ROUNDS", {1: 1, 2: 1})
    for name, (shards, samples, size) in {"large": (2, 100, 110 << 10), "small": (2, 200, 2048)}.items():
        monkeypatch.setitem(remote.SETS, name, (shards, samples, size))
    for name in ("tiny", *wire.SAMPLES):
        remote.make(name)
    told = "\n".join(wire.tables())
    assert "wrong" not in told
    ours = [client for client in wire.CLIENTS if client.startswith("tarshards")]
    for client in ("curl -Z, files", "curl -Z, ranges", *ours):
        rows = re.findall(rf"^\| {client}[^|]*\| ~?\d", told, re.MULTILINE)
        assert len(rows) >= 2 + 2 * (client in wire.MANY), told


@pytest.mark.interop
@pytest.mark.parametrize("tasks", SMOKE)
def test_a_small_run_of_the_suite_delivers_what_is_right(tasks):
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "run.py"), "smoke", *tasks.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-4000:]
    titles = {**report.TITLES, "faults": "What faults do"}
    for title in "The suite at a glance", *(titles[task] for task in tasks.split()):
        assert f"## {title}" in done.stdout
    assert "| tarshards | " in done.stdout


def test_the_small_runs_are_of_all_tasks_with_a_small_set():
    small = {task for task, name in suite.PARTS if name in suite.SMOKE}
    assert sorted(" ".join(SMOKE).split()) == sorted({*small, "faults"})
