# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Results as a table for people and as plain data for programs: minimum, median, maximum, and ratios by round."""

from __future__ import annotations

import statistics
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

from race import Figure, Ratio, Result

NAME = 42  # columns


class Spread(NamedTuple):
    """Smallest, middle and largest of a series."""

    min: float
    median: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """The spread of one value or more."""
    return Spread(min(values), statistics.median(values), max(values))


def series(result: Result, name: str, what: str) -> List[float]:
    """A contestant's ``what`` in each round: seconds that count, or cpu: user and system seconds."""
    if what == "seconds":
        return result.seconds[name]
    return [run.user + run.system for run in result.runs[name]]


def ratios(result: Result, ratio: Ratio) -> List[float]:
    """The first contestant's over another's, round by round."""
    ours = series(result, next(iter(result.runs)), ratio.what)
    theirs = series(result, ratio.to, ratio.what)
    return [mine / max(other, 1e-9) for mine, other in zip(ours, theirs)]


def is_met(value: float, wanted: Optional[float]) -> Optional[bool]:
    """Whether a figure is as wanted; None if nothing is."""
    return None if wanted is None else value <= wanted


# ----------------------------------------------------------------------------------------------------- for people


def text(result: Result, scale: float) -> str:
    """A case's table, some lines."""
    scaled = "" if scale == 1 else ", all times %g" % scale
    lines = ["", "%s%s; %s" % (result.title, scaled, result.cache)]
    if result.runs:
        head = ("seconds: min", "median", "max", "cpu: median", "largest process")
        lines.append(" " * NAME + "%14s%9s%9s%14s%18s" % head)
        lines += [_line(result, name) for name in result.runs]
    lines += [_ratio_line(result, ratio) for ratio in result.ratios]
    lines += [_figure_line(figure) for figure in result.figures]
    if result.any_ratio:
        lines.append("  (one of the two is enough)")
    return "\n".join(lines)


def _line(result: Result, name: str) -> str:
    seconds = spread(series(result, name, "seconds"))
    cpu = spread(series(result, name, "cpu")).median
    rss = max(run.rss for run in result.runs[name]) / 1e6
    return "  %-*s%14.3f%9.3f%9.3f%14.2f%15.0f MB" % (NAME - 2, name, *seconds, cpu, rss)


def _ratio_line(result: Result, ratio: Ratio) -> str:
    values = ratios(result, ratio)
    name = "%s, %s / %s" % (ratio.what, next(iter(result.runs)), ratio.to)
    each = " ".join("%.2f" % value for value in values)
    found = spread(values)
    said = _said(found.median, ratio.wanted)
    return "  %-*s%14.3f%9.3f%9.3f  %s\n  %*s%s" % (NAME - 2, name, *found, said, NAME, "by round: ", each)


def _figure_line(figure: Figure) -> str:
    said = _said(figure.value, figure.wanted)
    return "  %-*s%14.3f %s  %s" % (NAME - 2, figure.name, figure.value, figure.unit, said)


def _said(value: float, wanted: Optional[float]) -> str:
    met = is_met(value, wanted)
    return "" if met is None else "wanted <= %g: %s" % (wanted, "met" if met else "NOT MET")


# --------------------------------------------------------------------------------------------------- for programs


def as_data(name: str, result: Result) -> Dict[str, Any]:
    """All of a result in what JSON knows: each run's figures, each ratio's rounds."""
    return {
        "case": name,
        "title": result.title,
        "cache": result.cache,
        "contestants": {each: _runs_as_data(result, each) for each in result.runs},
        "ratios": [_ratio_as_data(result, ratio) for ratio in result.ratios],
        "one_ratio_is_enough": result.any_ratio,
        "figures": [dict(figure._asdict(), met=is_met(figure.value, figure.wanted)) for figure in result.figures],
    }


def _runs_as_data(result: Result, name: str) -> Dict[str, Any]:
    runs = result.runs[name]
    found: Dict[str, Any] = {"seconds": result.seconds[name], "summary": spread(result.seconds[name])._asdict()}
    for field in ("until_exit", "syncing", "user", "system", "rss"):
        found[field] = [getattr(run, field) for run in runs]
    found["last_line"] = runs[0].said.rpartition("\n")[2]
    return found


def _ratio_as_data(result: Result, ratio: Ratio) -> Dict[str, Any]:
    values = ratios(result, ratio)
    found = spread(values)
    return dict(
        ratio._asdict(),
        of=next(iter(result.runs)),
        rounds=values,
        **found._asdict(),
        met=is_met(found.median, ratio.wanted),
    )
