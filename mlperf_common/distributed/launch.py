# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is, by what its launcher has put into the environment.

Launchers nest (`srun mpirun`, `srun torchrun`; mpirun starts its daemons by srun), so the innermost one counts:
torchrun, then Open MPI, then PMI (MPICH, Intel MPI), then a Slurm step. A Slurm *batch* script is one process, although
SLURM_PROCID and SLURM_NTASKS are set there: SLURM_STEP_ID is not (ran on Slurm 22.05).

Promises: reads nothing but its argument, never waits. A set of variables that is incomplete or impossible is an error
only if it is the one that counts. The name of a job is the same on all its ranks, and no other job of the user that
runs at the same time has it.

Not promised: that a name never comes back. A restart by torchrun keeps it, since the variables that all of its ranks
agree on stay the same, and Open MPI 5 names host and process only. Nor that variables which were handed on are told
from fresh ones: a job that is submitted by `sbatch` out of torchrun or mpirun still has theirs.
"""

from __future__ import annotations

import hashlib
import re
from typing import Mapping, NamedTuple, Optional

NAME_LENGTH = 100  # characters of a job's name, which becomes part of a file name
DIGEST_LENGTH = 16  # hexadecimal digits: 64 bits
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # slurm.h: from here on numbers stand for batch, interactive and extern steps
SPECIAL_STEPS = ("batch", "interactive", "extern")  # as sacct and squeue call them


class LaunchError(Exception):
    """The launcher's variables make no sense; the message is one line with the variable and its value."""


class Launch(NamedTuple):
    """This process's rank of ``world_size``; ``local_rank`` on its node, None if that is not known.

    ``job`` tells this start of ranks from others of the user, and may be part of a file name: at most ``NAME_LENGTH``
    of A-Z, a-z, 0-9, dot, underscore, hyphen; "" where the launcher gives nothing that does. ``launcher``: torchrun,
    openmpi, pmi, slurm or none.
    """

    rank: int
    world_size: int
    local_rank: Optional[int]
    job: str
    launcher: str


ALONE = Launch(0, 1, 0, "", "none")


class _Names(NamedTuple):
    """The variables of a launcher; the last one may be missing."""

    launcher: str
    rank: str
    size: str
    local: str


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPENMPI = _Names("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_PMI = _Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def detect(environ: Mapping[str, str]) -> Launch:
    """The rank that ``environ`` describes; rank 0 of 1 where there is no launcher. Raises LaunchError."""
    if "TORCHELASTIC_RUN_ID" in environ:
        return _read(environ, _TORCHRUN, _torchrun_job(environ))
    if _any(environ, _OPENMPI):
        return _read(environ, _OPENMPI, _openmpi_job(environ))
    if _any(environ, _PMI) and not _is_slurms(environ):
        return _read(environ, _PMI, "")  # nothing in it names the job (ran: MPICH 4 and 5, Intel MPI 2021)
    if _is_step(environ):
        return _read(environ, _SLURM, _slurm_job(environ))
    # Job scripts set these two by hand as well, often only one of them: so they come last.
    if _any(environ, _TORCHRUN):
        return _read(environ, _TORCHRUN, "")
    return ALONE


def _any(environ: Mapping[str, str], names: _Names) -> bool:
    return names.rank in environ or names.size in environ


def _is_slurms(environ: Mapping[str, str]) -> bool:
    """Whether the PMI variables are those of `srun --mpi=pmi2`: then they say what Slurm's other ones say.

    Hydra's own may say the same, where it starts one rank on each node by srun, but it also sets MPI_LOCALRANKID.
    """
    return "SLURM_STEP_ID" in environ and _PMI.local not in environ and all(
        name not in environ or environ[name] == environ.get(other)
        for name, other in ((_PMI.rank, _SLURM.rank), (_PMI.size, _SLURM.size))
    )


def _is_step(environ: Mapping[str, str]) -> bool:
    """Whether this is a task of a Slurm step. Raises LaunchError."""
    step = environ.get("SLURM_STEP_ID")
    if step is None or step in SPECIAL_STEPS:
        return False
    if _number(environ, _SLURM, "SLURM_STEP_ID", digits=10) >= FIRST_SPECIAL_STEP:
        return False
    # A batch script that was submitted by a task of a step has all of that one's variables, but for those that a batch
    # script gets itself: the ranks on its node are then rank 0 alone, on a node that is said to have more (ran).
    on_first_node = re.match(r"[0-9]+", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    only_one = environ.get("SLURM_GTIDS") == "0" and environ.get("SLURM_NODEID") == "0"
    return not (only_one and on_first_node is not None and int(on_first_node.group()) > 1)


def _torchrun_job(environ: Mapping[str, str]) -> str:
    """The run's id, which may be chosen by hand, and the port of its store, which is free when a run starts.

    Not TORCHELASTIC_RESTART_COUNT: after a failure it is 1 on that node and 0 on the others (ran: torch 2.13).
    """
    run = environ["TORCHELASTIC_RUN_ID"]
    return "" if run in ("", "none") else _name(run, environ.get("MASTER_PORT", "0"))


def _openmpi_job(environ: Mapping[str, str]) -> str:
    """The job's name for PMIx: 16 bits made of host and process in Open MPI 4, `prterun-HOST-PROCESS@1` in 5.

    Open MPI 4 also has a key of 128 random bits, the same on all ranks. It is for the network, so only a digest gets
    out. Nothing of Slurm's: ranks that mpirun starts by ssh do not have it.
    """
    key = environ.get("OMPI_MCA_orte_precondition_transports", "")
    parts = [environ.get("PMIX_NAMESPACE", ""), _digest(key) if key else ""]
    return _name(*filter(None, parts))


def _slurm_job(environ: Mapping[str, str]) -> str:
    """Job, step, and how often the job was requeued, which begins the steps anew. Raises LaunchError."""
    job, step = (_number(environ, _SLURM, name, digits=10) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    restart = _number(environ, _SLURM, "SLURM_RESTART_COUNT") if "SLURM_RESTART_COUNT" in environ else 0
    return _name(str(job), str(step), str(restart))


def _name(*parts: str) -> str:
    """A name that may be part of a file name, another one for other parts; "" for none."""
    text = "-".join(parts)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    if name != text or len(name) > NAME_LENGTH:  # others could come out the same
        name = "%s-%s" % (name[: NAME_LENGTH - DIGEST_LENGTH - 1], _digest(text))
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:DIGEST_LENGTH]


def _read(environ: Mapping[str, str], names: _Names, job: str) -> Launch:
    rank, size = _number(environ, names, names.rank), _number(environ, names, names.size)
    local = _number(environ, names, names.local) if names.local in environ else None
    for name, value in ((names.rank, rank), (names.local, local)):
        if value is not None and value >= size:
            raise LaunchError("%s: %s is %d, but %s is %d" % (names.launcher, name, value, names.size, size))
    return Launch(rank, size, local, job, names.launcher)


def _number(environ: Mapping[str, str], names: _Names, name: str, digits: int = 9) -> int:
    if name not in environ:
        raise LaunchError("%s: %s is not set" % (names.launcher, name))
    if not re.fullmatch("[0-9]{1,%d}" % digits, environ[name]):
        raise LaunchError("%s: %s is %r: not a number from 0 on" % (names.launcher, name, environ[name]))
    return int(environ[name])
