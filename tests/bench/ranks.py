# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of one job on one machine, under a filesystem's latency; and the dealing of work to far more, simulated."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import subprocess
import sys
import time
from typing import Dict, List, NamedTuple

import contestants
import machine

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from mlperf_common.fileio import dealing

LATENCY_US = 1000
WORKERS = 2  # of each rank: with 8 ranks more would wait for the CPUs, not for the filesystem
JOBS = itertools.count(os.getpid() * 100)


def build_shim(place: str) -> str:
    """Compile the latency shim; its path."""
    source = os.path.join(os.path.dirname(os.path.abspath(__file__)), "latency.c")
    target = os.path.join(place, "latency.so")
    machine.run(["cc", "-O2", "-shared", "-fPIC", "-o", target, source, "-ldl"])
    return target


def slowed(shim: str, under: str) -> Dict[str, str]:
    """The environment in which calls below ``under`` cost a latency."""
    return dict(os.environ, LD_PRELOAD=shim, LATENCY_US="%d" % LATENCY_US, LATENCY_UNDER=under)


def copy_by(ranks: int, python: str, environ: Dict[str, str], source: str, copy: str) -> float:
    """Copy a tree by so many ranks; seconds until all have ended."""
    job = "bench-%d" % next(JOBS)
    command = [python, contestants.tool("fastcp"), "-q", "-n", str(WORKERS), "-r", "--distributed", source, copy]
    started = time.monotonic()
    job_s = dict(environ, WORLD_SIZE=str(ranks), TORCHELASTIC_RUN_ID=job)
    running = [subprocess.Popen(command, env=dict(job_s, RANK=str(r), LOCAL_RANK=str(r))) for r in range(ranks)]
    statuses = [process.wait() for process in running]
    if any(statuses):
        raise machine.RunError("a rank failed")
    return time.monotonic() - started


# --------------------------------------------------------------------------------------------------- simulation


class Simulated(NamedTuple):
    """What came of a simulated job: items, directories made to claim them, vain attempts, looks, the busiest second,
    seconds of all, seconds that the slowest rank took over the mean."""

    items: int
    claims: int
    vain: int
    looks: int
    peak: int
    seconds: float
    tail: float


class _Seen:
    """The claims of a simulated job, as ``claims.Claims`` sees them: what is claimed is always a prefix."""

    def __init__(self, count: int, ranks: int) -> None:
        self.count = count
        self.claimed = min(ranks, count)
        self.vain = self.looks = 0

    def claim(self, known: int) -> int:
        """The number that a rank gets which knows ``known`` to be claimed; the looks that its search takes."""
        gap = self.claimed - known
        if gap > 0:
            self.vain += 1
            self.looks += 2 * max(1, gap.bit_length())  # doubling steps, then halving
        self.claimed += 1
        return self.claimed - 1


def simulate(ranks: int, files: int, size: int, seconds_per_byte: float, stragglers: float = 0.02) -> Simulated:
    """Deal ``files`` of ``size`` bytes in batches of 128 to ranks, of which a part is three times slower.

    ``seconds_per_byte``: of cost, for one rank. Numbers only: nothing is copied.
    """
    chance = random.Random(ranks)
    cost = 128 * (size + dealing.FILE_COST)
    total = files // 128 * cost
    sizes, left = [], total
    for target in dealing.targets(total, ranks):
        item = min(left, -(-target // cost) * cost)
        sizes.append(item)
        left -= item
        if left <= 0:
            break
    seen = _Seen(len(sizes), ranks)
    pace = [seconds_per_byte * (3 if chance.random() < stragglers else chance.uniform(0.9, 1.1)) for _ in range(ranks)]
    known = [ranks] * ranks
    free = [(sizes[rank] * pace[rank] if rank < len(sizes) else 0.0, rank) for rank in range(ranks)]
    heapq.heapify(free)
    rate: Dict[int, int] = {}
    ends: List[float] = []
    while free:
        now, rank = heapq.heappop(free)
        if seen.claimed >= seen.count:
            ends.append(now)
            continue
        number = seen.claim(known[rank])
        known[rank] = number + 1
        rate[int(now)] = rate.get(int(now), 0) + 1
        heapq.heappush(free, (now + sizes[number] * pace[rank], rank))
    claimed = max(0, len(sizes) - ranks)
    peak, mean = max(rate.values(), default=0), sum(ends) / len(ends)
    return Simulated(len(sizes), claimed, seen.vain, seen.looks, peak, max(ends), max(ends) - mean)
