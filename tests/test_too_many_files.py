"""A process that cannot open more files: every step that needs one fails once, with a name, and leaves nothing."""

from __future__ import annotations

import json
import subprocess

import pytest

PROGRAM = """
import gc, json, logging, os, resource, signal, sys
from concurrent.futures import ThreadPoolExecutor
from tarshards import IndexedShards, ShardWriter, open_url, read_samples, reshard, write_dataset, write_samples
from tarshards.errors import TarshardsError
from tarshards.run.samples.journal import Joblog, Journal
from tarshards.run.samples.scratch import Scratch
from tarshards.storage.markers import Marker
from tarshards.write.map import map_shards

logging.disable()
folder = sys.argv[1]
SAMPLES = [{"__key__": str(i), "txt": "x" * 3000} for i in range(9)]
write_samples(SAMPLES, "in-0.tar")
write_samples(SAMPLES, "in-1.tar.gz")
with ShardWriter("indexed-%d.tar", max_samples=4) as writer:
    for sample in SAMPLES:
        writer.write(sample)
threads = ThreadPoolExecutor(1)
threads.submit(int).result()

def write(url):
    with open_url(url, "wb", allow_pipe=True) as stream:
        stream.write(b"data")

def shards(index=True):
    with ShardWriter("out-%d.tar", max_samples=4, index=index) as writer:
        for sample in SAMPLES:
            writer.write(sample)

def journal(kind):
    kind("state").close()

def scratch():
    with Scratch(folder):
        pass

CASES = {
    "a file": lambda: write("out"),
    "a file that is replaced": lambda: write("in-0.tar"),
    "a pipe": lambda: write("pipe:cat >/dev/null"),
    "a shard": lambda: write_samples(SAMPLES, "out.tar"),
    "a compressed shard": lambda: write_samples(SAMPLES, "out.tar.gz"),
    "shards": shards,
    "a marker": lambda: Marker("deep/out.done").write({}),
    "a dataset": lambda: write_dataset(SAMPLES, "out-%d.tar", executor=threads),
    "mapped shards": lambda: map_shards(list, "in-{0.tar,1.tar.gz}", "out-%d.tar", executor=threads, progress=False),
    "resharded": lambda: reshard("in-{0.tar,1.tar.gz}", "out-%d.tar", rekey="{shard}-{index}", executor=threads),
    "reading": lambda: list(read_samples("in-1.tar.gz")),
    "reading a pipe": lambda: list(read_samples("pipe:cat in-0.tar", allow_pipe=True)),
    "random access": lambda: list(IndexedShards("indexed-{0,1,2}.tar")),
    "a journal": lambda: journal(Journal),
    "a job log": lambda: journal(Joblog),
    "scratch": scratch,
}

def listed():
    return sorted(os.path.join(path, name) for path, _, names in os.walk(".") for name in names)

def opened():
    gc.collect()
    return sorted(os.listdir("/proc/self/fd"))

def remove_outputs():
    for path in listed():
        if "/in-" not in path and "/indexed-" not in path:
            os.unlink(path)

def fail_stepwise(case):
    case()  # imports what it needs
    remove_outputs()
    steps, most = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    before, files = opened(), listed()
    while True:
        held = [os.open("/", os.O_RDONLY) for _ in range(64)]
        for descriptor in held[len(held) - len(steps):]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (held[-1] + 1, most[1]))
        error = None
        try:
            case()
        except (TarshardsError, OSError) as caught:
            error = f"{type(caught).__name__}: {caught}"
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, most)
            for descriptor in held[:len(held) - len(steps)]:
                os.close(descriptor)
        steps.append(error)
        assert opened() == before, (error, before, opened())
        left = [path for path in listed() if path not in files and "state" not in path]
        if error is None:
            return steps
        whole = [path for path in left if not os.path.basename(path).startswith(".") and ".tmp" not in path]
        assert left == whole, (error, left)
        remove_outputs()

name = sys.argv[2]
os.chdir(folder)
signal.alarm(60)
print(json.dumps(fail_stepwise(CASES[name])))
"""
CASES = [line.split('"')[1] for line in PROGRAM.splitlines() if line.startswith('    "') and '":' in line]


@pytest.mark.parametrize("case", CASES)
def test_no_descriptor_or_temporary_file_is_left(tmp_path, python_with_torch, case):
    command = [python_with_torch, "-c", PROGRAM, str(tmp_path), case]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *errors, last = json.loads(done.stdout)
    assert last is None
    assert errors, "it needs no file"
    for error in errors:
        assert "Too many open files" in error or "slots can be started" in error, error
        assert "\n" not in error
