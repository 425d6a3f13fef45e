"""A real Slurm on loopback: two emulated nodes with names and addresses of their own, all files in one folder.

Needs root, Debian's slurmctld, slurmd, slurm-client and munge, and `unshare`. Stops exactly what it started.
`python tests/slurm_cluster.py` installs what is missing, where it may, or says what that is.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "squeue", "scontrol", "scancel", "unshare")


def missing() -> str:
    """Why there can be no cluster here; empty if there can."""
    if lacking := _lacking():
        return f"{', '.join(lacking)} not found: apt-get install {' '.join(PACKAGES)}"
    if os.geteuid() != 0:
        return "a test cluster has to be started by root"
    tried = subprocess.run(["unshare", "-u", "-m", "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"nodes with names of their own are not allowed here: {tried.stderr.strip() or 'unshare failed'}"
    return ""


def _lacking() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]


@dataclass(frozen=True)
class Cluster:
    """A running cluster; `environment` makes the Slurm commands find it."""

    folder: Path
    environment: dict[str, str]

    def start(self, name: str, *command: str) -> None:
        """One of Slurm's daemons, which puts itself into the background."""
        variables = {**os.environ, **self.environment, "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        with (self.folder / f"{name}.out").open("w") as log:
            subprocess.run(command, env=variables, stdout=log, stderr=log, check=True, timeout=60)

    def start_controller(self) -> None:
        self.start("slurmctld", "slurmctld")
        _wait_until(lambda: self.run("sinfo", "-h", "-o", "%T", check=False).strip() != "")

    def end_controller(self) -> None:
        _end(self.pid_of("slurmctld"))

    def end_all_jobs(self) -> None:
        self.run("scancel", "--state=PENDING", check=False)
        self.run("scancel", "--signal=KILL", "--full", *self._jobs(), check=False)
        self.run("scancel", *self._jobs(), check=False)
        # A step that ended while the controller was down tells it so a minute later; two until Slurm asks once more.
        _wait_until(lambda: not self._jobs(), 180)

    def _jobs(self) -> list[str]:
        return self.run("squeue", "-h", "-o", "%A", check=False).split()

    def run(self, *command: str, check: bool = True) -> str:
        done = subprocess.run(
            command, env={**os.environ, **self.environment}, capture_output=True, text=True, timeout=120
        )
        if check and done.returncode != 0:
            raise AssertionError(f"{' '.join(command)} gave {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def pid_of(self, name: str) -> int:
        return int((self.folder / f"{name}.pid").read_text())


def _config(folder: Path, ports: list[int]) -> str:
    nodes = "\n".join(
        f"NodeName=node{k} NodeAddr=127.0.0.{k + 1} Port={ports[k]} CPUs=4 RealMemory=16000 State=UNKNOWN"
        for k in (1, 2)
    )
    return f"""ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
ReturnToService=2
KillWait=3
JobRequeue=1
MinJobAge=300
SlurmctldTimeout=5
MailProg=/bin/true
{nodes}
PartitionName=main Nodes=node1,node2 Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=node1,node2 MaxTime=INFINITE State=UP PriorityTier=10
"""


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


@contextmanager
def running_cluster(folder: Path) -> Iterator[Cluster]:
    folder.mkdir(parents=True)
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    ports = free_ports(3)
    (folder / "slurm.conf").write_text(_config(folder, ports))
    hosts = Path("/etc/hosts").read_text()
    (folder / "hosts").write_text(f"{hosts}\n127.0.0.2 node1\n127.0.0.3 node2\n")
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    cluster = Cluster(folder, environment)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as after Ctrl-C, nothing may be left running
    try:
        cluster.start(
            "munged",
            "munged",
            "--force",
            f"--key-file={key}",
            f"--socket={folder}/munge.socket",
            f"--pid-file={folder}/munged.pid",
            f"--log-file={folder}/munged.log",
            f"--seed-file={folder}/munge.seed",
        )
        cluster.start("slurmctld", "slurmctld")
        for node in ("node1", "node2"):
            spool = folder / f"spool-{node}"
            spool.mkdir()
            script = f"hostname {node} && mount --bind {folder}/hosts /etc/hosts && exec slurmd -N {node}"
            cluster.start(f"slurmd-{node}", "unshare", "-u", "-m", "bash", "-c", script)
        _wait_until(lambda: cluster.run("sinfo", "-h", "-o", "%T %D", check=False).split()[:2] == ["idle", "2"])
        try:
            yield cluster
        finally:
            cluster.end_all_jobs()
    finally:
        for path in sorted(folder.glob("*.pid")):
            _end(int(path.read_text()))
        signal.signal(signal.SIGTERM, before)


def _wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the test cluster did not get there"
        time.sleep(0.1)


def _end(pid: int) -> None:
    def is_gone() -> bool:
        try:
            return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
        except OSError:
            return True

    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if is_gone():
                return
            time.sleep(0.05)


def install() -> None:
    """With Debian's package manager, if this is root and there is one."""
    if not _lacking() or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(["apt-get", "-qq", *command], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            print(f"apt-get {command[0]} failed: {done.stderr.strip()[-300:]}")
            return


if __name__ == "__main__":
    install()
    if why := missing():
        print(f"no Slurm here, so its tests are skipped: {why}")
