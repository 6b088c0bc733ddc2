# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""``import direct_io`` for a script that lies next to fastcp: the names of mlperf_common.fileio.direct_io.

The package of the tree that this file belongs to is preferred to an installed one. Without either, it raises
ImportError. The tools themselves import the package, never this file.
"""

import os
import sys

# Links are followed, as the tools do. An installed copy finds no tree: it lies in a directory of programs.
_TREE = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
_IN_TREE = os.path.isfile(os.path.join(_TREE, "mlperf_common", "__init__.py"))

if _IN_TREE:
    sys.path.insert(0, _TREE)
try:
    from mlperf_common.fileio.direct_io import (
        BLOCK_SIZE,
        BUFFER_ALIGN,
        ShortFile,
        allocate_aligned_buffers,
        at_end,
        is_direct,
        is_unsupported,
        open_direct,
        pread,
        pwrite,
        round_up,
        set_direct,
    )
finally:
    # The package, once imported, finds its modules by itself: nothing else should come from this tree.
    if _IN_TREE:
        sys.path.remove(_TREE)

__all__ = [
    "BLOCK_SIZE",
    "BUFFER_ALIGN",
    "ShortFile",
    "allocate_aligned_buffers",
    "at_end",
    "is_direct",
    "is_unsupported",
    "open_direct",
    "pread",
    "pwrite",
    "round_up",
    "set_direct",
]
