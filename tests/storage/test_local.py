"""Local files, and what all URLs have in common."""

import errno
import io
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from forked import in_child

from tarshards import kernels
from tarshards.errors import OpenError, UrlError
from tarshards.storage import local, streams
from tarshards.storage.expressions import expand_urls
from tarshards.storage.location import Location
from tarshards.storage.opening import open_shard, open_url
from tarshards.storage.streams import ALIGNED, FileRange

DATA = bytes(range(256)) * 100


def write(url, data: bytes = DATA) -> None:
    with open_url(url, "wb") as stream:
        assert stream.write(data) == len(data)


def write_and_fail(url, open_=open_url) -> None:
    with open_(url, "wb") as stream:
        stream.write(DATA)
        raise KeyError


def test_a_plain_file_is_read_by_the_system_alone(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(DATA)
    for open_ in open_url, open_shard:
        with open_(str(path)) as stream:
            assert type(stream) is io.FileIO
            assert stream.tell() == 0
            assert stream.read() == DATA


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "FILE:{}", "file://localhost{}"])
def test_forms_of_a_local_name(tmp_path, form):
    url = form.format(tmp_path / "a.tar")
    write(url)
    assert (tmp_path / "a.tar").read_bytes() == DATA
    with open_url(url) as stream:
        assert stream.read() == DATA


def test_only_file_urls_with_slashes_are_percent_encoded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(f"file://{tmp_path}/a%20b.tar")
    write("file:c%20d.tar")
    write("e%20f.tar")
    assert sorted(os.listdir()) == ["a b.tar", "c%20d.tar", "e%20f.tar"]


def test_a_file_url_with_a_host(tmp_path):
    with pytest.raises(UrlError, match="three slashes"):
        open_url("file://shards/a.tar")


def test_a_name_with_a_colon_opens_if_it_exists(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("12:30.tar").write_bytes(DATA)
    Path("run-a:30.tar").write_bytes(DATA)
    for name in "12:30.tar", "run-a:30.tar", "./run-a:30.tar":
        with open_url(name) as stream:
            assert stream.read() == DATA


@pytest.mark.parametrize(("url", "close"), [("htp://x/a.tar", "http"), ("s4://b/a.tar", "s3"), ("memroy:a", "memory")])
def test_an_unknown_scheme_lists_the_known_ones(url, close):
    with pytest.raises(UrlError, match="unknown scheme") as caught:
        open_url(url)
    assert f"did you mean {close!r}?" in str(caught.value)
    assert {"file", "http", "https", "pipe", "-", "s3", "gs", "hf", "memory"} <= set(str(caught.value).split())
    assert "\n" not in str(caught.value)


def test_a_missing_shard_of_an_expression_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in 0, 1, 3:
        Path(f"data-{number}.tar").write_bytes(DATA)
    opened = (open_shard(url).close() for url in expand_urls("data-{0..3}.tar"))
    with pytest.raises(OpenError) as caught:
        list(opened)
    assert str(caught.value) == "data-2.tar: No such file or directory"
    assert isinstance(caught.value.__cause__, FileNotFoundError)


@pytest.mark.parametrize("mode", ["rb", "wb"])
def test_what_the_system_refuses(tmp_path, mode):
    with pytest.raises(OpenError, match="Is a directory"):
        open_url(str(tmp_path), mode)
    with pytest.raises(OpenError, match="No such file or directory"):
        open_url(str(tmp_path / "none/a.tar"), mode)
    (tmp_path / "file").touch()
    with pytest.raises(OpenError, match="Not a directory"):
        open_url(str(tmp_path / "file/a.tar"), mode)
    with pytest.raises(OpenError, match="null"):
        open_url("a\0.tar", mode)


def test_other_modes_are_refused():
    with pytest.raises(ValueError, match="mode is"):
        open_url("a.tar", "r")


def test_a_file_appears_when_it_is_whole(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(b"old")
    stream = open_url(str(path), "wb")
    stream.write(DATA)
    assert path.read_bytes() == b"old"
    (temporary,) = set(os.listdir(tmp_path)) - {"a.tar"}
    assert temporary.startswith(".a.tar.")
    assert temporary.endswith(".tmp")
    stream.close()
    stream.close()
    assert path.read_bytes() == DATA
    assert os.listdir(tmp_path) == ["a.tar"]
    with pytest.raises(ValueError, match="closed"):
        stream.write(b"")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_an_exception_leaves_nothing(tmp_path, suffix):
    with pytest.raises(KeyError):
        write_and_fail(str(tmp_path / f"a.tar{suffix}"), open_shard)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_abort_and_forgetting_leave_nothing(tmp_path, suffix):
    url = str(tmp_path / f"a.tar{suffix}")
    stream = open_shard(url, "wb")
    stream.write(DATA)
    stream.abort()
    stream.abort()
    stream.close()
    assert os.listdir(tmp_path) == []
    stream = open_shard(url, "wb")
    stream.write(DATA)
    with pytest.warns(RuntimeWarning, match=rf"a\.tar{suffix}: not closed, so what was written is lost"):
        del stream
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_killed_process_leaves_no_final_name(tmp_path, suffix):
    path = tmp_path / f"a.tar{suffix}"
    program = (
        "import os, sys; from tarshards.storage.opening import open_shard\n"
        "stream = open_shard(sys.argv[1], 'wb')\n"
        "while True:\n"
        "    stream.write(os.urandom(1 << 20)); print(flush=True)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as child:
        for _ in range(3):
            child.stdout.readline()
        child.send_signal(signal.SIGKILL)
    (left,) = os.listdir(tmp_path)
    assert left.startswith(".a.tar")
    write(str(path))
    assert os.listdir(tmp_path) == [path.name], "the next writer removes what the killed one has left"


@pytest.mark.forks
def test_a_living_writer_keeps_its_file(tmp_path):
    path = str(tmp_path / "a.tar")
    first, second = open_url(path, "wb"), open_url(path, "wb")
    first.write(b"first")
    second.write(DATA)
    assert in_child(lambda: open_url(path, "wb").abort() is None) == 0
    assert len(os.listdir(tmp_path)) == 2
    first.close()
    assert (tmp_path / "a.tar").read_bytes() == b"first"
    second.close()
    assert (tmp_path / "a.tar").read_bytes() == DATA
    assert os.listdir(tmp_path) == ["a.tar"]


def test_many_writers_of_one_file_some_of_them_killed(tmp_path):
    path = str(tmp_path / "a.tar")
    program = (
        "import sys; from tarshards.storage.opening import open_url\n"
        "while True:\n"
        "    with open_url(sys.argv[1], 'wb') as stream: stream.write(sys.argv[2].encode() * 200_000)\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", program, path, letter]) for letter in "abcd"]
    rng = random.Random(0)
    seen = set()
    latest = time.monotonic() + 300
    for child in children:
        end = time.monotonic() + 0.1 + rng.random() / 10
        while time.monotonic() < (end if len(seen) > 1 else latest):
            if os.path.exists(path):
                data = Path(path).read_bytes()
                assert len(data) == 200_000
                assert len(set(data)) == 1
                seen.add(data[:1])
        assert child.poll() is None, "no writer stumbles over another"
        child.kill()
        child.wait()
    assert len(seen) > 1
    write(path)
    assert Path(path).read_bytes() == DATA


@pytest.mark.forks
def test_a_forked_copy_discards_nothing(tmp_path):
    stream = open_url(str(tmp_path / "a.tar"), "wb")
    stream.write(DATA)
    assert in_child(lambda: stream.__del__() is None) == 0
    stream.close()
    assert (tmp_path / "a.tar").read_bytes() == DATA


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_the_umask_decides(tmp_path, umask):
    before = os.umask(umask)
    try:
        write(str(tmp_path / "a.tar"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.tar").stat().st_mode) == 0o666 & ~umask


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "a.tar").symlink_to("there/b.tar")
    for _ in "new", "old":
        write(str(tmp_path / "a.tar"))
        assert (tmp_path / "a.tar").is_symlink()
        assert os.listdir(tmp_path / "there") == ["b.tar"]
        assert (tmp_path / "there/b.tar").read_bytes() == DATA


def test_devices_and_named_pipes_are_written_directly(tmp_path):
    write("/dev/null")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    os.mkfifo(tmp_path / "fifo")
    with subprocess.Popen(["cat", tmp_path / "fifo"], stdout=subprocess.PIPE) as reader:
        write(str(tmp_path / "fifo"))
        assert reader.stdout.read() == DATA
    assert os.listdir(tmp_path) == ["fifo"]


def test_dev_stdout_is_the_open_file_itself(tmp_path):
    program = "from tarshards import open_url\nwith open_url('/dev/stdout', 'wb') as out: out.write(b'data')"
    with open(tmp_path / "out", "wb") as out:
        subprocess.run([sys.executable, "-c", program], stdout=out, check=True)
        assert os.stat(tmp_path / "out").st_ino == os.fstat(out.fileno()).st_ino
    assert (tmp_path / "out").read_bytes() == b"data"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_open_error():
    stream = open_url("/dev/full", "wb")
    stream.write(b"small")
    with pytest.raises(OpenError, match="/dev/full: No space left on device"):
        stream.close()
    stream = open_url("/dev/full", "wb")
    with pytest.raises(OpenError, match="/dev/full: No space left on device"):
        stream.write(bytes(100_000))
    stream.abort()


def test_a_file_that_is_read_to_its_end_is_read_farther_ahead(tmp_path, monkeypatch):
    hints = []

    def note(descriptor, *hint):
        hints.append((os.readlink(f"/proc/self/fd/{descriptor}"), *hint))

    monkeypatch.setattr(os, "posix_fadvise", note)
    (tmp_path / "a").write_bytes(b"data")
    with open_url(tmp_path / "a") as file:
        assert file.read() == b"data"
    assert hints == [(str(tmp_path / "a"), 0, 0, os.POSIX_FADV_SEQUENTIAL)]


def test_a_fifo_takes_no_hint_and_is_read(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    writer = Thread(target=lambda: (tmp_path / "fifo").write_bytes(b"data"))
    writer.start()
    with open_url(tmp_path / "fifo") as file:
        assert file.read(10) == b"data"
    writer.join()


@pytest.mark.parametrize("sync", [True, False])
def test_the_disk_begins_with_what_is_written_before_the_end(tmp_path, monkeypatch, sync):
    begun = []
    monkeypatch.setattr(local, "AT_ONCE", 1000)
    monkeypatch.setattr(kernels.mapped, "begin_flush", lambda _, offset, size: begun.append((offset, size)))
    source = tmp_path / "source"
    source.write_bytes(DATA)
    pieces = [random.Random(0).randbytes(size) for size in (1, 999, 1000, 300_000, 5, 700_000)]
    with open_url(tmp_path / "a", "wb", sync=sync) as stream, source.open("rb") as file:
        for piece in pieces:
            stream.write(piece)
        stream.copy(FileRange(file.fileno(), "source", 0, len(DATA)))
        stream.write(pieces[-1])
        stream.write(pieces[-1])
    whole = b"".join(pieces) + DATA + 2 * pieces[-1]
    assert (tmp_path / "a").read_bytes() == whole
    ends = [0, *(offset + size for offset, size in begun)]
    assert [offset for offset, _ in begun] == ends[:-1]  # each byte once
    assert ends[-1] == (len(whole) // ALIGNED * ALIGNED if sync else 0)


def test_the_disk_begins_with_what_the_system_copies(tmp_path, monkeypatch):
    """Call by call; a tool that writes members unchanged passes hardly any bytes to write."""
    begun = []
    monkeypatch.setattr(local, "AT_ONCE", 2000)
    monkeypatch.setattr(streams, "AT_ONCE", 1000)
    monkeypatch.setattr(streams, "ALIGNED", 1000)
    monkeypatch.setattr(kernels.mapped, "begin_flush", lambda _, offset, size: begun.append((offset, size)))
    source = tmp_path / "source"
    source.write_bytes(DATA)
    with open_url(tmp_path / "a", "wb") as stream, source.open("rb") as file:
        stream.copy(FileRange(file.fileno(), "source", 0, len(DATA)))
    assert (tmp_path / "a").read_bytes() == DATA
    assert begun == [(offset, 2000) for offset in range(0, len(DATA) - 1999, 2000)]
    begun.clear()
    write(tmp_path / "short", DATA[:1999])
    assert begun == []  # left to the flush


SIZES = [1, 511, 2048, 65_535, 65_536, 65_537, 110_000, 196_608, 262_144, 262_145, 520_000, 1_000_000]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_and_copied_in_any_order_is_the_file(tmp_path, seed):
    generator = random.Random(seed)
    source = tmp_path / "source"
    source.write_bytes(generator.randbytes(1_100_000))
    expected = []
    with open_url(tmp_path / "a", "wb", sync=seed % 2 == 0) as stream, source.open("rb") as file:
        for size in generator.choices(SIZES, k=generator.randrange(1, 60)):
            offset = generator.randrange(100_000)
            data = os.pread(file.fileno(), size, offset)
            expected.append(data)
            if generator.randrange(4):
                stream.write(data)
            else:
                stream.copy(FileRange(file.fileno(), "source", offset, size))
    assert (tmp_path / "a").read_bytes() == b"".join(expected)


@pytest.mark.parametrize("size", SIZES)
def test_writes_begin_and_end_at_multiples_of_64_kib(tmp_path, monkeypatch, size):
    writes = []

    class RecordedFile(io.FileIO):
        def write(self, data):
            writes.append((self.tell(), len(data)))
            return super().write(data)

    monkeypatch.setattr(local.io, "FileIO", RecordedFile)
    with open_url(tmp_path / "a", "wb", sync=False) as stream:
        for _ in range(3_000_000 // max(size, 10)):
            stream.write(bytes(size))
    total = 3_000_000 // max(size, 10) * size
    begins = [begin for begin, _ in writes]
    assert begins[0] == 0
    assert [begin + size for begin, size in writes] == [*begins[1:], total]
    assert [begin for begin in begins if begin % ALIGNED] == []
    assert len(writes) <= 1 + total // ALIGNED


def test_a_range_is_copied_up_to_a_multiple_of_64_kib_first(tmp_path, monkeypatch):
    calls = []

    def copy(output, file, offset, size):
        calls.append((os.lseek(output, 0, os.SEEK_CUR), size))
        return os.sendfile(output, file, offset, size)

    monkeypatch.setattr(streams, "_COPIES", [copy])
    source = tmp_path / "source"
    source.write_bytes(DATA * 10)
    with open_url(tmp_path / "a", "wb", sync=False) as stream, source.open("rb") as file:
        stream.write(bytes(1000))
        stream.copy(FileRange(file.fileno(), "source", 0, 200_000))
    assert calls == [(1000, ALIGNED - 1000), (ALIGNED, 201_000 - ALIGNED)]


def test_beginning_with_a_flush_reports_no_errors(tmp_path):
    with (tmp_path / "a").open("wb") as file:
        file.write(DATA)
        kernels.mapped.begin_flush(file.fileno(), 0, len(DATA))
    kernels.mapped.begin_flush(-1, 0, 1)
    assert (tmp_path / "a").read_bytes() == DATA


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_is_renamed_to_a_name_that_only_one_writer_gets(tmp_path, monkeypatch, has_links):
    def no_link(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not has_links:
        monkeypatch.setattr(os, "link", no_link)
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    target = Location(f"{tmp_path}/new")
    Location(f"{tmp_path}/one").rename(target, replace=False)
    with pytest.raises(OpenError, match="new: File exists") as caught:
        Location(f"{tmp_path}/two").rename(target, replace=False)
    assert caught.value.errno == errno.EEXIST
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"new": "one", "two": "two"}
    with pytest.raises(OpenError, match="No such file"):
        Location(f"{tmp_path}/one").rename(Location(f"{tmp_path}/other"), replace=False)
    assert not (tmp_path / "other").exists()
