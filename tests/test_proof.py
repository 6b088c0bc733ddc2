# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Proof of a copy: manifests and their checks, comparison, --verify, and that none of them shares a blind spot."""

# Takes about 20 s
from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from typing import Any

import support
from support import Fifo, Link, Random, Sparse, TestCase, make_tree, needs_root, run_tool, slow

MIB = 1 << 20
GIB = 1 << 30
TREE = {
    "a": b"content",
    "d": {"e": {}, "f": Random(3 * MIB, seed=1), "tab\tnew\nline": b"odd"},
    "empty": b"",
    "l": Link("a"),
}


class Base(TestCase):
    def setUp(self) -> None:
        self.source = self.make("src", TREE)
        shutil.copytree(self.source, self.path("dst"), symlinks=True)
        self.manifest = self.path("m")
        with open(self.manifest, "wb") as file:
            file.write(self.md5("-q", "--all", "-P", "-C", "src", ".").stdout_bytes)

    def md5(self, *args: str, expect: int = 0, **options: Any) -> support.Result:
        return run_tool("fastmd5", *args, cwd=self.tmp, expect=expect, **options)

    def check(self, *args: str, expect: int = 0, **options: Any) -> support.Result:
        return self.md5("-P", "-C", "dst", "-c", *args, expect=expect, **options)


class Check(Base):
    def test_all_is_well(self) -> None:
        result = self.check("m", "--extra")
        self.assertEqual(result.stdout.count(": OK\n"), 8)
        self.assertIn("\\d/tab\\tnew\\nline: OK\n", result.stdout)
        self.assertEqual(self.check("m", "-q").stdout, "")
        self.assertEqual(self.check("--status", "m").stdout + self.check("--status", "m").stderr, "")
        with open(self.manifest, "rb") as file:
            self.assertEqual(self.check(input=file.read()).stdout, result.stdout)

    def damage(self) -> None:
        with open(self.path("dst", "d", "f"), "r+b") as file:
            file.seek(2 * MIB)
            file.write(b"!")
        os.unlink(self.path("dst", "a"))
        os.rmdir(self.path("dst", "d", "e"))
        make_tree(self.path("dst", "empty"), b"not any more") if not os.unlink(self.path("dst", "empty")) else None
        os.unlink(self.path("dst", "l"))
        os.symlink("b", self.path("dst", "l"))
        make_tree(self.path("dst", "new"), {"x": b"", "y": b"1"})

    def test_each_damage_has_its_words(self) -> None:
        self.damage()
        result = self.check("m", "--extra", expect=1)
        for line in (
            "a: FAILED (missing)",
            "d/e: FAILED (missing)",
            f"d/f: FAILED (bytes 0 to {3 * MIB} differ)",
            "empty: FAILED (size is 12, not 0)",
            "l: FAILED (its target differs)",
            "new: EXTRA",
            "new/x: EXTRA",
            "new/y: EXTRA",
            "d: OK",
        ):
            self.assertIn(line + "\n", result.stdout)
        self.assertRegex(result.stderr, "FAILED: 8 paths checked: 3 OK, 3 different, 2 missing, 3 extra")
        self.assertEqual(self.check("m", "--status", expect=1).stdout, "")
        ignoring = self.check("m", "--ignore-missing", expect=1)
        self.assertNotIn("missing)", ignoring.stdout)

    def test_ignoring_what_is_missing_is_no_check_of_nothing(self) -> None:
        with open(self.path("one"), "wb") as file:
            file.write(b"none\t0\t1\t" + hashlib.md5(b"x").hexdigest().encode() + b"\n")
        self.assertIn("nothing was verified", self.check("one", "--ignore-missing", expect=1).stderr)
        self.assertIn("nothing was verified", self.check("/dev/null", expect=1).stderr)

    @slow
    def test_every_cut_within_lines_is_noticed(self) -> None:
        with open(self.manifest, "rb") as file:
            text = file.read()
        ends = {i + 1 for i, byte in enumerate(text) if byte == 10}
        for cut in [*range(1, 60), len(text) - 1, len(text) - 20]:
            if cut not in ends:
                with self.subTest(cut):
                    self.assertIn("it was cut", self.check(input=text[:cut], expect=1).stderr)

    @slow
    def test_a_cut_within_a_file_is_noticed(self) -> None:
        for place in ("src", "dst"):
            make_tree(self.path(place, "big"), Sparse(GIB + 5, {GIB: b"end"}))
        text = self.md5("-q", "-C", "src", "big").stdout_bytes
        self.assertEqual(text.count(b"\n"), 2)
        first, second = text.splitlines(keepends=True)
        self.check(input=text)
        self.assertIn(f"big: FAILED (size is {GIB + 5}, not {GIB})", self.check(input=first, expect=1).stdout)
        result = self.check("-w", "--strict", input=second, expect=1)
        self.assertIn("the chunks before offset", result.stderr)
        with open(self.path("dst", "big"), "r+b") as file:
            file.seek(GIB + 2)
            file.write(b"X")
        result = self.check(input=text, expect=1)
        self.assertIn(f"big: FAILED (bytes {GIB} to {GIB + 5} differ)", result.stdout)

    def test_malformed_lines(self) -> None:
        with open(self.manifest, "ab") as file:
            file.write(b"rubbish\n")
        self.assertIn("warning: 1 line is improperly formatted", self.check("m").stderr)
        self.assertIn("'m': line 9: improperly formatted", self.check("-w", "m").stderr)
        self.check("--strict", "m", expect=1)

    def test_a_manifest_that_cannot_be_read(self) -> None:
        tool = " ".join(support.command_line("fastmd5", "-c"))
        for words, said in (("<&-", "'standard input': Bad file descriptor"), ("none", "'none': No such file"),
                            ("src", "'src': Is a directory")):  # fmt: skip
            with self.subTest(words):
                result = support.run(["bash", "-c", f"{tool} {words}"], cwd=self.tmp, expect=1)
                self.assertIn(said, result.stderr)
                self.assertNotIn("internal error", result.stderr)

    def test_formats_are_read_back(self) -> None:
        for option in ("-z", "--json"):
            text = self.md5("-q", option, "--all", "-P", "-C", "src", ".").stdout_bytes
            self.assertIn("8 OK", self.check(option, input=text).stderr)

    def test_like_md5sum(self) -> None:
        lines = []
        for directory, _, names in os.walk("/usr/share/doc"):
            for name in sorted(names):
                path = os.path.join(directory, name)
                if os.path.isfile(path) and not os.path.islink(path) and os.path.getsize(path):
                    lines.append(path)
            if len(lines) > 300:
                break
        self.assertTrue(lines)
        ours = {}
        for line in self.md5("-q", *lines).stdout.splitlines():
            path, _, _, digest = line.split("\t")
            ours[path] = digest
        theirs = subprocess.run(["md5sum", "--", *lines], stdout=subprocess.PIPE, check=True).stdout.decode()
        self.assertEqual("".join(f"{ours[path]}  {path}\n" for path in lines), theirs)


class Compare(Base):
    def compare(self, *args: str, expect: int = 0) -> support.Result:
        return self.md5("--compare", *args, expect=expect)

    def test_identical(self) -> None:
        self.assertIn("identical: 4 files, 3 directories, 1 link compared", self.compare("-P", "src", "dst").stderr)
        self.assertEqual(self.compare("-P", "src/a", "dst/a").stdout, "")

    @slow
    def test_each_difference(self) -> None:
        for name, change, words in (
            ("a", None, "missing in DEST: 'a' (file)"),
            ("d", None, "missing in DEST: 'd' (directory with 3 entries below it)"),
            ("new", b"1", "extra in DEST: 'new' (file)"),
            ("a", {}, "type differs: 'a' (file in SOURCE, directory in DEST)"),
            ("l", b"content", "type differs: 'l' (symbolic link in SOURCE, file in DEST)"),
            ("a", b"longer content", "size differs: 'a' (7 bytes in SOURCE, 14 in DEST)"),
            ("a", b"CONTENT", "content differs: 'a' (bytes 0 to 7)"),
            ("l", Link("b"), "link target differs: 'l' ('a' in SOURCE, 'b' in DEST)"),
            ("empty", b"x", "size differs: 'empty' (0 bytes in SOURCE, 1 in DEST)"),
        ):
            with self.subTest(words):
                shutil.rmtree(self.path("dst"))
                shutil.copytree(self.source, self.path("dst"), symlinks=True)
                path = self.path("dst", name)
                if os.path.lexists(path):
                    shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
                if change is not None:
                    make_tree(path, change)
                result = self.compare("-P", "src", "dst", expect=1)
                self.assertEqual(result.stdout, words + "\n")
                self.assertIn("NOT IDENTICAL", result.stderr)

    def test_metadata(self) -> None:
        shutil.rmtree(self.path("dst"))
        run_tool("fastcp", "-a", "src", "dst", cwd=self.tmp, expect=0)
        self.compare("-P", "--metadata", "src", "dst")
        os.chmod(self.path("dst", "a"), 0o600)
        os.utime(self.path("dst", "empty"), ns=(0, 5))
        result = self.compare("-P", "--metadata", "src", "dst", expect=1)
        self.assertIn("metadata differs: 'a' (mode 0644 in SOURCE, 0600 in DEST)", result.stdout)
        self.assertRegex(result.stdout, r"metadata differs: 'empty' \(modification time .*, 0.000000005 in DEST")
        self.compare("-P", "src", "dst")

    def test_trouble_is_no_proof(self) -> None:
        self.assertIn("No such file", self.compare("src", "none", expect=1).stderr)
        make_tree(self.path("dst", "p"), Fifo())
        self.assertIn("is a FIFO", self.compare("src", "dst", expect=1).stderr)
        self.compare("--skip-special", "src", "dst")
        os.symlink("nowhere", self.path("src", "dangling"))
        self.assertIn("dangling", self.compare("src", "dst", expect=1).stderr)

    @slow
    def test_large_files_chunk_by_chunk(self) -> None:
        for place in ("src", "dst"):
            make_tree(self.path(place, "big"), Sparse(GIB + 1, {5: b"x", GIB: b"y"}))
        self.compare("-P", "src/big", "dst/big")
        with open(self.path("dst", "big"), "r+b") as file:
            file.seek(GIB)
            file.write(b"z")
        result = self.compare("-P", "src", "dst", expect=1)
        self.assertEqual(result.stdout, f"content differs: 'big' (bytes {GIB} to {GIB + 1})\n")

    @slow
    @needs_root
    def test_nothing_is_written(self) -> None:
        with support.mounted("ext4", size=64 * MIB, options="strictatime") as place:
            shutil.copytree(self.source, os.path.join(place, "src"), symlinks=True)
            files = [os.path.join(place, "src", name) for name in ("a", "d/f", "empty")]
            for path in files:
                os.utime(path, ns=(1, 1))
            for readonly in (False, True):
                if readonly:
                    support.run(["mount", "-o", "remount,ro", place], expect=0)
                self.compare("-P", self.source, os.path.join(place, "src"))
                self.md5("-P", "-C", os.path.join(place, "src"), "-c", "m")
                self.assertEqual([os.stat(path).st_atime_ns for path in files], [1, 1, 1])


class OfACopy(Base):
    def copy(self, *args: str, expect: int = 0, **options: Any) -> support.Result:
        return run_tool("fastcp", *args, cwd=self.tmp, expect=expect, **options)

    def listing(self, place: str, *options: str) -> bytes:
        return self.md5("-q", "--all", *options, "-C", place, ".").stdout_bytes

    def read(self, name: str) -> bytes:
        with open(self.path(name), "rb") as file:
            return file.read()

    @slow
    def test_the_manifest_is_the_listing(self) -> None:
        make_tree(self.path("src", "large"), Sparse(70 * MIB + 1, {3 * MIB: b"x" * 5000, 66 * MIB: b"y"}))
        os.link(self.path("src", "a"), self.path("src", "d", "twin"))
        for index, options in enumerate((["-r"], ["-rP"], ["-a"], ["-a", "-n", "1"], ["-r", "--verify"])):
            with self.subTest(options):
                self.copy(*options, "--manifest", f"m{index}", "src", f"c{index}")
                links = ["-P"] if "P" in "".join(options) or "-a" in options else []
                self.assertEqual(self.read(f"m{index}"), self.listing("src", *links))
                self.assertEqual(self.read(f"m{index}"), self.listing(f"c{index}", *links))
                self.md5(*links, "-C", f"c{index}", "-c", f"m{index}", "--extra")

    def test_what_an_update_leaves_is_read(self) -> None:
        self.copy("-a", "src", "c")
        os.unlink(self.path("c", "a"))
        os.unlink(self.path("c", "l"))
        for options in ([], ["--checksum"]):
            self.copy("-auT", *options, "--manifest", "n", "-f", "src", "c")
            self.assertEqual(self.read("n"), self.listing("src", "-P"))

    def test_where_it_may_be(self) -> None:
        self.make("exists", b"old")
        for args, words in (
            (["--manifest", "exists", "-r", "src", "c"], "cannot create the manifest 'exists': File exists"),
            (["--manifest", "src/a", "-rf", "src", "c"], "cannot overwrite source 'src/a'"),
            (["--manifest", "c/a", "-rf", "src", "c"], "the copy writes there"),
            (["--manifest", "c", "-rf", "src", "c"], "the copy writes there"),
            (["--manifest", "dst", "-rf", "src", "c"], "it is a directory"),
        ):
            with self.subTest(args):
                self.assertIn(words, self.copy(*args, expect=1).stderr)
                self.assertFalse(os.path.exists(self.path("c")))
        self.assertEqual(self.read("exists"), b"old")

    def test_it_appears_only_when_the_copy_succeeded(self) -> None:
        self.make("dst2", {"a": {"in": b"the way"}})
        self.copy("-rfT", "--manifest", "n", "src", "dst2", expect=1)
        with self.broken("os.pwritev", "lambda *a: (_ for _ in ()).throw(OSError(5, 'Input/output error'))") as env:
            self.copy("-r", "--manifest", "n", "src", "c", env=env, expect=1)
        self.assertFalse(os.path.exists(self.path("n")))
        self.assert_no_leftovers(self.tmp)

    def broken(self, name: str, replacement: str, extra: str = "") -> Any:
        """An environment in which a function of the library, or of ours, is another one."""
        module = name.rpartition(".")[0] if "_Found" not in name else "mlperf_common.fileio.walk"
        place = self.make(f"broken{len(os.listdir(self.tmp))}", {})
        loader = (
            "import os, sys\n"
            f"sys.path.insert(0, {support.ROOT!r})\n"
            f"import {module}\n"
            f"real = {name}\n{extra}\n"
            f"{name} = {replacement}\n"
            "sys.path.pop(0)\n"
        )
        make_tree(os.path.join(place, "sitecustomize.py"), loader.encode())
        return _Env({"PYTHONPATH": place})

    # What is broken in the code, and how. Either --verify fails or --compare does, though both have the fault.
    MUTATIONS = (
        ("os.pwritev", "lambda fd, b, o, *f: (real(fd, [memoryview(b[0])[:-4096]], o), len(b[0]))[1]"),
        ("os.pwritev", "lambda fd, b, o, *f: real(fd, b, o + 4096) if o else real(fd, b, o)"),
        ("os.pwritev", "lambda fd, b, o, *f: len(b[0])"),
        ("mlperf_common.fileio.batches.cut", "lambda s, e=0: real(s, e)[:-1]"),
        ("mlperf_common.fileio.batches.cut", "lambda s, e=0: [(0, 64 << 20)] * len(real(s, e))"),
        ("mlperf_common.fileio.batches.files_of", "lambda d: list(real(d))[:-1]"),
        ("mlperf_common.fileio.walk._Found._classify", "lambda self, e: e.name == 'd' or real(self, e)"),
        ("mlperf_common.fileio.walk._Found._classify", "lambda self, e: e.name == 'large' or real(self, e)"),
        ("mlperf_common.fileio.walk._Found._classify", "lambda self, e: e.name == 'l' or real(self, e)"),
        ("mlperf_common.fileio.copyfile.move_small", "lambda w, s, size: size"),
        ("mlperf_common.fileio.copyfile.move_range", "lambda w, f, s, a, b, first: b - a"),
        ("mlperf_common.fileio.copytasks.FUNCTIONS", "{**real, 'extent': nothing}"),
        ("mlperf_common.fileio.copytasks.FUNCTIONS", "{**real, 'links': lambda w, b, fds: real['links'](w, b._replace("
         "names=b.names[1:]), fds)}"),
    )
    NOTHING = (
        "from mlperf_common.fileio import copytasks, facts\n"
        "def nothing(w, e, fds):\n"
        "    return copytasks.ExtentResult([], facts.learned(facts.facts_of(w, e.options)))\n"
    )

    @slow
    def test_no_mutation_passes_both(self) -> None:
        make_tree(self.path("src", "large"), Random(70 * MIB + 9, seed=7))
        for index, (name, replacement) in enumerate(self.MUTATIONS):
            extra = self.NOTHING if "nothing" in replacement else ""
            with self.subTest(name, replacement=replacement), self.broken(name, replacement, extra) as env:
                copied = self.copy("-rP", "-n", "2", "--verify", "src", f"x{index}", env=env, expect=None)
                statuses = [copied.returncode]
                if os.path.isdir(self.path(f"x{index}")):
                    compared = self.md5("--compare", "-P", "src", f"x{index}", env=env, expect=None)
                    statuses.append(compared.returncode)
                self.assertIn(1, statuses, copied)
                self.assertNotIn("sitecustomize", copied.stderr)

    @slow
    def test_verify_reads_what_is_on_the_storage(self) -> None:
        make_tree(self.path("src", "large"), Random(70 * MIB, seed=7))
        # The bytes are changed behind its back, after they were written and before they are read again.
        fault = "lambda fd: (os.pwrite(fd, b'!', 3) if os.fstat(fd).st_size > 3 else None, real(fd))[1]"
        with self.broken("os.fsync", fault) as env:
            result = self.copy("-r", "--verify", "src", "c", env=env, expect=1)
        self.assertIn("the storage does not have what was copied", result.stderr)
        for name in ("a", "large", "d/f"):
            self.assertFalse(os.path.exists(self.path("c", name)))
        self.copy("-r", "--verify", "src", "e")
        self.md5("--compare", "src", "e")

    @slow
    @needs_root
    def test_verified_from_the_cache_is_said(self) -> None:
        with support.mounted("tmpfs", size=64 * MIB) as place:
            result = self.copy("-r", "--verify", "src", os.path.join(place, "c"))
            self.assertTrue("verified from cache" in result.stderr or "io=direct" in result.stderr)
        with support.mounted_at(self.path("ramfs"), "-t", "ramfs", "ramfs") as place:
            self.assertIn("verified from cache", self.copy("-r", "--verify", "src", os.path.join(place, "c")).stderr)


class _Env(dict):  # type: ignore[type-arg]
    """An environment for the time of a with block."""

    def __enter__(self) -> _Env:
        return self

    def __exit__(self, *exc: object) -> None:
        pass


if __name__ == "__main__":
    support.main()
