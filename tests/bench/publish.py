# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Results, as `report.as_data` gives them, for a page: a Markdown table, and a chart of the ratios in SVG."""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Sequence
from xml.sax.saxutils import escape

Results = Sequence[Dict[str, Any]]

BEGIN, END = "<!-- figures: begin", "<!-- figures: end -->"

ROW, LEFT, WIDTH = 22, 430, 420  # pixels: height of a bar's row, of the names, of the bars
WIDEST = 2.0  # the ratio at the right edge; bars end there


class Bar(NamedTuple):
    """A ratio: what it is of, its median, its smallest and largest, what was wanted (None: nothing)."""

    name: str
    median: float
    min: float
    max: float
    wanted: Any


def markdown(results: Results) -> str:
    """A row for each contestant and figure; the ratio is ours over theirs, median (smallest to largest)."""
    lines = ["| what | who | seconds: median (min to max) | CPU s | largest process, MB | ratio | wanted |"]
    lines.append("|---|---|---|---|---|---|---|")
    for result in results:
        lines += _rows(result)
    return "\n".join(lines) + "\n"


def _rows(result: Dict[str, Any]) -> Iterator[str]:
    what = "%s, %s" % (result["title"], result["cache"])
    for name, runs in result["contestants"].items():
        spread = runs["summary"]
        seconds = "%.2f (%.2f to %.2f)" % (spread["median"], spread["min"], spread["max"])
        cpu = sorted(user + system for user, system in zip(runs["user"], runs["system"]))
        found = [r for r in result["ratios"] if r["to"] == name and r["what"] == "seconds"]
        ratio = "%.2f (%.2f to %.2f)" % (found[0]["median"], found[0]["min"], found[0]["max"]) if found else ""
        wanted = _wanted(found[0]["wanted"], found[0]["met"]) if found else ""
        memory = max(runs["rss"]) / 1e6
        yield "| %s | `%s` | %s | %.2f | %.0f | %s | %s |" % (
            what, name.replace("|", "\\|"), seconds, cpu[len(cpu) // 2], memory, ratio, wanted
        )  # fmt: skip
        what = ""
    for ratio in result["ratios"]:
        if ratio["what"] == "cpu":
            text = "%.2f (%.2f to %.2f)" % (ratio["median"], ratio["min"], ratio["max"])
            name = "CPU, over `%s`" % ratio["to"].replace("|", "\\|")
            yield "| %s | %s | | | | %s | %s |" % (what, name, text, _wanted(ratio["wanted"], ratio["met"]))
    for figure in result["figures"]:
        value = "%.4g %s" % (figure["value"], figure["unit"])
        yield "| %s | %s | | | | %s | %s |" % (what, figure["name"], value, _wanted(figure["wanted"], figure["met"]))
        what = ""


def _wanted(wanted: Any, met: Any) -> str:
    return "" if wanted is None else "at most %g: %s" % (wanted, "met" if met else "**not met**")


def bars(results: Results) -> List[Bar]:
    """The ratios of seconds, in the order of the cases."""
    return [
        Bar("%s / %s" % (result["title"], ratio["to"]), ratio["median"], ratio["min"], ratio["max"], ratio["wanted"])
        for result in results
        for ratio in result["ratios"]
        if ratio["what"] == "seconds"
    ]


def svg(results: Results) -> str:
    """A bar for each ratio, the range of its rounds as a line on it, what was wanted as a mark; at 1 is the peer."""
    found = bars(results)
    height = ROW * (len(found) + 2)
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d" font-family="sans-serif" font-size="11">'
        % (LEFT + WIDTH + 60, height),
        '<rect width="100%" height="100%" fill="white"/>',
        '<text x="%d" y="14">time of fastcp or fastmd5, over that of the other: less is better</text>' % LEFT,
    ]
    for number, bar in enumerate(found):
        lines += _bar(bar, ROW * (number + 1))
    at = _x(1.0)
    lines.append('<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="black"/>' % (at, ROW, at, height - ROW))
    return "\n".join([*lines, "</svg>", ""])


def _x(ratio: float) -> float:
    return LEFT + WIDTH * min(ratio, WIDEST) / WIDEST


def _bar(bar: Bar, top: int) -> Iterator[str]:
    middle = top + ROW / 2
    met = bar.wanted is None or bar.median <= bar.wanted
    yield '<text x="%d" y="%.1f" text-anchor="end">%s</text>' % (LEFT - 6, middle + 4, escape(bar.name))
    yield '<rect x="%d" y="%d" width="%.1f" height="%d" fill="%s"/>' % (
        LEFT, top + 4, _x(bar.median) - LEFT, ROW - 8, "#4878a8" if met else "#c06048"
    )  # fmt: skip
    low, high = _x(bar.min), _x(bar.max)
    yield '<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="black"/>' % (low, middle, high, middle)
    if bar.wanted is not None:
        at = _x(bar.wanted)
        yield '<line x1="%.1f" y1="%d" x2="%.1f" y2="%d" stroke="#208020" stroke-width="2"/>' % (
            at, top + 1, at, top + ROW - 1
        )  # fmt: skip
    yield '<text x="%.1f" y="%.1f">%.2f</text>' % (max(_x(bar.median), high) + 5, middle + 4, bar.median)


def between_markers(text: str, table: str) -> str:
    """A page's text with ``table`` between its markers. Raises ValueError where it has none."""
    begin = text.find(BEGIN)
    end = text.find(END, begin)
    if begin < 0 or end < 0:
        raise ValueError("no markers for the figures")
    start = text.index("\n", begin) + 1
    return text[:start] + table + text[end:]
