#!/usr/bin/env python3
# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Measure fastcp and fastmd5 against cp, rsync, md5sum and the storage itself: see README.md beside this file.

It makes its data, measures, prints tables on stdout and removes all that it made, however it ends but by SIGKILL.
Exit status 0 when all was measured, whatever came out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any, Dict, List, Sequence

import contestants
import machine
import publish
import report
from cases import CASES
from race import Bench, say

QUIET_LOAD = 0.3  # of a CPU: above this, somebody else is at work


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and return the exit status."""
    options = _parse(argv)
    machine.die_cleanly()
    facts = machine.describe(options.dir, options.python)
    print(_introduce(facts, options))
    bench = Bench(options.dir, options.scale, options.pairs, options.warm, options.python, options.keep_data,
                  options.peer)  # fmt: skip
    results: List[Dict[str, Any]] = []
    try:
        for name in options.cases or CASES:
            say("== " + name)
            result = CASES[name](bench)
            print(report.text(result, options.scale), flush=True)
            results.append(report.as_data(name, result))
    except machine.RunError as exc:
        say("bench: %s" % exc)
        return 1
    finally:
        _write(options, facts, results)
        bench.clean()
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure fastcp and fastmd5 against their peers.",
        epilog="cases: " + "; ".join("%s: %s" % (n, (f.__doc__ or "").rstrip(".")) for n, f in CASES.items()),
    )
    add = parser.add_argument
    add("cases", nargs="*", metavar="CASE", help="what to measure (default: all)")
    add("--dir", required=True, help="an existing directory on the disk to be measured")
    add("--pairs", type=int, default=5, metavar="N", help="rounds; fewer than 5 prove nothing (default: 5)")
    add("--scale", type=float, default=1.0, metavar="X", help="sizes and numbers of files times this (default: 1)")
    add("--warm", action="store_true", help="read the source before each run instead of emptying the cache")
    add("--python", default=sys.executable, help="the interpreter that runs the tools (default: this one)")
    add("--peer", metavar="NAME=CMD", type=_peer, action="append", default=[], help="one more: {src}, {dst} in CMD")
    add("--json", metavar="FILE", help="write every figure there")
    add("--markdown", metavar="FILE", help="write a table there")
    add("--svg", metavar="FILE", help="draw the ratios there")
    add("--readme", metavar="FILE", help="put the table between the figures' markers of FILE")
    add("--keep-data", action="store_true", help="leave the data, not the copies, for the next run")
    options = parser.parse_args(argv)
    unknown = [name for name in options.cases if name not in CASES]
    if unknown:
        parser.error("no such case: %s (there are %s)" % (", ".join(unknown), ", ".join(CASES)))
    if options.pairs < 1 or options.scale <= 0:
        parser.error("--pairs and --scale must be greater than 0")
    return options


def _introduce(facts: Dict[str, Any], options: argparse.Namespace) -> str:
    """The machine, and what keeps the figures from being quoted."""
    lines = [
        "%(cpus)d CPUs, %(memory)s, %(filesystem)s, Linux %(kernel)s %(architecture)s, %(python)s"
        % dict(facts, memory="%.0f GiB" % (facts["memory"] / 2**30))
    ]
    if facts["load"] > QUIET_LOAD:
        lines.append("NOT QUIET: the load was %.2f before anything was started" % facts["load"])
    if not machine.can_drop_caches():
        lines.append("WARM: only root can empty the page cache, so everything is measured with a warm one")
    if options.pairs < 5 or options.scale != 1:
        lines.append("A TRIAL: %d pairs at scale %g" % (options.pairs, options.scale))
    return "\n".join(lines)


def _peer(text: str) -> contestants.Contestant:
    try:
        return contestants.given(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(str(exc)) from None


def _write(options: argparse.Namespace, facts: Dict[str, Any], results: List[Dict[str, Any]]) -> None:
    table = _introduce(facts, options) + time.strftime("; %-d %B %Y") + "\n\n" + publish.markdown(results)
    if options.json:
        asked = {name: value for name, value in vars(options).items() if name != "peer"}
        everything = {"machine": facts, "options": asked, "results": results}
        _write_text(options.json, json.dumps(everything, indent=1) + "\n")
    if options.markdown:
        _write_text(options.markdown, table)
    if options.svg:
        _write_text(options.svg, publish.svg(results))
    if options.readme:
        with open(options.readme, encoding="utf-8") as stream:
            text = publish.between_markers(stream.read(), table)
        _write_text(options.readme, text)


def _write_text(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as stream:
        stream.write(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
