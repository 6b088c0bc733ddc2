# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""The launchers that tests really start: a Slurm of one node, Open MPI's mpirun, Hydra.

Promised: Slurm's daemons keep all files in the directory given, and listen on 127.0.0.1 alone if that is the address of
the host's name; they, and whatever their steps have started, end with the block, and within a second or so of this
process however it ends. Not promised: a Slurm for another user than root, or on a machine without any network.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from typing import Dict, Iterator, List, Sequence

import run_tests
import support

CPUS = 8  # that the node says it has: more ranks than this wait for each other
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # prctl(2)


def mpirun(ranks: int) -> List[str]:
    """What goes before a command to run it on so many ranks of Open MPI, as root too and on few CPUs."""
    return ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", str(ranks)]


def hydra(ranks: int) -> List[str]:
    """The same for MPICH."""
    return ["mpiexec.hydra", "-n", str(ranks)]


@contextlib.contextmanager
def slurm(place: str, timeout: float = 60) -> Iterator[Dict[str, str]]:
    """A Slurm of one node with 8 CPUs in the new directory ``place``; the environment by which srun and sbatch find it.

    AssertionError with the daemons' logs if no node is idle after ``timeout`` seconds.
    """
    os.mkdir(place, 0o755)
    environment = {"SLURM_CONF": _configure(place)}
    argv = [sys.executable, os.path.abspath(__file__), place]
    keeper = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_until_idle(place, environment, keeper, timeout)
        yield environment
    finally:
        keeper.terminate()
        keeper.wait()


def _configure(place: str) -> str:
    """Write everything that the daemons read below ``place``; the path of slurm.conf."""
    for name in ("s", "d"):  # state and spool: a socket goes there, whose path may have 107 bytes
        os.mkdir(os.path.join(place, name), 0o755)
    _write(place, "munge.key", secrets.token_bytes(128), 0o600)
    # A container may have no control groups that can be written to; this plugin touches none unless it is asked to.
    _write(place, "cgroup.conf", b"CgroupPlugin=cgroup/v1\n")
    host = socket.gethostname().split(".")[0]
    control, daemon = _free_ports(2)
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={control}",
        f"SlurmdPort={daemon}",
        "SlurmUser=root",
        "AuthType=auth/munge",
        f"AuthInfo=socket={place}/munge.socket",
        *_listening(host),
        f"StateSaveLocation={place}/s",
        f"SlurmdSpoolDir={place}/d",
        f"SlurmctldPidFile={place}/slurmctld.pid",
        f"SlurmdPidFile={place}/slurmd.pid",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SlurmdParameters=config_overrides",
        "MpiDefault=none",
        "ReturnToService=2",
        "SchedulerParameters=sched_min_interval=0,batch_sched_delay=0,bf_interval=1",
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={CPUS} State=UNKNOWN",
        f"PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP",
    ]
    return _write(place, "slurm.conf", "".join(line + "\n" for line in lines).encode())


def _write(place: str, name: str, content: bytes, mode: int = 0o644) -> str:
    return support.make_tree(os.path.join(place, name), support.File(content, mode))


def _listening(host: str) -> List[str]:
    """What tells Slurm to listen on 127.0.0.1 alone, where it can: it takes no address but the one of the host's name.

    Elsewhere (127.0.1.1, or a container's own) it listens on all; it takes nothing without the key, which only this
    user can read.
    """
    with contextlib.suppress(OSError):
        if socket.gethostbyname(host) == "127.0.0.1":
            return ["CommunicationParameters=NoInAddrAny,NoCtldInAddrAny"]
    return []


def _free_ports(count: int) -> List[int]:
    """Numbers that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _wait_until_idle(place: str, environment: Dict[str, str], keeper: subprocess.Popen[bytes], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    argv = ["sinfo", "--noheader", "--format=%T"]
    state = support.Result(argv, -1, b"", b"")
    while keeper.poll() is None and time.monotonic() < deadline:
        state = support.run(argv, env=environment, timeout=timeout)
        if state.stdout.strip() == "idle":
            return
        time.sleep(0.1)
    raise AssertionError(f"no node is idle: {state}\n{_logs(place)}")


def _logs(place: str) -> str:
    text = ""
    for name in sorted(os.listdir(place)):
        if name.endswith(".log"):
            with open(os.path.join(place, name), encoding="utf-8", errors="replace") as stream:
                text += f"--- {name}\n{stream.read()[-5000:]}"
    return text


# --- The keeper: the daemons' parent, and of all that lose theirs; it runs in a process of its own ---


def _daemons(place: str) -> Dict[str, Sequence[str]]:
    """Name -> argv, in the order of their start."""
    files = [f"--{name}-file={place}/munge.{name}" for name in ("key", "pid", "seed")]
    configuration = f"{place}/slurm.conf"
    return {
        # --force: a key below a directory that others may write to is all right for a test.
        "munged": ["munged", "--foreground", "--force", f"--socket={place}/munge.socket", *files],
        "slurmctld": ["slurmctld", "-D", "-f", configuration],
        "slurmd": ["slurmd", "-D", "-f", configuration],
    }


def keep(place: str) -> int:
    """Run the daemons until SIGTERM or until whoever started this is gone; then kill all that they have started."""
    parent = os.getppid()
    libc = ctypes.CDLL(None)
    # slurmstepd leaves slurmd's process group and outlives it: so it comes back to us.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    environment.update(PATH=support.PROGRAM_PATH, SLURM_CONF=f"{place}/slurm.conf")
    try:
        started = []
        for name, argv in _daemons(place).items():
            with open(os.path.join(place, name + ".log"), "wb") as log:
                started.append(
                    subprocess.Popen(
                        argv,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=environment,
                        preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
                    )
                )
            while name == "munged" and not os.path.exists(f"{place}/munge.socket") and started[0].poll() is None:
                time.sleep(0.01)
        while os.getppid() == parent and all(process.poll() is None for process in started):
            time.sleep(0.1)
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all()


def _kill_all() -> None:
    """Every process below this one; what was just being started comes to the next look."""
    while True:
        for pid in run_tests.below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1]))
