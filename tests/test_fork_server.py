"""Tools forked by the fork server behave like tools that start normally."""

from __future__ import annotations

import os
import subprocess
import sys

import fork_server
import pytest
from programs import COMPILER, need

from tarshards import write_samples

SHOW = "tarcat 'pipe:{}; cat a.tar' | wc -c"
LINES = [
    "tarcat a.tar",
    "tarcat --help; tarcat --version; tarscat --version",
    "tarcat missing.tar",
    "tarcat ''",
    "tarcat $'\\xff.tar'",
    "tarcat --nonsense",
    "tarcat long.tar | head -c 1; echo ${PIPESTATUS[@]}",
    "yes | head -c 9999999 | tarcat; echo ${PIPESTATUS[@]}",
    "tarcat a.tar >&-",
    "tarcat -o out.tar a.tar <&- >&- 2>&-",
    "tarcat - <&-",
    "tarcat - <a.tar 2>&1",
    "tarcat <(cat a.tar) > >(cat)",
    "exec 7<a.tar; tarcat /dev/fd/7",
    "exec 250<a.tar; tarcat /dev/fd/250",
    "exec tarcat a.tar",
    "tarcat 'pipe:ls -l /proc/self/fd | wc -l; cat a.tar'",
    SHOW.format("pwd >&2"),
    "mkdir gone; cd gone; rmdir ../gone; tarcat $OLDPWD/a.tar 2>&-",
    "umask 027; " + SHOW.format("umask >&2"),
    "export X=$'\\xff\\n='; unset HOME; " + SHOW.format("env -0 | sort -z | grep -zv ^_= >&2"),
    "trap '' HUP TERM; " + SHOW.format("kill $$; kill -HUP $$; echo alive >&2"),
    "TZ=Asia/Tokyo tarcheck -v a.tar",
    "tarcat pipe:'>began; exec sleep 9 2>&-' & until [ -e began ]; do sleep 0.01; done; kill $!; wait $!; echo $?",
    # A killed process reads no more, so writing to it is an error.
    "mkfifo f; tarcat f >/dev/null 2>&- & exec 9>f 2>&-; kill -9 $!; wait $!; echo $?; trap '' PIPE; "
    "while echo >&9; do :; done",
]


@pytest.fixture
def run(tmp_path):
    """Return a function that runs a line of bash in a new folder, and returns its exit code and output."""

    def run(line: str, path: str) -> tuple[int, bytes, bytes]:
        folder = tmp_path / "folder"
        folder.mkdir()
        write_samples([{"__key__": "a", "txt": "text"}], str(folder / "a.tar"))
        write_samples([{"__key__": f"{i}", "txt": "x" * 1000} for i in range(300)], str(folder / "long.tar"))
        environment = {**os.environ, "PATH": path, "LC_ALL": "C.UTF-8"}
        done = subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, timeout=60)
        subprocess.run(["rm", "-r", folder], check=True)
        return done.returncode, done.stdout, done.stderr.replace(path.encode(), b"")

    return run


@pytest.mark.parametrize("line", LINES)
def test_a_fork_does_what_a_process_does(run, line, path_with_tools, path_with_started_tools):
    assert run(line, path_with_tools) == run(line, path_with_started_tools)


@pytest.mark.parametrize("before", ["PYTHONHASHSEED=1", "FSSPEC_X=1", "LC_ALL=C", "ulimit -n 99;", "unshare -r"])
def test_what_a_fork_cannot_take_over_starts_a_process(run, before, path_with_tools):
    need(COMPILER)
    line = SHOW.format("xargs -0 </proc/$PPID/cmdline >&2").replace(" | wc -c", " >out.tar")
    if before.startswith("unshare"):
        need("unshare")
        if subprocess.run(["unshare", "-r", "true"], capture_output=True).returncode:
            pytest.skip("needs namespaces")
    assert b"fork_server.py" in run(line, path_with_tools)[2]
    assert b"bin/tarcat pipe:" in run(f"{before} {line}", path_with_tools)[2]


def test_after_the_end_of_the_server_tools_start_by_themselves(run, tmp_path):
    need(COMPILER)
    (tmp_path / "bin").mkdir()
    with fork_server.serving(tmp_path / "bin"):
        pass
    assert run("tarcat --version", f"{tmp_path}/bin:{os.environ['PATH']}")[0] == 0


@pytest.mark.parametrize(
    "words",
    [
        ["-c", "import sys; print(sys.argv, sys.path[0], __name__); sys.exit('no')", "a", "-b"],
        ["program.py", "a"],
        ["-m", "program", "a"],
        ["-u", "-W", "error", "-c", "import warnings; warnings.warn('told')"],
        ["-W", "ignore", "-c", "import warnings; warnings.warn('told'); import os; os.kill(os.getpid(), 15)"],
        ["-X", "utf8", "-c", "print(1)"],
    ],
)
def test_a_python_that_is_a_fork_does_what_a_process_does(tmp_path, python_with_torch, words):
    (tmp_path / "program.py").write_text("import sys\nprint(sys.argv[1:], __name__)\nsys.exit(3)\n")
    forked, begun = (
        subprocess.run([python, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        for python in (python_with_torch, sys.executable)
    )
    assert (forked.returncode, forked.stdout) == (begun.returncode, begun.stdout)
    assert forked.stderr.splitlines()[-1:] == begun.stderr.splitlines()[-1:]
