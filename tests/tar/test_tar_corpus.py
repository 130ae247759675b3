"""Archives by GNU tar, bsdtar, git and Python's tarfile, read as those programs read them."""

import os
import tarfile
from itertools import product

import pytest
from soak import some
from tar_corpus import Drip, entry, pax, program, read, read_whole, tarfile_archive, tarfile_members

from tarshards.tar.read import BLOCK, END, MAX_END


def path_of(length, folder):
    """Return a path of *length* bytes in *folder*, its components short enough for a file system."""
    rest = length - len(folder) - len("/.txt")
    parts = []
    while rest > 100:
        parts.append("d" * 79)
        rest -= 80
    return "/".join([folder, *parts, "f" * rest + ".txt"])


FILES = {
    "short/a.cls": b"7",
    "short/a.jpg": bytes(range(256)) * 3,
    "short/b.cls": b"",
    "short/b.jpg": bytes(512),
    "short/b.txt": b"\n" * 513,
    "short/c d 'e' \"f\" $g.txt": b"a name to be quoted",
    **{path_of(length, "names"): b"%d" % length for length in (98, 99)},
    **{path_of(length, "n100"): b"%d" % length for length in (100,)},
    **{path_of(length, "ustar"): b"%d" % length for length in (101, 150, 180)},
    "ustar/" + "p" * 60 + "/" + "p" * 88 + "/" + "n" * 100: b"a full prefix and a full name",
    **{path_of(length, "long"): b"%d" % length for length in (256, 257, 512, 1000)},
    "utf8/é.txt": b"Latin",
    "utf8/日本語.jpg": b"CJK",
    "utf8/" + "ü" * 90 + ".txt": b"long, too",
    os.fsdecode(b"latin/\xe9\xff.txt"): b"not UTF-8",
    "latin/\\": b"a name that listings show otherwise",
}
EVERYWHERE = ["short", "names"]
USTAR = [*EVERYWHERE, "n100", "ustar"]
ALL = [*USTAR, "long", "utf8", "latin"]
LINKS = [*EVERYWHERE, "links"]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder with files of many kinds and names."""
    folder = tmp_path_factory.mktemp("tree")
    for name, data in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, (1, 1234567890.5))
    links = folder / "links"
    (links / "empty folder").mkdir(parents=True)
    (links / "one.txt").write_bytes(b"two names")
    os.link(links / "one.txt", links / "two.txt")
    (links / "short.txt").symlink_to("one.txt")
    (links / "long.txt").symlink_to("../" * 60 + "one.txt")
    os.mkfifo(links / "fifo")
    (folder / "sparse").mkdir()
    for name, step, size in [("holes", 1 << 18, 1 << 22), ("many", 1 << 14, 1 << 20), ("end", 1 << 19, 600_000)]:
        with open(folder / "sparse" / f"{name}.bin", "wb") as file:
            for at in range(0, size, step):
                file.seek(at)
                file.write(b"island")
            file.truncate(size)
    with open(folder / "sparse" / "hole.bin", "wb") as file:
        file.truncate(1 << 19)
    return folder


@pytest.fixture(scope="module")
def gnu(tree):
    """GNU tar, run in the tree."""
    run = program("tar")
    return lambda *arguments: run(*arguments, cwd=tree)


@pytest.fixture(scope="module")
def bsd(tree):
    """bsdtar, run in the tree."""
    run = program("bsdtar")
    return lambda *arguments: run(*arguments, cwd=tree)


def listed_by_gnu(path):
    """The names of the regular files, as bytes."""
    lines = program("tar")("-tvif", path, "--quoting-style=literal", "--full-time", "--numeric-owner").splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if line.startswith((b"-", b"C"))]


def listed_by_bsd(path):
    lines = program("bsdtar")("-tvf", path, "--options=read_concatenated_archives").splitlines()
    return [line.split(maxsplit=8)[8] for line in lines if line.startswith(b"-")]


def assert_read_as_the_oracles_do(path, **options):
    members = read_whole(path.read_bytes(), **options)
    assert members == tarfile_members(path)
    plain = [member for member in members if not is_link(path, member)]
    names = [os.fsencode(member.name) for member in plain]
    assert names == listed_by_gnu(path)
    data = b"".join(member.data for member in plain)
    assert data == program("tar")("-xOif", path)
    if all(name.isprintable() and "\\" not in name for name, _, _ in plain):
        assert names == listed_by_bsd(path)
        assert data == program("bsdtar")("-xOf", path, "--options=read_concatenated_archives")
    return members


def is_link(path, member):
    with tarfile.open(path, "r:", encoding="utf-8", errors="surrogateescape", ignore_zeros=True) as archive:
        return any(info.offset == member.offset and (info.issym() or info.islnk()) for info in archive)


def names_in(*folders):
    return sorted(name for name in FILES if name.startswith(tuple(f"{folder}/" for folder in folders)))


@pytest.mark.parametrize(
    ("format", "folders"),
    [("v7", EVERYWHERE), ("ustar", USTAR), ("oldgnu", ALL), ("gnu", ALL), ("pax", ALL), ("posix", ALL)],
)
@pytest.mark.parametrize("blocking", [1, 20])
def test_gnu_tar(gnu, tmp_path, format, folders, blocking):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"--format={format}", f"-b{blocking}", "--sort=name", *folders)
    members = assert_read_as_the_oracles_do(path)
    assert sorted(member.name for member in members) == names_in(*folders)
    assert {member.name: member.data for member in members}.items() <= FILES.items()


@pytest.mark.parametrize(
    ("format", "folders"), [("v7", EVERYWHERE), ("ustar", USTAR), ("gnutar", ALL), ("pax", ALL), ("pax", USTAR)]
)
def test_bsdtar(bsd, tmp_path, format, folders):
    path = tmp_path / "a.tar"
    # bsdtar cannot convert a name that is not UTF-8 to pax, and says so.
    folders = [folder for folder in folders if folder != "latin"]
    bsd("-cf", path, f"--format={format}", *folders)
    members = assert_read_as_the_oracles_do(path)
    assert {member.name: member.data for member in members} == {name: FILES[name] for name in names_in(*folders)}


@pytest.mark.parametrize(
    ("format", "folders"), [(tarfile.USTAR_FORMAT, USTAR), (tarfile.GNU_FORMAT, ALL), (tarfile.PAX_FORMAT, ALL)]
)
def test_tarfile(tree, tmp_path, format, folders):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=format) as archive:
        for folder in folders:
            archive.add(tree / folder, folder)
    members = assert_read_as_the_oracles_do(path)
    assert {member.name: member.data for member in members} == {name: FILES[name] for name in names_in(*folders)}


def extracted(archive, folder):
    """Let GNU tar extract an archive, and read the files and links that it made."""
    folder.mkdir()
    program("tar")("-xf", archive, "-C", folder)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*")}
    return {name: path.read_bytes() for name, path in files.items() if path.is_file()}


@pytest.mark.parametrize("format", ["v7", "ustar", "gnu", "pax"])
def test_links_have_the_content_of_their_targets(gnu, tmp_path, format):
    path = tmp_path / "a.tar"
    fifo = ["--exclude=links/fifo"] if format == "v7" else []
    gnu("-cf", path, f"--format={format}", "--sort=name", "--exclude=links/long.txt", *fifo, *LINKS)
    members = assert_read_as_the_oracles_do(path)
    assert {member.name: member.data for member in members} == extracted(path, tmp_path / "out")
    links = [member for member in members if member.name.startswith("links/")]
    assert {name: data for name, data, _ in links} == dict.fromkeys(
        ["links/one.txt", "links/two.txt", "links/short.txt"], b"two names"
    )
    assert read(path.read_bytes()).skipped == {"directory": 4, **({} if fifo else {"fifo": 1})}


@pytest.mark.parametrize("format", ["ustar", "gnutar", "pax"])
def test_links_by_bsdtar(bsd, tmp_path, format):
    path = tmp_path / "a.tar"
    bsd("-cf", path, f"--format={format}", "--exclude=links/long.txt", *LINKS)
    members = assert_read_as_the_oracles_do(path)
    assert {member.name: member.data for member in members} == extracted(path, tmp_path / "out")
    assert read(path.read_bytes()).skipped["fifo"] == 1


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_a_link_out_of_the_archive_has_no_content(gnu, tmp_path, format):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"--format={format}", "--sort=name", "links")
    reading = read(path.read_bytes())
    target = "../" * 60 + "one.txt"
    assert reading.error.reason == f"'links/long.txt': symbolic link to {target!r}, which is not in the archive"
    assert [member.name for member in reading.members] == []


def test_devices_are_passed_over_and_counted():
    archive = entry(kind=b"3") + entry(kind=b"4") + entry(b"1") + END
    assert read(archive).skipped == {"character device": 1, "block device": 1}
    assert [member.data for member in read_whole(archive)] == [b"1"]


@pytest.mark.parametrize("format", ["gnu", "pax", "ustar"])
def test_appended(gnu, tmp_path, format):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"--format={format}", "short")
    gnu("--append", "-f", path, f"--format={format}", "names", "n100")
    members = assert_read_as_the_oracles_do(path)
    assert sorted(member.name for member in members) == names_in("short", "names", "n100")


@pytest.mark.parametrize("format", ["gnu", "pax", "ustar"])
def test_concatenated_by_tar(gnu, tmp_path, format):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    gnu("-cf", path, f"--format={format}", "short")
    gnu("-cf", other, f"--format={format}", "names", "n100")
    gnu("--concatenate", "-f", path, other)
    members = assert_read_as_the_oracles_do(path)
    assert sorted(member.name for member in members) == names_in("short", "names", "n100")
    gnu("--concatenate", "-f", path, other, other)  # between these two it leaves zeros
    assert len(assert_read_as_the_oracles_do(path, concatenated=True)) == len(members) + 2 * len(
        names_in("names", "n100")
    )


@pytest.mark.parametrize("formats", [("gnu", "pax", "ustar"), ("pax", "pax"), ("v7", "gnu")])
def test_concatenated_by_cat(gnu, tmp_path, formats):
    path, part = tmp_path / "a.tar", tmp_path / "part.tar"
    for format in formats:
        gnu("-cf", part, f"--format={format}", "short")
        with open(path, "ab") as file:
            file.write(part.read_bytes())
    members = assert_read_as_the_oracles_do(path, concatenated=True)
    assert len(members) == len(formats) * len(names_in("short"))
    assert read(path.read_bytes(), concatenated=True).joined == len(formats) - 1
    assert_refused_where_gnu_stops(path)


def assert_refused_where_gnu_stops(path):
    """Without the word, reading fails where GNU tar without -i ends."""
    reading = read(path.read_bytes())
    assert "members after the end of the archive" in reading.error.reason
    listed = program("tar")("-tf", path, "--quoting-style=literal").splitlines()
    assert [os.fsencode(member.name) for member in reading.members] == [name for name in listed if name[-1:] != b"/"]


def programs_archive(gnu, bsd, tree, path, writer):
    """Let *writer* archive some files of *tree* in *path*."""
    if writer == "tarfile":
        with tarfile.open(path, "w") as archive:
            archive.add(tree / "short", "short")
    elif writer == "bsdtar":
        bsd("-cf", path, "short")
    else:
        gnu("-cf", path, f"-b{writer}", "short")


WRITERS = [1, 2, 20, 64, 128, "bsdtar", "tarfile"]


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second"), some([*product(WRITERS, [1, 128, "bsdtar", "tarfile"])], 3))
def test_each_archive_may_end_as_its_program_pads_it(gnu, bsd, tree, tmp_path, first, second):
    path, other = tmp_path / "a.tar", tmp_path / "b.tar"
    programs_archive(gnu, bsd, tree, path, first)
    programs_archive(gnu, bsd, tree, other, second)
    for each in path, other:
        assert len(assert_read_as_the_oracles_do(each)) == len(names_in("short"))
    path.write_bytes(path.read_bytes() + other.read_bytes())
    assert len(assert_read_as_the_oracles_do(path, concatenated=True)) == 2 * len(names_in("short"))
    assert_refused_where_gnu_stops(path)


@pytest.mark.parametrize("blocking", [1, 20, 128])
def test_any_size_of_data_may_precede_the_padding(gnu, tmp_path, blocking):
    paddings = []
    for blocks in {1, blocking - 3, blocking - 2, blocking - 1, blocking} - {-2, -1, 0}:
        (tmp_path / "x.bin").write_bytes(b"x" * BLOCK * blocks)
        gnu("-cf", tmp_path / "a.tar", f"-b{blocking}", "-C", tmp_path, "x.bin")
        archive = (tmp_path / "a.tar").read_bytes()
        paddings.append(len(archive) - len(archive.rstrip(b"\0")))
        assert len(read_whole(archive)) == 1
    assert max(paddings) == BLOCK * max(2, blocking + 1) <= MAX_END


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_a_volume_label_is_no_member(gnu, tmp_path, format):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"--format={format}", "-V", "the label", "short")
    members = assert_read_as_the_oracles_do(path)
    assert sorted(member.name for member in members) == names_in("short")
    assert read(path.read_bytes()).skipped.get("volume label", 0) == (format == "gnu")


@pytest.mark.parametrize("blocking", [1, 20, 40])
def test_an_archive_of_nothing_has_no_members(gnu, bsd, tmp_path, blocking):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"-b{blocking}", "-T", os.devnull)
    reading = read(path.read_bytes())
    assert reading.members == []
    # Others may be a shard that was overwritten with zeros.
    assert (reading.error is None) == (blocking != 40)
    bsd("-cf", path, "-T", os.devnull)
    assert (read(path.read_bytes()).error is None) == (path.stat().st_size in (len(END), 10240))


@pytest.mark.parametrize("format", ["gnu", "pax"])
def test_an_incremental_dump_s_folders_are_passed_over_with_their_contents(gnu, tmp_path, format):
    path = tmp_path / "a.tar"
    gnu("-cf", path, f"--format={format}", f"--listed-incremental={tmp_path / 'snapshot'}", *ALL)
    members = read_whole(path.read_bytes())
    # Python's tarfile takes the times that GNU tar keeps instead of the prefix for part of the name.
    assert [os.fsencode(member.name) for member in members] == listed_by_gnu(path)
    assert {member.name: member.data for member in members} == {name: FILES[name] for name in names_in(*ALL)}
    assert read(path.read_bytes()).skipped["directory"] >= len(ALL)


@pytest.mark.parametrize(
    "options",
    [("gnu",), ("pax", "--sparse-version=0.0"), ("pax", "--sparse-version=0.1"), ("pax", "--sparse-version=1.0")],
)
@pytest.mark.parametrize("file", ["holes.bin", "many.bin", "end.bin", "hole.bin"])
def test_sparse_members_are_read_whole(gnu, tree, tmp_path, options, file):
    path = tmp_path / "a.tar"
    format, *version = options
    gnu("-cf", path, f"--format={format}", "--hole-detection=raw", "--sparse", *version, "short", f"sparse/{file}")
    assert path.stat().st_size < 200_000
    members = assert_read_as_the_oracles_do(path)
    assert members[-1].data == (tree / "sparse" / file).read_bytes()
    assert read_whole(Drip(path.read_bytes())) == members


def test_sparse_members_by_bsdtar(bsd, tree, tmp_path):
    path = tmp_path / "a.tar"
    bsd("-cf", path, "--format=pax", "--read-sparse", "sparse")
    members = tarfile_members(path)
    assert read_whole(path.read_bytes()) == members
    assert {member.name: member.data for member in members} == {
        f"sparse/{file.name}": file.read_bytes() for file in (tree / "sparse").iterdir()
    }


@pytest.mark.parametrize("format", ["gnu", "posix"])
def test_volumes_of_a_multi_volume_archive_are_refused(gnu, tmp_path, format):
    volumes = [tmp_path / "1.tar", tmp_path / "2.tar"]
    big = tmp_path / "big.bin"
    big.write_bytes(bytes(range(256)) * 100)
    prompts = f"n {volumes[1]}\n".encode() * 2
    program("tar")(
        "-cMf", volumes[0], f"--format={format}", "-L20", "-C", tmp_path, "big.bin", input=prompts, cwd=tmp_path
    )
    assert "truncated" in read(volumes[0].read_bytes()).error.reason
    second = read(volumes[1].read_bytes())
    assert second.members == []
    assert second.error.reason == "continued members of multi-volume archives are not supported"


def test_git_archive(tmp_path):
    git = program("git")
    files = {**{name: FILES[name] for name in names_in(*USTAR, "long")}, "utf8/é.txt": b"1"}
    repository = tmp_path / "repository"
    repository.mkdir()
    for name, data in files.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_bytes(data)
    identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = {
        **identity,
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(tmp_path),
    }
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "files"]):
        git(*command, cwd=repository, env=env)
    path = tmp_path / "a.tar"
    path.write_bytes(git("archive", "HEAD", cwd=repository, env=env))
    assert path.read_bytes()[156:157] == b"g"
    members = assert_read_as_the_oracles_do(path)
    assert {member.name: member.data for member in members} == files


def test_global_and_other_pax_records_are_no_part_of_a_member(tmp_path):
    path = tmp_path / "a.tar"
    pairs = [("a.txt", b"1"), ("é/" * 60 + "b.txt", b"2" * 1000)]
    headers = {"comment": "é" * 400, "mtime": "1.5", "user.key": "a=b"}
    path.write_bytes(tarfile_archive(pairs, format=tarfile.PAX_FORMAT, mtime=1.25, pax_headers=headers))
    members = assert_read_as_the_oracles_do(path)
    assert [(member.name, member.data) for member in members] == pairs
    assert members[0].offset > 0


def test_a_size_may_stand_in_base_256_or_in_a_pax_record(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(
        entry(b"12345", name=b"a.txt", size=b"\x80" + bytes(10) + b"\5")
        + pax(b"size=600")
        + entry(b"6" * 600, name=b"b.txt", size=b"00000000000\0")
        + pax(b"size=2", b"path=c.txt")
        + entry(b"78", size=b"00000000000 ")
        + END
    )
    assert_read_as_the_oracles_do(path)


def test_a_header_may_be_of_any_old_kind(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(
        entry(b"1", name=b"a.txt", kind=b"\0", magic=b"", size=b"          1 ")
        + entry(b"2", name=b"b.txt", kind=b"7", prefix=b"prefix")
        + entry(name=b"folder/", kind=b"\0", magic=b"")
        + entry(b"3", name=b"c.txt", kind=b"0", magic=b"ustar\x0000", prefix=b"p" * 155)
        + END
    )
    assert len(assert_read_as_the_oracles_do(path)) == 3
