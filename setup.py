# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""What `pip install` puts where. To run from a checkout nothing of it is needed."""

import os
import re

from setuptools import find_packages, setup

HERE = os.path.dirname(os.path.abspath(__file__))


def version():
    """The package's __version__, read without importing it."""
    with open(os.path.join(HERE, "mlperf_common", "__init__.py"), encoding="utf-8") as stream:
        return re.search(r'^__version__ = "([^"]+)"$', stream.read(), re.MULTILINE).group(1)


setup(
    name="mlperf-common",
    version=version(),
    description="Copy file trees between filesystems fast, and prove that the copy is the same",
    license="Apache-2.0",
    packages=find_packages(include=["mlperf_common", "mlperf_common.*"]),
    # direct_io.py lay beside the scripts in older installations: installing it here overwrites a stale copy.
    scripts=["client/fastcp", "client/fastmd5", "client/dropcache", "client/direct_io.py"],
    data_files=[
        ("share/man/man1", ["client/man/fastcp.1", "client/man/fastmd5.1", "client/man/dropcache.1"]),
        (
            "share/bash-completion/completions",
            ["client/completion/fastcp", "client/completion/fastmd5", "client/completion/dropcache"],
        ),
    ],
    python_requires=">=3.8",
)
