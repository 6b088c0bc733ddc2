# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Rounds in which every contestant runs once, on the same data, each into a place where nothing has been.

Neighbours in time are compared, so that a disk that is throttled for a minute is so for all of them. Copies of
many files are removed only at the very end: ext4 does not reuse an inode deleted in the last minutes and scans
past it, which would be measured (5 to 15 s for 20,000 files).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from types import MappingProxyType
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

import data
import machine
from contestants import Contestant
from machine import Run

SPARE = 1 << 30  # bytes that stay free on the disk, whatever is measured
SETTLE_SECONDS = 5.0  # after a round's copies have been removed


class Ratio(NamedTuple):
    """What is wanted of the first contestant: its ``what`` (seconds, cpu) over that of ``to``, at most ``wanted``."""

    what: str
    to: str
    wanted: Optional[float] = None


class Figure(NamedTuple):
    """One number with its unit, and what is wanted of it."""

    name: str
    value: float
    unit: str
    wanted: Optional[float] = None


class Result(NamedTuple):
    """What came out of a case: runs by contestant, ours first, and the seconds that count of each.

    ``any_ratio``: it is enough that one of the ratios is as wanted.
    """

    title: str
    cache: str
    runs: Mapping[str, List[Run]] = MappingProxyType({})
    seconds: Mapping[str, List[float]] = MappingProxyType({})
    ratios: Sequence[Ratio] = ()
    any_ratio: bool = False
    figures: Sequence[Figure] = ()


class Race(NamedTuple):
    """A race on a set of data. ``keep``: copies stay until the end, because removing many files slows creating."""

    title: str
    data: str
    contestants: Sequence[Contestant]
    ratios: Sequence[Ratio]
    rounds: int
    keep: bool = False
    any_ratio: bool = False
    cold: bool = True
    synced: bool = True


class Bench:
    """The directory and the settings of a run of the benchmark."""

    def __init__(
        self,
        directory: str,
        scale: float,
        pairs: int,
        warm: bool,
        python: str,
        keep_data: bool,
        others: Sequence[Contestant] = (),
    ) -> None:
        self.others = others  # peers of the user's
        self.scale = scale
        self.pairs = pairs
        self.python = python
        self.can_be_cold = machine.can_drop_caches() and not warm
        self.data = data.Data(os.path.join(directory, "fileio-bench-data"), scale, keep_data)
        self._place = tempfile.mkdtemp(prefix="fileio-bench-", dir=directory)
        self._copies = 0

    def clean(self) -> None:
        """Remove all that was made."""
        shutil.rmtree(self._place, ignore_errors=True)
        self.data.clean()
        machine.sync_filesystem(os.path.dirname(self._place))

    def fresh(self, name: str) -> str:
        """A path at which nothing has been yet."""
        self._copies += 1
        return os.path.join(self._place, "%04d-%s" % (self._copies, name.split(maxsplit=1)[0]))

    def need_room(self, count: int) -> None:
        """Raise RunError if the disk has no room for ``count`` bytes."""
        free = shutil.disk_usage(self._place).free
        if free < count + SPARE:
            raise machine.RunError("%d MiB are needed, %d MiB are free" % ((count + SPARE) >> 20, free >> 20))

    def race(self, race: Race) -> Result:
        """Run all rounds of a race."""
        entered = _installed(race.contestants)
        cold = race.cold and self.can_be_cold
        copying = sum(c.copies or c.prepare is not None for c in entered)
        size = self.data.size(race.data)
        source = self.data.get(race.data)
        self.need_room(size * copying * (race.rounds if race.keep else 1))
        runs: Dict[str, List[Run]] = {c.name: [] for c in entered}
        seconds: Dict[str, List[float]] = {c.name: [] for c in entered}
        for number in range(race.rounds):
            copies = []
            for each in entered:
                copies.append(self.fresh(each.name))
                run = self._measure(each, source, copies[-1], cold, race.synced)
                runs[each.name].append(run)
                seconds[each.name].append(_seconds(each, run))
                say("round %d of %d: %s: %.3f s" % (number + 1, race.rounds, each.name, seconds[each.name][-1]))
                if number == 0 and each.copies:
                    _check(source, copies[-1])
            if not race.keep:
                self.remove(copies)
        cache = "cold cache" if cold else "warm cache"
        ratios = [r for r in race.ratios if r.to in runs]
        return Result(race.title, cache, runs, seconds, ratios, race.any_ratio)

    def _measure(self, each: Contestant, source: str, copy: str, cold: bool, synced: bool) -> Run:
        """One run, its program in memory, its source there too or not."""
        if each.prepare is not None:
            each.prepare(source, copy)
        machine.sync_filesystem(self._place)
        if cold:
            machine.drop_caches()
        else:
            machine.read_through(source)
        machine.run(each.warm_up(self.data.get("tiny"), self.fresh("tiny")))
        return machine.run(each.command(source, copy), sync=self._place if synced else None)

    def remove(self, copies: Sequence[str]) -> None:
        """Remove copies of few files, and wait until the disk is done with that."""
        for copy in copies:
            if os.path.isdir(copy):
                shutil.rmtree(copy)
            elif os.path.exists(copy):
                os.unlink(copy)
        machine.sync_filesystem(self._place)
        time.sleep(SETTLE_SECONDS * min(1.0, self.scale))


def say(line: str) -> None:
    """Tell who waits what is going on."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def _seconds(each: Contestant, run: Run) -> float:
    """How long it took until all was synced."""
    at_work = each.own_seconds(run.output) if each.own_seconds is not None else run.until_exit
    return at_work + run.syncing


def _installed(wanted: Sequence[Contestant]) -> List[Contestant]:
    for each in wanted:
        if not each.is_installed():
            say("%s is not installed: left out" % each.program)
    return [each for each in wanted if each.is_installed()]


def _check(source: str, copy: str) -> None:
    wrong = data.differences(source, copy)
    if wrong:
        raise machine.RunError("not a copy: %d differences, the first is %s" % (len(wrong), wrong[0]))
