# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What is measured: for each case its data, who runs on it, and which ratios and figures are wanted."""

from __future__ import annotations

import shutil
from typing import Callable, Dict

import contestants
import machine
from race import Bench, Figure, Race, Ratio, Result, say

TINY_ROUNDS = 20
MOST_CALLS = 14  # how many system calls are listed by name


def four_large(bench: Bench) -> Result:
    """4 files of 1 GiB."""
    return _large(bench, "four", "4 files of 1 GiB")


def one_large(bench: Bench) -> Result:
    """1 file of 4 GiB."""
    return _large(bench, "one", "1 file of 4 GiB")


def _large(bench: Bench, name: str, title: str) -> Result:
    entered = (contestants.fastcp(bench.python), contestants.fio_copy(), contestants.cp())
    ratios = (Ratio("seconds", "fio", 1.15), Ratio("seconds", "cp -r"), Ratio("cpu", "cp -r", 0.20))
    return bench.race(Race(title, name, entered, ratios, bench.pairs))


def small(bench: Bench) -> Result:
    """20,000 files of 1 to 64 KiB in 200 directories."""
    entered = (contestants.fastcp(bench.python), contestants.cp(), contestants.rsync())
    ratios = (Ratio("seconds", "cp -r", 0.65), Ratio("seconds", "rsync -r", 0.65), Ratio("cpu", "cp -r"))
    title = "20,000 files of 1 to 64 KiB in 200 directories"
    return bench.race(Race(title, "small", entered, ratios, bench.pairs, keep=True))


def tiny(bench: Bench) -> Result:
    """1 file of 10 bytes: what a start costs."""
    entered = (contestants.fastcp(bench.python), contestants.nothing(bench.python), contestants.cp())
    rounds = max(TINY_ROUNDS, bench.pairs)
    title = "1 file of 10 bytes, until exit"
    result = bench.race(Race(title, "tiny", entered, (), rounds, keep=True, cold=False, synced=False))
    middle = sorted(result.seconds["fastcp"])[rounds // 2]
    return result._replace(figures=[Figure("fastcp, total time", middle * 1000, "ms", 100)])


def md5(bench: Bench) -> Result:
    """fastmd5 of 4 files of 1 GiB."""
    limit = contestants.fio_read() if contestants.fio_read().is_installed() else contestants.dd_read()
    entered = (contestants.fastmd5(bench.python), contestants.md5sum(), limit)
    ratios = (Ratio("seconds", "md5sum", 0.60), Ratio("seconds", limit.name, 1.10))
    title = "MD5 of 4 files of 1 GiB"
    return bench.race(Race(title, "four", entered, ratios, bench.pairs, any_ratio=True, synced=False))


def calls(bench: Bench) -> Result:
    """System calls per small file, of a whole run and all of its processes, by strace."""
    files = sum(1 for _ in bench.data.files("small"))
    title = "system calls of a whole run, %d small files" % files
    if shutil.which("strace") is None:
        say("strace is not installed: left out")
        return Result(title, "not run")
    bench.need_room(3 * bench.data.size("small"))
    source = bench.data.get("small")
    figures = []
    for each, wanted in ((contestants.fastcp(bench.python), 12.0), (contestants.cp(), None)):
        log = bench.fresh("strace")
        machine.run(["strace", "-f", "-c", "-o", log, *each.command(source, bench.fresh(each.name))])
        counted = _count_calls(log)
        figures.append(Figure(each.name, counted.pop("total") / files, "calls a file", wanted))
        most = sorted(counted.items(), key=lambda item: -item[1])[:MOST_CALLS]
        figures += [Figure("%s: %s" % (each.name, name), count / files, "a file") for name, count in most]
    return Result(title, "any cache", figures=figures)


def _count_calls(log: str) -> Dict[str, int]:
    """Calls by name, and their total, from what `strace -c` wrote."""
    found = {}
    with open(log) as stream:
        for line in stream:
            words = line.split()
            if len(words) >= 5 and words[3].isdigit():
                found[words[-1]] = int(words[3])
    return found


def memory(bench: Bench) -> Result:
    """The memory of all processes while 4 large files are copied at the defaults."""
    bench.need_room(2 * bench.data.size("four"))
    source, copy = bench.data.get("four"), bench.fresh("fastcp")
    run = machine.run(contestants.fastcp(bench.python).command(source, copy), sample=True)
    bench.remove([copy])
    figures = [
        Figure("sum of Pss of all processes, at its peak", run.pss / 1e6, "MB", 400),
        Figure("the largest process, at its peak", run.rss / 1e6, "MB"),
    ]
    return Result("memory while 4 files of 1 GiB are copied", "any cache", figures=figures)


CASES: Dict[str, Callable[[Bench], Result]] = {
    "four": four_large,
    "one": one_large,
    "md5": md5,
    "memory": memory,
    "tiny": tiny,
    "small": small,
    "calls": calls,
}
