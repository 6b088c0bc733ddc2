# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Which rank of how many: environments that were recorded under real launchers, the same ones broken, and live ones."""

# Takes about 9 s
from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import Any, Dict, List, NamedTuple, Sequence, Set
from unittest import mock

import launchers
import run_tests
import support
from support import ROOT, needs, needs_root, slow

from mlperf_common.distributed.launch import ALONE, NAME_LENGTH, Launch, LaunchError, detect


class Recording(NamedTuple):
    """What ranks saw under a launcher: variables that all share, each rank's own in the order of the ranks."""

    how: str
    shared: str
    ranks: List[str]
    launcher: str
    job: str
    local: Sequence[int] = ()  # where there was more than one node

    def environments(self) -> List[Dict[str, str]]:
        """One for each rank."""
        return [dict(item.split("=", 1) for item in f"{self.shared} {own}".split()) for own in self.ranks]

    def expected(self, rank: int) -> Launch:
        """What detect() makes of a rank's."""
        return Launch(rank, len(self.ranks), self.local[rank] if self.local else rank, self.job, self.launcher)


# Recorded on a machine named vm with Slurm 22.05.8, Open MPI 4.1.4 and Hydra 4.0.2 of Debian 12, torch 2.13.0; and from
# PyPI Open MPI 5.0.11, MPICH 5.0.2, Intel MPI 2021.18.1. Where there are two nodes, they were two slurmd on it. Left
# out are variables of no concern: paths, ports, CPUs.
RECORDED = [
    Recording(
        "srun -n4",
        "SLURM_GTIDS=0,1,2,3 SLURM_JOB_ID=1 SLURM_NODEID=0 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4",
        [
            "SLURM_LOCALID=0 SLURM_PROCID=0",
            "SLURM_LOCALID=1 SLURM_PROCID=1",
            "SLURM_LOCALID=2 SLURM_PROCID=2",
            "SLURM_LOCALID=3 SLURM_PROCID=3",
        ],
        "slurm", "1-0-0",
    ),
    Recording(
        "sbatch -n2 SCRIPT",
        "SLURM_GTIDS=0 SLURM_JOB_ID=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0",
        [""],
        "none", "",
    ),
    Recording(
        "sbatch -n2 SCRIPT, srun in it",
        "SLURM_GTIDS=0,1 SLURM_JOB_ID=2 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "SLURM_LOCALID=0 SLURM_PROCID=0",
            "SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "2-0-0",
    ),
    Recording(
        "sbatch --array=3-4, srun in it",
        "SLURM_ARRAY_JOB_ID=14 SLURM_ARRAY_TASK_ID=3 SLURM_GTIDS=0 SLURM_JOB_ID=15 SLURM_LOCALID=0 SLURM_NODEID=0 "
        "SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 "
        "SLURM_STEP_TASKS_PER_NODE=1",
        [""],
        "slurm", "15-0-0",
    ),
    Recording(
        "salloc -n2",
        "SLURM_JOB_ID=10 SLURM_NPROCS=2 SLURM_NTASKS=2",
        [""],
        "none", "",
    ),
    Recording(
        "salloc -n2, srun in it",
        "SLURM_GTIDS=0,1 SLURM_JOB_ID=10 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "SLURM_LOCALID=0 SLURM_PROCID=0",
            "SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "10-0-0",
    ),
    Recording(
        "srun -N2 -n3",
        "SLURM_JOB_ID=1 SLURM_NPROCS=3 SLURM_NTASKS=3 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 "
        "SLURM_STEP_TASKS_PER_NODE=2,1",
        [
            "SLURM_GTIDS=0,1 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0",
            "SLURM_GTIDS=0,1 SLURM_LOCALID=1 SLURM_NODEID=0 SLURM_PROCID=1",
            "SLURM_GTIDS=2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=2",
        ],
        "slurm", "1-0-0", [0, 1, 0],
    ),
    Recording(
        "srun -N2 -n2",
        "SLURM_JOB_ID=2 SLURM_LOCALID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 "
        "SLURM_STEP_TASKS_PER_NODE=1(x2)",
        [
            "SLURM_GTIDS=0 SLURM_NODEID=0 SLURM_PROCID=0",
            "SLURM_GTIDS=1 SLURM_NODEID=1 SLURM_PROCID=1",
        ],
        "slurm", "2-0-0", [0, 0],
    ),
    Recording(
        "salloc -n1 : -n2, srun --het-group=0,1 in it",
        "SLURM_HET_SIZE=2 SLURM_JOB_ID=3 SLURM_JOB_ID_HET_GROUP_0=3 SLURM_JOB_ID_HET_GROUP_1=4 SLURM_NPROCS=3 "
        "SLURM_NTASKS=3 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=1,2",
        [
            "SLURM_GTIDS=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0",
            "SLURM_GTIDS=1,2 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_PROCID=1",
            "SLURM_GTIDS=1,2 SLURM_LOCALID=1 SLURM_NODEID=1 SLURM_PROCID=2",
        ],
        "slurm", "3-0-0", [0, 0, 1],
    ),
    Recording(
        "srun --export=NONE -n2",
        "SLURM_GTIDS=0,1 SLURM_JOB_ID=13 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "SLURM_LOCALID=0 SLURM_PROCID=0",
            "SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "13-0-0",
    ),
    Recording(
        "scontrol requeue, srun -n2",
        "SLURM_GTIDS=0,1 SLURM_JOB_ID=3 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_RESTART_COUNT=1 "
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "SLURM_LOCALID=0 SLURM_PROCID=0",
            "SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "3-0-1",
    ),
    Recording(
        "srun --mpi=pmi2 -n2",
        "PMI_JOBID=8.0 PMI_SIZE=2 SLURM_GTIDS=0,1 SLURM_JOB_ID=8 SLURM_NODEID=0 SLURM_NPROCS=2 SLURM_NTASKS=2 "
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "PMI_FD=10 PMI_RANK=0 SLURM_LOCALID=0 SLURM_PROCID=0",
            "PMI_FD=12 PMI_RANK=1 SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "8-0-0",
    ),
    Recording(
        "srun --mpi=pmix -n2",
        "PMIX_NAMESPACE=slurm.pmix.9.0 PMIX_VERSION=4.2.2rc2 SLURM_GTIDS=0,1 SLURM_JOB_ID=9 SLURM_NODEID=0 "
        "SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=2",
        [
            "PMIX_RANK=0 SLURM_LOCALID=0 SLURM_PROCID=0",
            "PMIX_RANK=1 SLURM_LOCALID=1 SLURM_PROCID=1",
        ],
        "slurm", "9-0-0",
    ),
    Recording(
        "sbatch -n4 SCRIPT by rank 0 of srun -n4",
        "SLURM_GTIDS=0 SLURM_JOB_ID=2 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=4 SLURM_NTASKS=4 SLURM_PROCID=0 "
        "SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=4 SLURM_STEP_TASKS_PER_NODE=4",
        [""],
        "none", "",
    ),
    Recording(
        "mpirun -np 4",
        "OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_SIZE=4 "
        "OMPI_MCA_orte_precondition_transports=bfef0d2012d960a2-fffc639bad158f6d OMPI_UNIVERSE_SIZE=2 "
        "PMIX_NAMESPACE=869924865 PMIX_VERSION=4.2.2rc2",
        [
            "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0",
            "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1",
            "OMPI_COMM_WORLD_LOCAL_RANK=2 OMPI_COMM_WORLD_NODE_RANK=2 OMPI_COMM_WORLD_RANK=2 PMIX_RANK=2",
            "OMPI_COMM_WORLD_LOCAL_RANK=3 OMPI_COMM_WORLD_NODE_RANK=3 OMPI_COMM_WORLD_RANK=3 PMIX_RANK=3",
        ],
        "openmpi", "869924865-bb37159cd2f39965",
    ),
    Recording(
        "srun -n1 mpirun -np 2",
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_SIZE=2 "
        "OMPI_MCA_orte_precondition_transports=03ddc8415949c266-82ec6999d4ac6cfe OMPI_UNIVERSE_SIZE=1 "
        "PMIX_NAMESPACE=443678721 PMIX_VERSION=4.2.2rc2 SLURM_GTIDS=0 SLURM_JOB_ID=1 SLURM_LOCALID=0 SLURM_NODEID=0 "
        "SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 "
        "SLURM_STEP_TASKS_PER_NODE=1",
        [
            "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0",
            "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1",
        ],
        "openmpi", "443678721-606c2e2927b7c392",
    ),
    Recording(
        "sbatch -n2, mpirun -np 2 in it",
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_SIZE=2 "
        "OMPI_MCA_orte_precondition_transports=9de6a79803e8fac9-d8376dbec7285c79 OMPI_UNIVERSE_SIZE=2 "
        "PMIX_NAMESPACE=378535937 PMIX_VERSION=4.2.2rc2 SLURM_GTIDS=0 SLURM_JOB_ID=3 SLURM_LOCALID=0 SLURM_NODEID=0 "
        "SLURM_NPROCS=2 SLURM_NTASKS=2 SLURM_PROCID=0",
        [
            "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0",
            "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1",
        ],
        "openmpi", "378535937-ffffec394e3d53a1",
    ),
    Recording(
        "mpirun -np 2 of Open MPI 5",
        "OMPI_COMM_WORLD_LOCAL_SIZE=2 OMPI_COMM_WORLD_SIZE=2 OMPI_UNIVERSE_SIZE=2 OMPI_VERSION=5.0.11 "
        "PMIX_NAMESPACE=prterun-vm-15311@1 PMIX_VERSION=5.0.11rc1",
        [
            "OMPI_COMM_WORLD_LOCAL_RANK=0 OMPI_COMM_WORLD_NODE_RANK=0 OMPI_COMM_WORLD_RANK=0 PMIX_RANK=0",
            "OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_NODE_RANK=1 OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1",
        ],
        "openmpi", "prterun-vm-15311_1-907694cf14324074",
    ),
    Recording(
        "mpiexec.hydra -n 2",
        "HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 PMI_SIZE=2",
        [
            "MPI_LOCALRANKID=0 PMI_FD=6 PMI_RANK=0",
            "MPI_LOCALRANKID=1 PMI_FD=8 PMI_RANK=1",
        ],
        "pmi", "",
    ),
    Recording(
        "sbatch -n2, mpiexec.hydra -n 2 in it",
        "MPI_LOCALNRANKS=2 PMI_SIZE=2 SLURM_GTIDS=0 SLURM_JOB_ID=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=1 "
        "SLURM_NTASKS=2 SLURM_PROCID=0 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1",
        [
            "MPI_LOCALRANKID=0 PMI_FD=5 PMI_RANK=0",
            "MPI_LOCALRANKID=1 PMI_FD=6 PMI_RANK=1",
        ],
        "pmi", "",
    ),
    Recording(
        "mpiexec -n 2 of MPICH 5",
        "HYDI_CONTROL_FD=7 MPI_LOCALNRANKS=2 PMI_HOSTNAME=vm PMI_SIZE=2",
        [
            "MPI_LOCALRANKID=0 PMI_FD=9 PMI_RANK=0",
            "MPI_LOCALRANKID=1 PMI_FD=11 PMI_RANK=1",
        ],
        "pmi", "",
    ),
    Recording(
        "mpiexec.hydra -n 2 of Intel MPI",
        "HYDRA_BSTRAP_LAUNCHER=ssh HYDRA_BSTRAP_LOCALHOST=vm HYDRA_LAUNCH_TYPE=2 MPI_LOCALNRANKS=2 PMI_SIZE=2",
        [
            "MPI_LOCALRANKID=0 PMI_FD=9 PMI_RANK=0",
            "MPI_LOCALRANKID=1 PMI_FD=11 PMI_RANK=1",
        ],
        "pmi", "",
    ),
    Recording(
        "torchrun --nproc_per_node 2",
        "GROUP_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=44377 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=bb8950c0-2b4f-4367-bf36-b06fd57b87f1 "
        "TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2",
        [
            "LOCAL_RANK=0 RANK=0",
            "LOCAL_RANK=1 RANK=1",
        ],
        "torchrun", "bb8950c0-2b4f-4367-bf36-b06fd57b87f1-44377",
    ),
    Recording(
        "torchrun --standalone",
        "GROUP_RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=41733 RANK=0 "
        "TORCHELASTIC_MAX_RESTARTS=0 TORCHELASTIC_RESTART_COUNT=0 "
        "TORCHELASTIC_RUN_ID=527c0154-cc32-4dc0-aff6-9a32a8057995 TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=1",
        [""],
        "torchrun", "527c0154-cc32-4dc0-aff6-9a32a8057995-41733",
    ),
    Recording(
        "srun -n1 torchrun --nproc_per_node=2",
        "GROUP_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=43255 SLURM_GTIDS=0 SLURM_JOB_ID=18 "
        "SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=75f5c639-d3fc-4732-bcfb-811f331f4f3c "
        "TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2",
        [
            "LOCAL_RANK=0 RANK=0",
            "LOCAL_RANK=1 RANK=1",
        ],
        "torchrun", "75f5c639-d3fc-4732-bcfb-811f331f4f3c-43255",
    ),
    Recording(
        "srun -n1 torchrun --rdzv-id=job7 --nproc_per_node=2",
        "GROUP_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=44895 SLURM_GTIDS=0 SLURM_JOB_ID=19 "
        "SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NPROCS=1 SLURM_NTASKS=1 SLURM_PROCID=0 SLURM_STEP_ID=0 "
        "SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 TORCHELASTIC_MAX_RESTARTS=0 "
        "TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_RUN_ID=job7 TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2",
        [
            "LOCAL_RANK=0 RANK=0",
            "LOCAL_RANK=1 RANK=1",
        ],
        "torchrun", "job7-44895",
    ),
    Recording(
        "torchrun --nnodes 2 --rdzv-id train, after the second one's worker has failed",
        "LOCAL_RANK=0 LOCAL_WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=33617 TORCHELASTIC_MAX_RESTARTS=2 "
        "TORCHELASTIC_RUN_ID=train TORCHELASTIC_USE_AGENT_STORE=True WORLD_SIZE=2",
        [
            "GROUP_RANK=0 RANK=0 TORCHELASTIC_RESTART_COUNT=0",
            "GROUP_RANK=1 RANK=1 TORCHELASTIC_RESTART_COUNT=1",
        ],
        "torchrun", "train-33617", [0, 0],
    ),
]
FULL = {recording.how: recording.environments() for recording in RECORDED}

# The launcher's own variables that must be there; those that may be missing, but not be wrong.
OWN = {
    "torchrun": (["RANK", "WORLD_SIZE"], ["LOCAL_RANK"]),
    "openmpi": (["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"], ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    "pmi": (["PMI_RANK", "PMI_SIZE"], ["MPI_LOCALRANKID"]),
    "slurm": (["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_JOB_ID"], ["SLURM_LOCALID", "SLURM_RESTART_COUNT"]),
    "none": ([], []),
}
# By these a launcher is known, or its job named: without one it is another, or has another name.
KNOWN_BY = {
    "torchrun": {"TORCHELASTIC_RUN_ID", "MASTER_PORT"},
    "openmpi": {"PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports"},
    "pmi": {"MPI_LOCALRANKID"},
    "slurm": {"SLURM_STEP_ID"},
    "none": {"SLURM_STEP_ID", "SLURM_GTIDS", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE"},
}
NOT_NUMBERS = ["", " ", "-1", "+1", "1.5", "1e3", "0x1", "one", "1 ", "1\n", "\u0661", "9" * 30, "\udcff"]


def without(environment: Dict[str, str], *names: str) -> Dict[str, str]:
    """A copy that lacks these variables."""
    return {name: value for name, value in environment.items() if name not in names}


class Case(support.TestCase):
    def assert_refused(self, environment: Dict[str, str], name: str, *also: str) -> None:
        """Fail unless that is a LaunchError of one line that names the variable, and what else is given."""
        with self.assertRaises(LaunchError) as caught:
            detect(environment)
        self.assertRegex(str(caught.exception), r"\A[a-z]+: [^\n]+\Z")
        for word in (name, *also):
            self.assertIn(word, str(caught.exception))


class Recorded(Case):
    def test_each_rank_of_each_launcher(self) -> None:
        for recording in RECORDED:
            for rank, environment in enumerate(FULL[recording.how]):
                with self.subTest(recording.how, rank=rank):
                    self.assertEqual(detect(environment), recording.expected(rank))

    def test_each_launch_has_its_own_name(self) -> None:
        # Each was started on a Slurm of its own, or is the same start seen twice: so only these may repeat.
        names = [recording.job for recording in RECORDED if recording.launcher in ("openmpi", "torchrun")]
        self.assertEqual(len(set(names)), len(names))
        self.assertNotIn("", names)

    def test_nothing_but_the_argument_is_read(self) -> None:
        for environments in FULL.values():
            with mock.patch.dict(os.environ, environments[-1], clear=True):
                self.assertEqual(detect({}), ALONE)


class Winner(NamedTuple):
    """An environment with the launcher that counts, its variables that must be there, and those that may be."""

    how: str
    launcher: str
    environment: Dict[str, str]
    required: List[str]
    optional: List[str]


def winners() -> List[Winner]:
    """One for each rank that was recorded."""
    found = []
    for recording in RECORDED:
        # Slurm's own PMI takes over where the rest of Slurm's variables is broken: Nested looks at that.
        if recording.how != "srun --mpi=pmi2 -n2":
            for environment in FULL[recording.how]:
                found.append(Winner(recording.how, recording.launcher, environment, *OWN[recording.launcher]))
    return found


class Broken(Case):
    def test_each_variable_missing(self) -> None:
        for winner in winners():
            for name in winner.required:
                with self.subTest(winner.how, name=name):
                    self.assert_refused(without(winner.environment, name), name, "is not set", winner.launcher)

    def test_no_local_rank(self) -> None:
        for winner in winners():
            for name in winner.optional[:1]:
                with self.subTest(winner.how, name=name):
                    whole = detect(winner.environment)
                    self.assertEqual(detect(without(winner.environment, name)), whole._replace(local_rank=None))

    def test_each_variable_not_a_number(self) -> None:
        for winner in winners():
            for name in [*winner.required, *winner.optional]:
                for value in NOT_NUMBERS:
                    with self.subTest(winner.how, name=name, value=value):
                        broken = {**winner.environment, name: value}
                        self.assert_refused(broken, name, repr(value), winner.launcher)

    def test_a_rank_that_is_not_below_the_size(self) -> None:
        for winner in winners():
            for name in [*winner.required[:1], *winner.optional[:1]]:
                of = winner.required[1]
                size = winner.environment[of]
                for value in (size, "99"):
                    with self.subTest(winner.how, name=name, value=value):
                        broken = {**winner.environment, name: value}
                        self.assert_refused(broken, f"{name} is {value}", f"{of} is {size}", winner.launcher)

    def test_no_ranks_at_all(self) -> None:
        for winner in winners():
            for name in winner.required[1:2]:
                with self.subTest(winner.how):
                    self.assert_refused({**winner.environment, name: "0"}, f"{name} is 0", winner.launcher)

    def test_a_step_with_an_impossible_number(self) -> None:
        for value in NOT_NUMBERS:
            broken = {**FULL["srun -n4"][1], "SLURM_STEP_ID": value}
            self.assert_refused(broken, "SLURM_STEP_ID", repr(value), "slurm")

    def test_what_does_not_count_changes_nothing(self) -> None:
        changed = 0
        for winner in winners():
            whole = detect(winner.environment)
            others = set(winner.environment) - {*winner.required, *winner.optional, *KNOWN_BY[winner.launcher]}
            for name in others:
                for broken in (without(winner.environment, name), {**winner.environment, name: "junk"}):
                    with self.subTest(winner.how, name=name):
                        self.assertEqual(detect(broken), whole)
                    changed += 1
        self.assertGreater(changed, 300)


class Nested(Case):
    INSIDE_OUT = ("torchrun --nproc_per_node 2", "mpirun -np 4", "mpiexec.hydra -n 2", "srun -n4")

    def test_the_innermost_wins(self) -> None:
        for position, inner in enumerate(self.INSIDE_OUT):
            for outer in self.INSIDE_OUT[position + 1 :]:
                with self.subTest(f"{outer} {inner}"):
                    environment = FULL[inner][1]
                    self.assertEqual(detect({**FULL[outer][0], **environment}), detect(environment))

    def test_a_broken_outer_one_does_not_matter(self) -> None:
        for position, inner in enumerate(self.INSIDE_OUT):
            for outer in self.INSIDE_OUT[position + 1 :]:
                environment = FULL[inner][1]
                for name in FULL[outer][0]:
                    with self.subTest(f"{outer} {inner}, without {name}"):
                        self.assertEqual(detect({**without(FULL[outer][0], name), **environment}), detect(environment))

    def test_pmi_of_slurm_is_the_step(self) -> None:
        environment = FULL["srun --mpi=pmi2 -n2"][1]
        for name in ("PMI_RANK", "PMI_SIZE"):
            self.assertEqual(detect(without(environment, name)), detect(environment))
        self.assertEqual(detect({**environment, "PMI_SIZE": "5"}), Launch(1, 5, None, "", "pmi"))
        self.assertEqual(detect({**environment, "PMI_RANK": "0"}), Launch(0, 2, None, "", "pmi"))
        self.assertEqual(detect(without(environment, "SLURM_STEP_ID")), Launch(1, 2, None, "", "pmi"))

    def test_hydra_with_one_rank_on_each_node(self) -> None:
        # srun starts Hydra's own processes there: their numbers may be those of the ranks, on some nodes or on all.
        step = {**FULL["srun -n4"][1], "SLURM_STEP_TASKS_PER_NODE": "1(x4)", "SLURM_GTIDS": "1", "SLURM_NODEID": "1"}
        ranks = {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
        self.assertEqual(detect({**step, **ranks}), Launch(1, 4, 0, "", "pmi"))

    def test_rank_and_world_size_set_by_hand(self) -> None:
        self.assertEqual(detect({"RANK": "1", "WORLD_SIZE": "2"}), Launch(1, 2, None, "", "torchrun"))
        self.assert_refused({"WORLD_SIZE": "2"}, "RANK", "is not set")
        self.assert_refused({"RANK": "0"}, "WORLD_SIZE", "is not set")
        for how in self.INSIDE_OUT[1:]:
            for environment in FULL[how]:
                for by_hand in ({"WORLD_SIZE": "2"}, {"RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}):
                    with self.subTest(how, by_hand=by_hand):
                        self.assertEqual(detect({**environment, **by_hand}), detect(environment))
        self.assertEqual(detect({"LOCAL_RANK": "3", "MASTER_ADDR": "a", "MASTER_PORT": "1"}), ALONE)


class Steps(Case):
    def test_special_steps_are_one_process(self) -> None:
        environment = {**FULL["sbatch -n2 SCRIPT"][0], "SLURM_STEP_NUM_TASKS": "2"}
        for step in ("4294967290", "4294967291", "4294967292", "4294967293", "batch", "interactive", "extern"):
            self.assertEqual(detect({**environment, "SLURM_STEP_ID": step}), ALONE)
        self.assertEqual(detect({**environment, "SLURM_STEP_ID": "4294967279"}).job, "2-4294967279-0")

    def test_a_batch_script_with_the_variables_of_a_step(self) -> None:
        step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0", "SLURM_JOB_ID": "7"}
        for nodes, size, alone in (("2,1", 3, True), ("4(x2)", 8, True), ("1(x2)", 2, False), ("1,2", 3, False)):
            environment = {**step, "SLURM_STEP_TASKS_PER_NODE": nodes, "SLURM_STEP_NUM_TASKS": str(size)}
            with self.subTest(nodes):
                expected = ALONE if alone else Launch(0, size, None, "7-0-0", "slurm")
                self.assertEqual(detect(environment), expected)
                others = {**environment, "SLURM_GTIDS": "1", "SLURM_PROCID": "1", "SLURM_NODEID": "1"}
                self.assertEqual(detect(others), Launch(1, size, None, "7-0-0", "slurm"))
        # Ranks may be spread in any order (srun -m arbitrary): then rank 0 may be alone on another node than the first.
        elsewhere = {**step, "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_TASKS": "3"}
        self.assertEqual(detect(elsewhere), Launch(0, 3, None, "7-0-0", "slurm"))


class Names(Case):
    def torchrun(self, run: str, port: str = "1") -> str:
        """The job's name for a run id."""
        environment = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": run, "MASTER_PORT": port}
        return detect(environment).job

    def test_safe_in_a_file_name(self) -> None:
        for run in ("../../etc", "a b", "a/b", "a\nb", "\u00e4", "\udcff", "a\0b", "$x`y`", "x" * 5000, ".", "a@1"):
            self.assertRegex(self.torchrun(run), r"\A[A-Za-z0-9._-]{1,%d}\Z" % NAME_LENGTH)

    def test_others_are_others(self) -> None:
        runs = ["a/b", "a_b", "a b", "x" * 5000, "x" * 5001, "x" * 98, "x" * 99, "\u00e4", "\u00f6"]
        names = [self.torchrun(run) for run in runs] + [self.torchrun("a/b", "2"), self.torchrun("a_b", "2")]
        self.assertEqual(len(set(names)), len(names))

    def test_as_it_is_where_that_is_safe(self) -> None:
        self.assertEqual(self.torchrun("Run_7.b"), "Run_7.b-1")
        self.assertEqual(self.torchrun("x" * 98), "x" * 98 + "-1")

    def test_none_where_nothing_names_it(self) -> None:
        self.assertEqual(self.torchrun("none"), "")
        self.assertEqual(self.torchrun(""), "")
        self.assertEqual(detect({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}).job, "")

    def test_the_key_of_open_mpi_is_not_told(self) -> None:
        environment = FULL["mpirun -np 4"][0]
        key = environment["OMPI_MCA_orte_precondition_transports"]
        self.assertNotIn(key[:16], detect(environment).job)
        other = detect({**environment, "OMPI_MCA_orte_precondition_transports": key[:-1] + "0"})
        self.assertNotEqual(other.job, detect(environment).job)

    def test_a_slurm_job_step_and_restart(self) -> None:
        environment = FULL["srun -n4"][0]
        for name, job in (("SLURM_JOB_ID", "9-0-0"), ("SLURM_STEP_ID", "1-9-0"), ("SLURM_RESTART_COUNT", "1-0-9")):
            self.assertEqual(detect({**environment, name: "9"}).job, job)


# Each rank writes what it is into a file of its own in the directory that it is given.
REPORT = f"""
import json, os, sys
sys.path.insert(0, {ROOT!r})
from mlperf_common.distributed.launch import detect
with open(os.path.join(sys.argv[1], "%d.json" % os.getpid()), "w") as stream:
    json.dump(detect(os.environ), stream)
"""


class Live(Case):
    """Real launchers, each rank of which writes a report."""

    def command(self, name: str) -> List[str]:
        """The argv of a rank, with ``name`` for the directory of its reports."""
        program = self.path("report.py")
        if not os.path.exists(program):
            self.make("report.py", REPORT.encode())
        return [sys.executable, program, self.make(name, {})]

    def reports(self, name: str) -> List[Launch]:
        """What was written, in the order of the ranks."""
        found = []
        for path in glob.glob(os.path.join(self.path(name), "*.json")):
            with open(path, encoding="ascii") as stream:
                found.append(Launch(*json.load(stream)))
        return sorted(found)

    def assert_ranks(self, name: str, size: int, launcher: str, job: str) -> None:
        """Fail unless there is a report of each rank, with one name that looks like ``job``."""
        found = self.reports(name)
        expected = [Launch(rank, size, rank, found[0].job, launcher) for rank in range(size)] if found else []
        self.assertEqual(found, expected)
        self.assertEqual(len(found), size)
        self.assertRegex(found[0].job, rf"\A(?:{job})\Z")


@slow
class Mpi(Live):
    @needs("mpirun.openmpi")
    def test_open_mpi(self) -> None:
        for name in ("one", "two"):
            support.run([*launchers.mpirun(4), *self.command(name)], expect=0)
            self.assert_ranks(name, 4, "openmpi", "[0-9]+-[0-9a-f]{16}")
        self.assertNotEqual(self.reports("one")[0].job, self.reports("two")[0].job)

    @needs("mpiexec.hydra")
    def test_hydra(self) -> None:
        support.run([*launchers.hydra(2), *self.command("ranks")], expect=0)
        self.assert_ranks("ranks", 2, "pmi", "")


SLURM = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "sinfo")


@slow
@needs_root
@needs(*SLURM)
class Slurm(Live):
    environment: Dict[str, str]

    @classmethod
    def setUpClass(cls) -> None:
        place = support.make_temporary()
        cls.addClassCleanup(support.remove_tree, place)
        stack = contextlib.ExitStack()
        cls.addClassCleanup(stack.close)
        cls.environment = stack.enter_context(launchers.slurm(os.path.join(place, "slurm")))

    def slurm(self, *argv: str) -> support.Result:
        """Run srun or sbatch to its end."""
        return support.run(argv, env=self.environment, cwd=self.tmp, expect=0)

    def test_srun(self) -> None:
        for name in ("one", "two"):
            self.slurm("srun", "-n4", *self.command(name))
            self.assert_ranks(name, 4, "slurm", "[0-9]+-0-0")
        self.assertNotEqual(self.reports("one")[0].job, self.reports("two")[0].job)

    def test_a_batch_script(self) -> None:
        alone, first, second = ("'%s'" % "' '".join(self.command(name)) for name in ("alone", "first", "second"))
        script = self.make("script", f"#!/bin/sh\nset -e\n{alone}\nsrun {first}\nsrun {second}\n".encode())
        self.slurm("sbatch", "-n3", "--wait", script)
        self.assertEqual(self.reports("alone"), [ALONE])
        self.assert_ranks("first", 3, "slurm", "[0-9]+-0-0")
        self.assert_ranks("second", 3, "slurm", "[0-9]+-1-0")

    def test_a_batch_script_that_a_step_submits(self) -> None:
        script = self.make("script", "#!/bin/sh\nexec '{}'\n".format("' '".join(self.command("alone"))).encode())
        submit = f'[ "$SLURM_PROCID" != 0 ] || exec sbatch -n2 --wait {script}'
        self.slurm("srun", "-n2", "sh", "-c", submit)
        self.assertEqual(self.reports("alone"), [ALONE])

    @needs("mpirun.openmpi")
    def test_mpirun_in_a_step(self) -> None:
        self.slurm("srun", "-n1", *launchers.mpirun(2), *self.command("ranks"))
        self.assert_ranks("ranks", 2, "openmpi", "[0-9]+-[0-9a-f]{16}")


# Starts a Slurm and a step that lasts, then waits to be killed.
HOLD = """
import subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import launchers, support
with launchers.slurm(sys.argv[2]) as environment:
    step = support.start(["srun", "-n2", "sleep", "600"], env=environment, stdout=subprocess.DEVNULL)
    print(step.pid, flush=True)
    time.sleep(600)
"""


def alive(pids: Sequence[int]) -> Set[int]:
    """Those of them that run; one that is dead but not yet waited for does not."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as stream:
                if stream.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X"):
                    found.add(pid)
    return found


@slow
@needs_root
@needs(*SLURM)
class Helper(Case):
    def hold(self) -> subprocess.Popen[bytes]:
        """A process that has a Slurm with a running step."""
        argv = [sys.executable, "-c", HOLD, os.path.join(ROOT, "tests"), self.path("slurm")]
        process = support.start(argv, stdout=subprocess.PIPE)
        self.addCleanup(self._end, process)
        assert process.stdout is not None
        srun = int(process.stdout.readline())
        self.addCleanup(lambda: os.killpg(srun, signal.SIGKILL) if alive([srun]) else None)
        return process

    @staticmethod
    def names(pids: Sequence[int]) -> List[str]:
        """What they run."""
        found = []
        for pid in pids:
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/comm", encoding="utf-8") as stream:
                    found.append(stream.read().strip())
        return sorted(name for name in found if not re.match("srun|python", name))

    def wait_for(self, condition: Any, what: str) -> None:
        """AssertionError if the condition does not come true within 20 s."""
        deadline = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), deadline, what)
            time.sleep(0.05)

    def test_all_end_with_a_killed_test(self) -> None:
        process = self.hold()
        self.wait_for(lambda: self.names(run_tests.below(process.pid)).count("sleep") == 2, "the step does not start")
        pids = [pid for pid in run_tests.below(process.pid) if self.names([pid])]
        daemons = ["munged", "slurmctld", "slurmd", "slurmscriptd", "slurmstepd"]
        self.assertEqual(self.names(pids), sorted([*daemons, "sleep", "sleep"]))
        process.kill()
        self.wait_for(lambda: not alive(pids), f"still there: {self.names(list(alive(pids)))}")

    def test_logs_are_shown_when_it_does_not_start(self) -> None:
        with mock.patch.object(launchers, "CPUS", "many"):
            with self.assertRaisesRegex(AssertionError, r"(?s)no node is idle: .*--- slurmctld\.log\n.*many"):
                with launchers.slurm(self.path("slurm"), timeout=5):
                    self.fail("it started")


if __name__ == "__main__":
    support.main()
