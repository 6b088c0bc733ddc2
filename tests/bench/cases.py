# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What is measured: for each case its data, who runs on it, and which ratios and figures are wanted."""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from typing import Callable, Dict, List, Sequence

import contestants
import machine
import ranks
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
    peers = contestants.peers(bench.others)
    entered = (contestants.fastcp(bench.python), contestants.fio_copy(), *peers)
    ratios = [Ratio("seconds", "fio", 1.11), *(Ratio("seconds", peer.name, 1.0) for peer in peers)]
    ratios += [Ratio("cpu", peer.name, 0.33) for peer in peers]
    return bench.race(Race(title, name, entered, ratios, bench.pairs))


def small(bench: Bench) -> Result:
    """20,000 files of 1 to 64 KiB in 200 directories."""
    return _small(bench, 0.55, True)


def small_warm(bench: Bench) -> Result:
    """The same from memory, until sync has returned."""
    return _small(bench, 1.0, False)


def _small(bench: Bench, wanted: float, cold: bool) -> Result:
    peers = contestants.peers(bench.others)
    entered = (contestants.fastcp(bench.python), *peers)
    ratios = [Ratio("seconds", peer.name, wanted if peer.name == "cp -r" else 1.0) for peer in peers]
    title = "20,000 files of 1 to 64 KiB in 200 directories"
    ratios.append(Ratio("cpu", "cp -r"))
    return bench.race(Race(title, "small", entered, ratios, bench.pairs, keep=True, cold=cold))


def late(bench: Bench) -> Result:
    """10,000 files of a byte, each call of the filesystem 1 ms late: a shared filesystem, simulated."""
    source, environ = bench.data.get("hundredth"), _slowed(bench)
    entered = (contestants.fastcp(bench.python), contestants.cp(), contestants.rsync())
    runs: Dict[str, List[machine.Run]] = {each.name: [] for each in entered if each.is_installed()}
    for number, each in itertools.product(range(bench.pairs), entered):
        if each.name in runs:
            run = machine.run(each.command(source, bench.fresh(each.name)), environ=environ)
            runs[each.name].append(run)
            say("round %d of %d: %s: %.3f s" % (number + 1, bench.pairs, each.name, run.until_exit))
    seconds = {name: [run.until_exit for run in found] for name, found in runs.items()}
    wanted = {"cp -r": 0.10, "rsync -r": 0.15}
    ratios = [Ratio("seconds", name, wanted[name]) for name in runs if name in wanted]
    return Result("10,000 files of a byte, 1 ms a call", "warm cache", runs, seconds, ratios)


def _slowed(bench: Bench) -> Dict[str, str]:
    place = bench.fresh("shim")
    os.mkdir(place)
    return ranks.slowed(ranks.build_shim(place), os.path.dirname(bench.data.root))


WALK = """
import sys
sys.path.insert(0, sys.argv[1])
from mlperf_common.fileio import copyplan, copytasks, listing, stopping, workers
count, stop = int(sys.argv[2]), stopping.StopFlag()
make = workers.InProcess if count == 1 else lambda *rest: workers.Pool(count, *rest)
pool = make(copytasks.FUNCTIONS, 2 << 20, stop)
roots = listing.Roots(pool)
plan = copyplan.plan_copy_operations([sys.argv[3]], sys.argv[4], list_directories=listing.PoolLister(pool, roots))
roots.close()
pool.close()
"""


def _planning(bench: Bench, source: str, workers: int) -> List[str]:
    root = os.path.dirname(os.path.dirname(contestants.tool("fastcp")))
    return [bench.python, "-c", WALK, root, str(workers), source, bench.fresh("nothing")]


def walk(bench: Bench) -> Result:
    """A walk of 2,000 directories and 50,000 files, each call 1 ms late, by the default workers and by one process."""
    source, environ = bench.data.get("walked"), _slowed(bench)
    seconds: Dict[int, List[float]] = {16: [], 1: []}
    for number, count in itertools.product(range(bench.pairs), seconds):
        seconds[count].append(machine.run(_planning(bench, source, count), environ=environ).until_exit)
        say("round %d of %d: %d workers: %.3f s" % (number + 1, bench.pairs, count, seconds[count][-1]))
    ratio = statistics.median(many / one for many, one in zip(seconds[16], seconds[1]))
    figures = [Figure("planning by 16 workers", statistics.median(seconds[16]), "s")]
    figures.append(Figure("planning by one process", statistics.median(seconds[1]), "s"))
    figures.append(Figure("16 workers, over one process", ratio, "", 0.125))
    return Result("50,000 files in 2,000 directories planned, 1 ms a call", "warm cache", figures=figures)


def planning(bench: Bench) -> Result:
    """The planning of 1,000,000 files in 10,000 directories against find."""
    source = bench.data.get("million")
    find = ["find", source, "-printf", "%s %p\\n"]
    machine.run(find)
    ratios, memory = [], 0
    for number in range(bench.pairs):
        theirs = machine.run(find).until_exit
        run = machine.run(_planning(bench, source, 16), sample=number == 0)
        memory = max(memory, run.pss)
        ratios.append(run.until_exit / theirs)
        say("round %d of %d: %.2f of find" % (number + 1, bench.pairs, ratios[-1]))
    figures = [Figure("seconds, over find -printf", statistics.median(ratios), "", 2.5)]
    figures.append(Figure("sum of Pss of all processes, at its peak", memory / 1e6, "MB", 300))
    return Result("1,000,000 files in 10,000 directories planned", "warm cache", figures=figures)


def number_of_workers(bench: Bench) -> Result:
    """10,000 files of a byte by 8, 16 and 32 workers: tmpfs, this disk, and 0.2, 1 and 5 ms a call (2,000 files)."""
    taken: Dict[str, Dict[int, List[float]]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        source = bench.data.get("hundredth")
        shutil.copytree(source, os.path.join(memory, "s"))
        late, few = _slowed(bench), bench.data.get("fivehundredth")
        for number, count in itertools.product(range(bench.pairs), (8, 16, 32)):
            for name, origin, copy, environ in (
                ("tmpfs", os.path.join(memory, "s"), os.path.join(memory, "%d-%d" % (number, count)), None),
                ("this disk", source, bench.fresh("fastcp"), None),
                ("0.2 ms", source, bench.fresh("fastcp"), {**late, "LATENCY_US": "200"}),
                ("1 ms", source, bench.fresh("fastcp"), late),
                ("5 ms", few, bench.fresh("fastcp"), {**late, "LATENCY_US": "5000"}),
            ):
                command = contestants.fastcp(bench.python).command(origin, copy)
                run = machine.run([*command, "-n", str(count)], environ=environ)
                taken.setdefault(name, {}).setdefault(count, []).append(run.until_exit)
            say("round %d of %d: %d workers" % (number + 1, bench.pairs, count))
    figures = [
        Figure("%s, %d workers" % (name, count), statistics.median(found), "s")
        for name, by_count in taken.items()
        for count, found in by_count.items()
    ]
    return Result("10,000 files of a byte by 8, 16 and 32 workers (5 ms: 2,000 files)", "warm cache", figures=figures)


def flat(bench: Bench) -> Result:
    """1,000,000 files against 10,000 of them: seconds a file, until sync has returned."""
    few, many = bench.data.get("hundredth"), bench.data.get("million")
    times = len(list(bench.data.files("million"))) / len(list(bench.data.files("hundredth")))
    ratios, seconds, memory = [], [], 0
    for number in range(bench.pairs):
        # Five short ones for each long one: their median is as steady as it.
        short = [_seconds(_copied(bench, few)) for _ in range(5)]
        run = _copied(bench, many)
        memory = max(memory, run.rss)
        seconds.append(_seconds(run))
        ratios.append(seconds[-1] / times / statistics.median(short))
        say("round %d of %d: %.1f s, %.2f a file" % (number + 1, bench.pairs, seconds[-1], ratios[-1]))
    figures = [Figure("1,000,000 files", statistics.median(seconds), "s")]
    figures.append(Figure("seconds a file, over those of 10,000 files", statistics.median(ratios), "", 1.15))
    figures.append(Figure("the largest process, at its peak", memory / 1e6, "MB", 300))
    return Result("1,000,000 files of a byte in 10,000 directories", "warm cache", figures=figures)


def _copied(bench: Bench, source: str) -> machine.Run:
    copy = bench.fresh("fastcp")
    return machine.run(contestants.fastcp(bench.python).command(source, copy), sync=os.path.dirname(copy))


def _seconds(run: machine.Run) -> float:
    return run.until_exit + run.syncing


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


def md5_warm(bench: Bench) -> Result:
    """The same from memory, where only the CPUs limit it."""
    limit = contestants.openssl(bench.data.size("four"))
    entered = (contestants.fastmd5(bench.python), contestants.md5sum(), limit)
    ratios = (Ratio("seconds", "md5sum", 0.55), Ratio("seconds", limit.name, 1.10))
    return bench.race(Race("MD5 of 4 files of 1 GiB", "four", entered, ratios, bench.pairs, cold=False, synced=False))


def md5_small(bench: Bench) -> Result:
    """fastmd5 of 20,000 files of 1 to 64 KiB."""
    entered = (contestants.fastmd5(bench.python), contestants.xargs_md5sum())
    ratios = (Ratio("seconds", entered[1].name, 0.60),)
    title = "MD5 of 20,000 files of 1 to 64 KiB in 200 directories"
    return bench.race(Race(title, "small", entered, ratios, bench.pairs, synced=False))


def manifest(bench: Bench) -> Result:
    """fastcp --manifest of 4 files of 1 GiB against copying and hashing alone."""
    plain, md5 = contestants.fastcp(bench.python), contestants.fastmd5(bench.python)
    entered = (contestants.fastcp_manifest(bench.python), plain, md5)
    result = bench.race(Race("4 files of 1 GiB with their manifest", "four", entered, (), bench.pairs))
    slower = [max(pair) for pair in zip(result.seconds[plain.name], result.seconds[md5.name])]
    return _against(result, "the slower of fastcp and fastmd5", slower, 1.15)


def compare(bench: Bench) -> Result:
    """fastmd5 --compare of two trees of 4 files of 1 GiB against twice one."""
    one = contestants.fastmd5(bench.python)
    entered = (contestants.fastmd5_compare(bench.python), one)
    result = bench.race(Race("two trees of 4 files of 1 GiB", "four", entered, (), bench.pairs, synced=False))
    return _against(result, "twice fastmd5 of one", [2 * seconds for seconds in result.seconds[one.name]], 1.10)


def _against(result: Result, name: str, seconds: Sequence[float], wanted: float) -> Result:
    """The result with the first contestant's time over ``seconds``, round by round, as a figure: the median."""
    ours = result.seconds[next(iter(result.runs))]
    middle = statistics.median(mine / other for mine, other in zip(ours, seconds))
    return result._replace(figures=[Figure("seconds, over %s" % name, middle, "", wanted)])


def entries(bench: Bench) -> Result:
    """The memory of proofs of 1,000,000 files, beside that of a hundredth of them."""
    figures = []
    for name, wanted in (("million", 300.0), ("hundredth", None)):
        source, copy, listing = bench.data.get(name), bench.fresh("twin"), bench.fresh("listing")
        machine.run(["cp", "-al", source, copy])
        tool = [bench.python, contestants.tool("fastmd5")]
        count = sum(1 for _ in bench.data.files(name))
        run = machine.run([*tool, "-q", "--compare", source, copy], sample=True)
        figures.append(Figure("--compare of %d files" % count, run.pss / 1e6, "MB", wanted))
        with open(listing, "wb") as stream:
            stream.write(machine.run([*tool, "-q", "-C", source, "."]).output)
        run = machine.run([*tool, "--status", "-C", copy, "-c", listing], sample=True)
        figures.append(Figure("-c of %d files" % count, run.pss / 1e6, "MB"))
    return Result("memory of a proof: sum of Pss of all processes, at its peak", "warm cache", figures=figures)


def several_ranks(bench: Bench) -> Result:
    """40,000 files by 1, 2, 4 and 8 ranks, each call of the filesystem 1 ms late."""
    source, environ = bench.data.get("ranked"), _slowed(bench)
    rounds = max(3, bench.pairs // 2 + 1)
    seconds: Dict[int, List[float]] = {count: [] for count in (1, 2, 4, 8)}
    for number, count in itertools.product(range(rounds), seconds):
        seconds[count].append(ranks.copy_by(count, bench.python, environ, source, bench.fresh("ranks")))
        say("round %d of %d: %d ranks: %.3f s" % (number + 1, rounds, count, seconds[count][-1]))
    started = time.monotonic()
    subprocess.run(["cp", "-r", source, bench.fresh("cp")], env=environ, check=True)
    alone = time.monotonic() - started
    files = sum(1 for _ in bench.data.files("ranked"))
    figures = [Figure("cp -r", files / alone, "files/s")]
    one = statistics.median(seconds[1])
    for count, times in seconds.items():
        middle = statistics.median(times)
        figures.append(Figure("%d ranks of %d workers" % (count, ranks.WORKERS), files / middle, "files/s"))
        figures.append(Figure("  times as fast as 1", one / middle, ""))
    return Result("%d files of a byte in directories of 100, 1 ms a call" % files, "any cache", figures=figures)


DEALT = (
    ("items", ""), ("claims", "mkdir"), ("vain", "mkdir"), ("looks", "stat"), ("peak", "claims/s"), ("seconds", "s"),
    ("tail", "s"),
)  # fmt: skip


def dealt(bench: Bench) -> Result:
    """The dealing of 100,000,000 files to 1,000 ranks, simulated."""
    figures = []
    for count, files in ((8, 10**6), (100, 10**7), (1000, 10**8)):
        found = ranks.simulate(count, files, 100 << 10, 1 / (2 << 30))
        name = "%d ranks, %d files: " % (count, files)
        figures += [Figure(name + field, float(getattr(found, field)), unit) for field, unit in DEALT]
    return Result("dealing, 100 KiB a file, 2 GiB of cost a second and rank, 2 % of ranks 3 times slower", "simulated",
                  figures=figures)  # fmt: skip


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
    "md5warm": md5_warm,
    "md5small": md5_small,
    "manifest": manifest,
    "compare": compare,
    "entries": entries,
    "ranks": several_ranks,
    "dealt": dealt,
    "memory": memory,
    "tiny": tiny,
    "small": small,
    "smallwarm": small_warm,
    "late": late,
    "walk": walk,
    "planning": planning,
    "flat": flat,
    "workers": number_of_workers,
    "calls": calls,
}
