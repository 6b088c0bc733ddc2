# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""tests/bench at a tiny scale: that it measures what it says, checks the copies, and writes what it is asked for."""

# Takes about 20 s
from __future__ import annotations

import json
import os
import sys
from typing import Any, Dict
from xml.etree import ElementTree

import support
from support import ROOT, TestCase, needs, slow

BENCH = os.path.join(ROOT, "tests", "bench", "bench.py")


@slow
class Bench(TestCase):
    def bench(self, *words: str, expect: int = 0) -> Any:
        common = ["--dir", self.tmp, "--pairs", "2", "--scale", "0.001", "--warm"]
        return support.run([sys.executable, BENCH, *common, *words], expect=expect, timeout=120)

    def data(self, *words: str) -> Dict[str, Any]:
        self.bench("--json", self.path("json"), *words)
        with open(self.path("json"), encoding="utf-8") as stream:
            return {result["case"]: result for result in json.load(stream)["results"]}

    def test_small_files_against_each_peer(self) -> None:
        with open(self.path("page"), "w", encoding="utf-8") as stream:
            stream.write("before\n<!-- figures: begin; x -->\nold\n<!-- figures: end -->\nafter\n")
        words = ["--peer", "mine=cp -a {src} {dst}", "--markdown", self.path("md"), "--svg", self.path("svg")]
        found = self.data("small", *words, "--readme", self.path("page"))["small"]
        for name in ("fastcp", "cp -r", "tar | tar", "mine"):
            runs = found["contestants"][name]
            self.assertEqual(len(runs["seconds"]), 2)
            self.assertGreater(min(runs["rss"]), 1 << 20)
            spread = runs["summary"]
            self.assertTrue(spread["min"] <= spread["median"] <= spread["max"])
        self.assertEqual([r["wanted"] for r in found["ratios"] if (r["what"], r["to"]) == ("seconds", "cp -r")], [0.55])
        with open(self.path("md"), encoding="utf-8") as stream:
            table = stream.read()
        self.assertIn("| `mine` | ", table)
        with open(self.path("page"), encoding="utf-8") as stream:
            page = stream.read()
        self.assertEqual(page, "before\n<!-- figures: begin; x -->\n" + table + "<!-- figures: end -->\nafter\n")
        chart = ElementTree.parse(self.path("svg")).getroot()
        texts = [text.text or "" for text in chart.iter("{http://www.w3.org/2000/svg}text")]
        self.assertTrue(any(text.endswith("/ mine") for text in texts), texts)
        self.assertEqual(sorted(os.listdir(self.tmp)), ["json", "md", "page", "svg"])

    def test_a_peer_that_makes_no_copy_is_found_out(self) -> None:
        done = self.bench("small", "--peer", "liar=mkdir {dst} && : {src}", expect=1)
        self.assertIn("not a copy", done.stderr)
        self.bench("small", "--peer", "nothing", expect=2)

    @needs("cc")
    def test_where_each_call_is_late(self) -> None:
        found = self.data("late", "walk", "planning")
        self.assertGreater(min(found["late"]["contestants"]["cp -r"]["seconds"]), 0.03)  # 10 files, 5 calls, 1 ms
        figures = {figure["name"]: figure["value"] for figure in found["walk"]["figures"]}
        self.assertGreater(figures["planning by one process"], 0.05)
        self.assertEqual(len(found["planning"]["figures"]), 2)
        found = self.data("flat", "workers", "--pairs", "1")
        self.assertGreater(found["flat"]["figures"][0]["value"], 0.01)
        self.assertEqual(len(found["workers"]["figures"]), 15)


if __name__ == "__main__":
    support.main()
