"""A real Slurm of one node on the loopback, in its own folder, without systemd: munged, slurmctld and slurmd."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import time
from contextlib import closing, suppress
from pathlib import Path

from programs import find

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller}
SlurmdPort={daemon}
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,requeue_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MinJobAge=600
KillWait=2
ReturnToService=2
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE
PartitionName=high Nodes={host} MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
{accounting}
"""
ACCOUNTING = """\
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={database}
AccountingStoragePass={folder}/munge.socket
"""
DATABASE = """\
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort={database}
SlurmUser={user}
LogFile={folder}/slurmdbd.log
PidFile={folder}/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={mysql}
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm
"""


class SlurmCluster:
    """Starts the daemons; ``stop`` ends them, and only them."""

    def __init__(self, folder: Path, *, accounting: bool = False):
        self.folder = folder
        self.processes: list[subprocess.Popen] = []
        for name in ("state", "spool"):
            (folder / name).mkdir()
        names = ("controller", "daemon", "database", "mysql")
        self.values = {
            **dict(zip(names, free_ports(len(names)))),
            "folder": folder,
            "user": getpass.getuser(),
            "host": socket.gethostname().split(".")[0],
        }
        extra = ACCOUNTING.format(**self.values) if accounting else ""
        (folder / "slurm.conf").write_text(CONF.format(**self.values, accounting=extra))
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        try:
            self._munge()
            if accounting:
                self._database()
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D", "-c", "-N", str(self.values["host"]))
            until(lambda: "idle" in call("sinfo", "-h", "-o", "%T"), self.log)
        except BaseException:
            self.stop()
            raise

    def _munge(self) -> None:
        (self.folder / "munge.key").write_bytes(os.urandom(128))
        (self.folder / "munge.key").chmod(0o400)
        paths = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{option}={self.folder}/munge.{end}" for option, end in paths.items()]
        self._start("munged", "--foreground", "--force", *options)
        until((self.folder / "munge.socket").exists, self.log)

    def _database(self) -> None:
        data = self.folder / "mysql"
        user = f"--user={self.values['user']}"
        install = [
            "mariadb-install-db",
            "--no-defaults",
            f"--datadir={data}",
            user,
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run(install, check=True, capture_output=True)
        port, place = f"--port={self.values['mysql']}", f"--socket={self.folder}/mysql.socket"
        self._start(
            *("mariadbd", "--no-defaults", f"--datadir={data}", user, port, place),
            *("--bind-address=127.0.0.1", f"--pid-file={self.folder}/mysql.pid"),
        )
        sql = "CREATE DATABASE slurm; CREATE USER slurm@'127.0.0.1' IDENTIFIED BY 'slurm';"
        sql += "CREATE USER slurm@localhost IDENTIFIED BY 'slurm'; GRANT ALL ON slurm.* TO slurm@'127.0.0.1';"
        sql += "GRANT ALL ON slurm.* TO slurm@localhost"
        until((self.folder / "mysql.socket").exists, self.log)
        subprocess.run(["mariadb", "--no-defaults", place, "-u", "root", "-e", sql], check=True, capture_output=True)
        conf = self.folder / "slurmdbd.conf"
        conf.write_text(DATABASE.format(**self.values))
        conf.chmod(0o600)
        self._start("slurmdbd", "-D")
        until(lambda: "Cluster" in call("sacctmgr", "-i", "show", "cluster"), self.log)
        call("sacctmgr", "-i", "add", "cluster", "test")

    def _start(self, program: str, *arguments: str) -> None:
        path = find(program) or program
        log = open(self.folder / f"{program}.out", "wb")  # noqa: SIM115
        with log:
            process = subprocess.Popen([path, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.processes.append(process)

    def log(self) -> str:
        """The ends of all logs, for a failure."""
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}" for path in logs)

    def stop(self) -> None:
        for process in reversed(self.processes):
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        os.environ.pop("SLURM_CONF", None)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            with closing(each):
                pass


def call(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def until(condition, explain=lambda: "", seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(explain())
        time.sleep(0.05)
