# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many this process is, by what its launcher has put into the environment.

Launchers nest (`srun mpirun`, `srun torchrun`; mpirun starts its daemons by srun), so the innermost one counts:
torchrun, then Open MPI, then PMI (MPICH, Intel MPI), then a Slurm step. A Slurm *batch* step is one process, although
SLURM_PROCID and SLURM_NTASKS are set there: SLURM_STEP_ID is not (ran on Slurm 22.05).

Promises: reads nothing but its argument, never waits. A set of variables that is incomplete or impossible is an error
only if it is the one that counts.
"""

from __future__ import annotations

import hashlib
import re
from typing import Mapping, NamedTuple, Optional, Sequence

NAME_LENGTH = 100  # of a job's name, which becomes part of a file name


class LaunchError(Exception):
    """The launcher's variables make no sense; the message names the one."""


class Launch(NamedTuple):
    """This process's rank of ``world_size``; ``local_rank`` on its node, None if that is not known.

    ``job`` tells this start of ranks from every other one of the user, and may be part of a file name; "" where the
    launcher gives nothing that does. ``launcher``: torchrun, openmpi, pmi, slurm or none.
    """

    rank: int
    world_size: int
    local_rank: Optional[int]
    job: str
    launcher: str


ALONE = Launch(0, 1, 0, "", "none")


class _Names(NamedTuple):
    """The variables of a launcher; those that show that it is the one are the first two."""

    launcher: str
    rank: str
    size: str
    local: str


_TORCHRUN = _Names("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK")
_OPENMPI = _Names("openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
_PMI = _Names("pmi", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")
_SLURM = _Names("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")


def detect(environ: Mapping[str, str]) -> Launch:
    """The rank that ``environ`` describes. Raises LaunchError."""
    if "TORCHELASTIC_RUN_ID" in environ or _any(environ, ("RANK", "WORLD_SIZE")):
        return _read(environ, _TORCHRUN, _torchrun_job(environ))
    if _any(environ, _OPENMPI[1:3]):
        return _read(environ, _OPENMPI, _joined(environ, ("SLURM_JOB_ID", "PMIX_NAMESPACE"), "PMIX_NAMESPACE"))
    if _any(environ, _PMI[1:3]) and not _is_slurm_step(environ):
        return _read(environ, _PMI, "")
    if "SLURM_STEP_ID" in environ:
        step = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return _read(environ, _SLURM, _joined(environ, step, "SLURM_JOB_ID"))
    return ALONE


def _any(environ: Mapping[str, str], names: Sequence[str]) -> bool:
    return any(name in environ for name in names)


def _is_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether the PMI variables are Slurm's own (srun --mpi=pmi2): then they say what its others say."""
    return "SLURM_STEP_ID" in environ and all(
        name not in environ or environ[name] == environ.get(other)
        for name, other in (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_STEP_NUM_TASKS"))
    )


def _torchrun_job(environ: Mapping[str, str]) -> str:
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    if run in ("", "none"):
        return ""
    return _joined(environ, ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"), "TORCHELASTIC_RUN_ID")


def _joined(environ: Mapping[str, str], names: Sequence[str], needed: str) -> str:
    """The values of ``names``, 0 for one that is missing, as a name of a job; "" without the ``needed`` one."""
    if needed not in environ:
        return ""
    text = "-".join(environ.get(name, "0") for name in names)
    name = re.sub(r"[^A-Za-z0-9._-]", "_", text)
    if name != text or len(name) > NAME_LENGTH:  # others could come out the same
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        name = "%s-%s" % (name[: NAME_LENGTH - 17], digest)
    return name


def _read(environ: Mapping[str, str], names: _Names, job: str) -> Launch:
    rank, size = _number(environ, names, names.rank), _number(environ, names, names.size)
    local = _number(environ, names, names.local) if names.local in environ else None
    if size < 1:
        raise LaunchError("%s: %s is %d: there must be 1 rank or more" % (names.launcher, names.size, size))
    if rank >= size:
        raise LaunchError("%s: %s is %d, but %s is %d" % (names.launcher, names.rank, rank, names.size, size))
    if local is not None and local >= size:
        raise LaunchError("%s: %s is %d, but %s is %d" % (names.launcher, names.local, local, names.size, size))
    return Launch(rank, size, local, job, names.launcher)


def _number(environ: Mapping[str, str], names: _Names, name: str) -> int:
    if name not in environ:
        raise LaunchError("%s: %s is not set" % (names.launcher, name))
    if not re.fullmatch(r"[0-9]{1,9}", environ[name]):
        raise LaunchError("%s: %s is not a number from 0 on: %r" % (names.launcher, name, environ[name]))
    return int(environ[name])
