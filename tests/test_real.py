# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Proofs of what nobody here wrote: the library of Python, /usr, /etc; of a file of several chunks; by two Pythons."""

# Takes about 60 s
from __future__ import annotations

import os
import subprocess
import sys

import support
from support import Sparse, TestCase, make_tree, run_tool, slow

GIB = 1 << 30


@slow
class RealTrees(TestCase):
    """Trees that nobody here wrote, and files too large for a table."""

    def test_each_copy_is_proved_in_every_way(self) -> None:
        library = os.path.dirname(os.__file__)
        places = [os.path.join(library, name) for name in ("encodings", "unittest", "idlelib")]
        for index, place in enumerate([*places, "/usr/share/doc", "/usr/lib/python3", "/etc"]):
            with self.subTest(place):
                name = f"copy{index}"
                run_tool("fastcp", "-a", "--manifest", f"m{index}", place, name, cwd=self.tmp, expect=0, timeout=120)
                run_tool("fastmd5", "--compare", "-P", "--metadata", place, name, cwd=self.tmp, expect=0, timeout=120)
                run_tool("fastmd5", "-P", "-C", name, "-c", "--extra", "--quiet", f"m{index}", cwd=self.tmp, expect=0)
                diff = subprocess.run(["diff", "-r", "--no-dereference", place, self.path(name)], check=False)
                self.assertEqual(diff.returncode, 0)

    def test_the_digests_are_those_of_md5sum(self) -> None:
        """Every file under a chunk: `md5sum -c` takes our lines once they are put in its form."""
        library = os.path.dirname(os.__file__)
        for root in (os.path.join(library, "encodings"), os.path.join(library, "lib2to3"), "/usr/share/doc"):
            if not os.path.isdir(root):
                continue  # Python 3.13 has no lib2to3
            with self.subTest(root):
                wanted = subprocess.run(
                    ["find", root, "-type", "f", "-size", "+0", "-print0"],
                    stdout=subprocess.PIPE,
                    check=True,
                ).stdout.split(b"\0")[:-1]
                listed = run_tool("fastmd5", "-q", "-z", "-P", root, expect=0, timeout=120).stdout_bytes
                found = {line.split(b"\t")[0]: line.split(b"\t") for line in listed.split(b"\0")[:-1]}
                self.assertGreater(len(wanted), 100)
                text = b"".join(b"%s  %s\0" % (found[path][3], path) for path in wanted)
                names = b"\0".join(wanted)
                command = ["xargs", "-0", "md5sum", "-z", "--"]
                done = subprocess.run(command, input=names, stdout=subprocess.PIPE, check=True)
                self.assertEqual(done.stdout, text)
                plain = [path for path in wanted if not set(b"\n\r\\") & set(path)]
                text = b"".join(b"%s  %s\n" % (found[path][3], path) for path in plain)
                done = subprocess.run(["md5sum", "-c", "--strict", "--quiet"], input=text, check=False)
                self.assertEqual(done.returncode, 0)

    def test_two_pythons_say_the_same(self) -> None:
        programs = [program for program in support.pyenv_pythons() if support._version(program) >= (3, 8)]
        others = [program for program in programs if not os.path.samefile(program, sys.executable)]
        if not others:
            self.skipTest("there is no other Python here")
        place = os.path.join(os.path.dirname(os.__file__), "email")
        for words in (["-q", "--all", "-P", place], ["-q", "--json", place + "/mime"], ["-qz", "-C", place, "."]):
            with self.subTest(words=words):
                here = run_tool("fastmd5", *words, expect=0, timeout=120).stdout_bytes
                there = run_tool("fastmd5", *words, python=others[0], expect=0, timeout=120).stdout_bytes
                self.assertEqual(here, there)

    def test_a_bit_in_each_chunk_of_a_large_file(self) -> None:
        # --compare would read twice as much each time; test_checksum compares every chunk of small ones.
        size = 3 * GIB + 1
        flipped = (7, GIB + GIB // 2, 3 * GIB - 1, 3 * GIB)
        make_tree(self.path("s"), {"big": Sparse(size, dict.fromkeys(flipped, b"U"))})
        text = run_tool("fastmd5", "-q", "-C", self.path("s"), ".", expect=0, timeout=120).stdout_bytes
        self.assertEqual(text.count(b"\n"), 4)
        make_tree(self.path("d"), {"big": Sparse(size, dict.fromkeys(flipped, b"U"))})
        for chunk, place in enumerate(flipped):
            start, end = chunk * GIB, min(size, (chunk + 1) * GIB)
            with self.subTest(chunk=chunk), open(self.path("d/big"), "r+b", buffering=0) as file:
                file.seek(place)
                file.write(b"\x57")
                done = run_tool("fastmd5", "-C", self.path("d"), "-c", input=text, expect=1, timeout=120)
                self.assertEqual(done.stdout, f"big: FAILED (bytes {start} to {end} differ)\n")
                file.seek(place)
                file.write(b"\x55")


if __name__ == "__main__":
    support.main()
