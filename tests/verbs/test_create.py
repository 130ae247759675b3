"""Plans, folders and lines become samples, and every mistake is reported with its location."""

from __future__ import annotations

import csv
import gzip
import io
import os
import subprocess
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from range_server import serving

from tarshards import read_samples, write_samples
from tarshards.errors import DecodeError, OpenError, SampleError, TarshardsError
from tarshards.samples.tree import FileTree
from tarshards.storage.location import Location
from tarshards.storage.remote import Remote
from tarshards.verbs import create
from tarshards.verbs.create import FieldSources, read_member_lines, read_plan, read_text
from tarshards.verbs.table import tabulate


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plain(samples):
    """The samples without their locations."""
    return [{name: value for name, value in sample.items() if name != "__url__"} for sample in samples]


def write(text: str | bytes, name: str = "plan.tsv") -> str:
    with open(name, "wb") as file:
        file.write(text.encode() if isinstance(text, str) else text)
    return name


# Plans


def test_a_plan_names_fields_and_files(folder):
    write(b"\xff\xd8", "a b.jpg")
    plan = write("__key__\t@jpg\tcls\ttxt\ns/0\ta b.jpg\t7\ttab\\there\n")
    assert plain(read_plan(plan)) == [{"__key__": "s/0", "jpg": b"\xff\xd8", "cls": b"7", "txt": b"tab\there"}]


def without_newline(data: bytes) -> bytes:
    """Return what a cell holds of *data*: the newline after a single printable line is left out."""
    line = data.removesuffix(b"\n").removesuffix(b"\r")
    return line if data.endswith(b"\n") and line.decode(errors="surrogateescape").isprintable() else data


@given(
    st.lists(st.tuples(st.binary(), st.binary() | st.sampled_from([b"\n", b"a\r\n", b"a\n\n", b"\xff\n"])), min_size=1)
)
def test_what_tar2tsv_writes_is_a_plan_that_gives_it_back(tmp_path_factory, rows):
    samples = [{"__key__": f"k{i}", "a": a, "seg.b": b} for i, (a, b) in enumerate(rows)]
    wanted = [{name: v if name == "__key__" else without_newline(v) for name, v in each.items()} for each in samples]
    path = tmp_path_factory.mktemp("plan") / "plan.tsv"
    path.write_text("".join(f"{line}\n" for line in tabulate(samples)), newline="")
    assert plain(read_plan(str(path))) == wanted


@given(st.lists(st.tuples(st.text(), st.text()), min_size=1))
def test_a_csv_plan_is_what_pythons_csv_writes(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("plan") / "plan.csv"
    text = io.StringIO()
    rows = [tuple(cell.replace("\r", "") for cell in row) for row in rows]
    csv.writer(text).writerows([("txt", "json"), *rows])
    path.write_text(text.getvalue(), newline="")
    assert [(s["txt"].decode(), s["json"].decode()) for s in read_plan(str(path), key="{record}")] == rows


def test_keys_are_made_of_the_record_and_the_columns(folder):
    plan = write("split\tcls\ntrain\t3\nval\t4\n")
    keys = [sample["__key__"] for sample in read_plan(plan, key="{split}/{record:04d}-{cls:>3}")]
    assert keys == ["train/0000-  3", "val/0001-  4"]


def test_a_key_template_reaches_no_attributes(folder):
    plan = write("txt\nx\n")
    for template in ("{txt.__class__}", "{txt[0]}", "{txt!r}", "{record:{txt}}", "{0}", "{}", "{other}"):
        with pytest.raises(SampleError, match=r"plan.tsv: line 1: .* is not among record, txt"):
            list(read_plan(plan, key=template))


def test_paths_are_relative_to_a_folder(folder):
    (folder / "data").mkdir()
    write("hello", "data/x")
    plan = write(f"__key__\t@a\t@b\t@c\ns\tx\tfile:x\tfile://{folder}/data/x\n")
    sample = {"__key__": "s", "a": b"hello", "b": b"hello", "c": b"hello"}
    assert plain(read_plan(plan, sources=FieldSources("data"))) == [sample]


def test_urls_are_sources_and_with_leave_commands_too(folder):
    import fsspec

    with fsspec.open("memory://plan/x", "wb") as file:
        file.write(b"there")
    plan = write("__key__\t@a\ns\tmemory://plan/x\n")
    assert next(read_plan(plan))["a"] == b"there"
    plan = write("__key__\t@a\ns\tpipe:echo there\n")
    assert next(read_plan(plan, sources=FieldSources(allow_pipe=True)))["a"] == b"there\n"
    with pytest.raises(OpenError, match=r"plan.tsv: line 2: pipe:echo there: a command runs only"):
        next(read_plan(plan))


def test_a_plan_may_be_compressed_and_have_windows_line_ends(folder):
    plan = write(gzip.compress("\ufeff__key__,txt\r\ns,hello\r\n".encode()), "plan.csv.gz")
    assert plain(read_plan(plan)) == [{"__key__": "s", "txt": b"hello"}]
    plan = write("__key__\ttxt\r\ns\thello\r\n")
    assert plain(read_plan(plan)) == [{"__key__": "s", "txt": b"hello"}]


def test_a_plan_is_read_row_by_row(folder):
    os.mkfifo("rest")
    samples = read_plan(Location("pipe:printf '__key__\\ttxt\\na\\tb\\n'; cat rest", allow_pipe=True))
    assert next(samples)["txt"] == b"b"
    with open("rest", "wb") as rest:  # not before the first sample was seen
        rest.write(b"last\tone\n")
    assert [sample["__key__"] for sample in samples] == ["last"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "plan.tsv: the plan is empty"),
        ("txt\nx\n", "plan.tsv: line 1: no column __key__"),
        ("__key__\ttxt\ttxt\n", "plan.tsv: line 1: two columns are named txt"),
        ("__key__\ttxt\t@txt\n", "plan.tsv: line 1: two columns are named txt"),
        ("__key__\tTXT\n", "plan.tsv: line 1: 'TXT' cannot name a field"),
        ("__key__\t\n", "plan.tsv: line 1: '' cannot name a field"),
        ("__key__\t__url__\n", "plan.tsv: line 1: '__url__' cannot name a field"),
        ("__key__\trecord\n", "plan.tsv: line 1: a column cannot be named record"),
        ("__key__\ttxt\na\tb\na\n", "plan.tsv: line 3: 1 cells for 2 columns"),
        ("__key__\ttxt\na\tb\n\n", "plan.tsv: line 3: 1 cells for 2 columns"),
        ("__key__\ttxt\na\tb\nb\tc\na\td\n", "plan.tsv: line 4: a: duplicate key"),
        ("__key__\ttxt\na.b\tc\n", "plan.tsv: line 2: a.b.txt: the name"),
        ("__key__\ttxt\n\tc\n", "plan.tsv: line 2: .txt: the name"),
        ("__key__\na\n", "plan.tsv: line 2: a: a sample without fields cannot be written"),
        ("__key__\ttxt\na\tC:\\dir\n", "plan.tsv: line 2: \\d in"),
        ("__key__\t@txt\na\tmissing\n", "plan.tsv: line 2: missing: No such file"),
        ("__key__\t@txt\na\t.\n", "plan.tsv: line 2: .: Is a directory"),
        ("__key__\t@txt\na\t\n", "plan.tsv: line 2: an empty path"),
        ("__key__\t@txt\na\tgs3://x\n", "plan.tsv: line 2: gs3://x: unknown scheme"),
        (b"__key__\ttxt\na\t\xff\n", "plan.tsv: line 2: not UTF-8"),
    ],
)
def test_mistakes_in_a_plan_are_told_with_their_line(folder, text, message):
    with pytest.raises(TarshardsError) as caught:
        list(read_plan(write(text)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_open_quote_is_told_with_the_line_where_its_row_begins(folder):
    plan = write('__key__,txt\na,"two\nlines"\nb,"open\nuntil\nthe end', "plan.csv")
    samples = read_plan(plan)
    assert next(samples)["txt"] == b"two\nlines"
    with pytest.raises(SampleError, match=r"^plan.csv: line 4: unexpected end of data"):
        next(samples)


def test_cells_of_csv_are_of_any_size_and_blank_lines_are_no_rows_of_it(folder):
    assert next(read_plan(write(f"__key__,txt\na,{'x' * 200_000}\n", "plan.csv")))["txt"] == b"x" * 200_000
    for text, message in [
        ("__key__,txt\na,b\n\n", "line 3: 0 cells for 2 columns"),
        ('__key__,txt\n"a"b,c\n', "line 2: ',' expected"),
        (b"__key__,txt\na,\xff\n", "line 2: not UTF-8"),
    ]:
        with pytest.raises(TarshardsError, match=rf"^plan\.csv: {message}"):
            list(read_plan(write(text, "plan.csv")))


def test_a_format_that_does_not_fit_is_told_before_any_row_is_read(folder):
    plan = write("txt\nx\n")
    with pytest.raises(SampleError, match=r"^plan.tsv: line 1: "):
        list(read_plan(plan, key="{txt:03d}"))


# Folders


def make_tree(*names: str) -> None:
    for name in names:
        os.makedirs(os.path.dirname(name) or ".", exist_ok=True)
        write(f"content of {name}", name)


TREE = [
    "tree/a.jpg",
    "tree/a.cls",
    "tree/a-b.jpg",
    "tree/b.c/z.seg.png",
    "tree/b.c/z.JPG",
    "tree/B/0.jpg",
    "tree/ü/10.jpg",
    "tree/ü/9.jpg",
    "tree/a/x.jpg",
    "tree/b.jpg",
]


def test_a_tree_is_what_gnu_tar_makes_of_it(folder):
    make_tree(*TREE)
    subprocess.run(
        "tar -cf - --sort=name -C tree . >all.tar", shell=True, check=True, env={**os.environ, "LC_ALL": "C"}
    )
    expected = [{**sample, "__key__": sample["__key__"].removeprefix("./")} for sample in read_samples("all.tar")]
    assert plain(FileTree("tree").read()) == plain(expected)


def test_files_of_one_key_are_together_whatever_stands_between_them(folder):
    make_tree("tree/a.cls", "tree/a.d/x.jpg", "tree/a.jpg")
    assert [sorted(sample) for sample in plain(FileTree("tree").read())] == [
        ["__key__", "cls", "jpg"],
        ["__key__", "jpg"],
    ]


def test_the_same_tree_gives_the_same_bytes(folder):
    make_tree(*TREE)
    write_samples(FileTree("tree").read(), "1.tar")
    os.rename("tree", "old")
    make_tree(*reversed(TREE))
    write_samples(FileTree("tree").read(), "2.tar")
    assert (folder / "1.tar").read_bytes() == (folder / "2.tar").read_bytes()


def test_what_is_no_part_of_a_sample_is_counted(folder):
    make_tree(
        "tree/a.jpg", "tree/README", "tree/LICENSE", "tree/.hidden.jpg", "tree/.git/b.jpg", "tree/__pycache__/c.jpg"
    )
    os.symlink(".", "tree/loop")
    os.mkfifo("tree/f.jpg")
    skipped: Counter[str] = Counter()
    assert [sample["__key__"] for sample in FileTree("tree").read(skipped=skipped)] == ["a"]
    assert skipped == {
        "files without an extension": 2,
        "hidden files": 1,
        "hidden folders": 2,
        "links to folders": 1,
        "files that are not regular": 1,
    }


def test_missing_fields_fail_or_are_skipped_or_ignored(folder):
    make_tree("tree/a.jpg", "tree/a.cls", "tree/b.png", "tree/c.cls", "tree/c.txt", "tree/d.txt")
    with pytest.raises(SampleError, match=r"^tree: b: no file for cls$"):
        list(FileTree("tree").read(fields="jpg;png cls"))
    skipped: Counter[str] = Counter()
    samples = FileTree("tree").read(fields="jpg;png cls", missing="skip", skipped=skipped)
    assert [sorted(sample) for sample in plain(samples)] == [["__key__", "cls", "jpg"]]
    assert skipped == {
        "samples without cls": 1,
        "samples without jpg or png": 1,
        "samples without any of the fields": 1,
    }
    samples = plain(FileTree("tree").read(fields="jpg;png cls", missing="ignore"))
    assert [sorted(sample) for sample in samples] == [["__key__", "cls", "jpg"], ["__key__", "png"], ["__key__", "cls"]]


def test_classes_are_the_numbers_of_the_sorted_folders(folder):
    make_tree("tree/dog/x/1.jpg", "tree/cat/2.jpg", "tree/Zebra/3.jpg", "tree/.ipynb_checkpoints/4.jpg")
    assert FileTree("tree").classes() == {"Zebra": 0, "cat": 1, "dog": 2}
    samples = plain(FileTree("tree").read(fields="jpg cls", class_field="cls"))
    assert {sample["__key__"]: sample["cls"] for sample in samples} == {"Zebra/3": b"0", "cat/2": b"1", "dog/x/1": b"2"}


def test_the_class_may_be_the_only_field(folder):
    make_tree("tree/dog/1.jpg", "tree/cat/2.jpg")
    samples = plain(FileTree("tree").read(fields="cls", class_field="cls"))
    assert samples == [{"__key__": "cat/2", "cls": b"0"}, {"__key__": "dog/1", "cls": b"1"}]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tree/x.jpg"], "tree: x: not in a folder"),
        (["tree/a/x.jpg", "tree/a/x.cls"], "tree: a/x.cls: a file for this field exists already"),
        (["tree/a.jpg", "tree/a.JPG"], "tree: a.jpg: tree/a.JPG and tree/a.jpg are the same field"),
    ],
)
def test_mistakes_in_a_tree(folder, names, message):
    make_tree(*names)
    with pytest.raises(SampleError) as caught:
        list(FileTree("tree").read(class_field="cls"))
    assert message in str(caught.value)


def test_a_tree_that_cannot_be_read(folder):
    with pytest.raises(OpenError, match=r"^missing: No such file"):
        list(FileTree("missing").read())
    os.mkdir("tree")
    os.symlink("nowhere", "tree/a.jpg")
    with pytest.raises(OpenError, match=r"^tree/a.jpg: No such file"):
        list(FileTree("tree").read())
    with pytest.raises(ValueError, match="missing is fail, skip, ignore"):
        FileTree("tree").read(missing="never")


# Lines


def test_lines_of_names_and_sources(folder):
    write("hello", "x")
    write("spaced", "a file")
    lines = write("a/0.txt x\na/0.raw text: tab\\t\\n\n\nb.TXT\tfile:a file\nc.txt pipe:echo $((6 * 7))\n", "lines")
    assert plain(read_member_lines(lines, sources=FieldSources(allow_pipe=True))) == [
        {"__key__": "a/0", "txt": b"hello", "raw": b" tab\t\n"},
        {"__key__": "b", "txt": b"spaced"},
        {"__key__": "c", "txt": b"42\n"},
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.txt\n", "lines: line 1: a line must be NAME SOURCE, not 'a.txt'"),
        ("README text:x\n", "lines: line 1: 'README' has no key and field"),
        ("a.txt text:x\na.TXT text:y\n", "lines: line 2: a.txt: duplicate field"),
        ("a.txt text:x\nb.txt text:y\na.jpg text:z\n", "lines: line 3: a: duplicate key"),
        ("a.txt pipe:true\n", "lines: line 1: pipe:true: a command runs only"),
        ("a.txt missing\n", "lines: line 1: missing: No such file"),
        ("a.txt text:\\q\n", "lines: line 1: \\q in"),
    ],
)
def test_mistakes_in_lines(folder, text, message):
    with pytest.raises(TarshardsError) as caught:
        list(read_member_lines(write(text, "lines")))
    assert message in str(caught.value)


# Text


def test_lines_of_text_are_samples(folder):
    write("one\n\n two\t\n", "1.txt")
    write("three", "2.txt")
    samples = plain(read_text("{1,2}.txt"))
    assert [sample["txt"] for sample in samples] == [b"one", b"", b" two\t", b"three"]
    assert [sample["__key__"] for sample in samples] == [f"{i:09d}" for i in range(4)]
    assert plain(read_text("2.txt", field="seg.json", key="k{record}")) == [{"__key__": "k0", "seg.json": b"three"}]


def test_text_that_is_not_utf8_is_told_with_its_line(folder):
    write(b"one\n\xe9t\xe9\n", "a.txt")
    with pytest.raises(DecodeError, match=r"^a.txt: line 2: not UTF-8$"):
        list(read_text("a.txt"))
    with pytest.raises(SampleError, match=r"^a.txt: line 2: k: duplicate key$"):
        list(read_text(write("one\ntwo\n", "a.txt"), key="k"))


# Many URLs


@pytest.fixture
def site(folder):
    with serving(folder) as site:
        yield site


def plan_of(site, count: int, dead: set[int] = frozenset()) -> str:
    """A plan of files on a server, without those that are *dead*."""
    for i in set(range(count)) - set(dead):
        write(f"{i}" * (1 + i % 3), f"{i}.txt")
    return write("__key__\t@txt\n" + "".join(f"{i:03d}\t{site.url}/{i}.txt\n" for i in range(count)))


@pytest.mark.parametrize("kind", ["plan", "lines"])
def test_urls_are_fetched_at_once_and_samples_come_in_order(site, kind):
    plan = plan_of(site, 60)
    expected = [{"__key__": f"{i:03d}", "txt": (f"{i}" * (1 + i % 3)).encode()} for i in range(60)]
    site.hold = 0.02
    if kind == "plan":
        samples = read_plan(plan)
    else:
        samples = read_member_lines(write("".join(f"{i:03d}.txt {site.url}/{i}.txt\n" for i in range(60)), "lines"))
    assert plain(samples) == expected
    assert site.rounds < 20, "rounds of requests that were sent at once"


def test_what_is_fetched_ahead_fits_into_the_memory_for_it(site, monkeypatch):
    plan = plan_of(site, 30)
    monkeypatch.setattr(create, "Remote", lambda: Remote(ahead=1))
    samples = read_plan(plan)
    for taken in range(1, 30):
        next(samples)
        assert site.asked(".txt") <= max(taken + 1, create.FIRST_AHEAD + 1)
    assert len(list(samples)) == 1


@pytest.mark.parametrize("dead", [{0}, {3, 17}, set(range(20))])
def test_dead_urls_are_left_out_in_order_and_all_others_are_read(site, dead):
    plan, errors = plan_of(site, 20, dead), []
    samples = list(read_plan(plan, on_error=errors.append))
    assert [int(sample["__key__"]) for sample in samples] == sorted(set(range(20)) - dead)
    assert [str(error).partition(f"{site.url}/")[2] for error in errors] == [
        f"{i}.txt: 404 Not Found" for i in sorted(dead)
    ]
    assert all(str(error).startswith(f"plan.tsv: line {i + 2}: ") for i, error in zip(sorted(dead), errors))
    with pytest.raises(OpenError, match=rf"^plan.tsv: line {min(dead) + 2}: .*404 Not Found"):
        list(read_plan(plan))


def test_rows_of_files_and_urls_mixed_keep_their_order(site):
    plan_of(site, 12)
    names = [f"{site.url}/{i}.txt" if i % 5 else f"{i}.txt" for i in range(12)]
    plan = write("__key__\t@txt\n" + "".join(f"{i:03d}\t{name}\n" for i, name in enumerate(names)))
    assert [int(sample["txt"][: len(str(i))]) for i, sample in enumerate(read_plan(plan))] == list(range(12))


def test_a_plan_of_which_only_the_first_rows_are_taken(site):
    samples = read_plan(plan_of(site, 60))
    assert next(samples)["__key__"] == "000"
    samples.close()
    assert site.asked(".txt") <= create.FIRST_AHEAD + 2


def test_tarcreate_of_many_urls_some_of_them_dead(site, path_with_tools):
    plan_of(site, 100, {4, 50, 51, 99})
    environment = {**os.environ, "PATH": path_with_tools}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["bash", "-c", line], env=environment, capture_output=True, text=True, timeout=100)

    done = run("tarcreate -q plan.tsv -o out.tar")
    assert (done.returncode, os.path.exists("out.tar")) == (1, False)
    assert done.stderr == f"tarcreate: plan.tsv: line 6: {site.url}/4.txt: 404 Not Found\n"
    done = run("tarcreate -q plan.tsv -o out.tar --max-errors 3")
    assert (done.returncode, os.path.exists("out.tar")) == (1, False)
    assert done.stderr.startswith("tarcreate: 4 errors, but --max-errors allows 3; the first: plan.tsv: line 6: ")
    for option in ("--max-errors 4", "--on-error skip"):
        done = run(f"tarcreate -q plan.tsv -o out.tar --overwrite {option}")
        assert done.returncode == 0, done.stderr
        assert "delivered       96 samples" in done.stderr
        assert done.stderr.count("404 Not Found") == 4
        assert len(list(read_samples("out.tar"))) == 96
