# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""How many Lustre servers a new file in a directory would be spread over: it bounds how fast one large file can be.

Read from the extended attribute ``lustre.lov`` (struct lov_user_md of lustre_user.h, little-endian). Never fails: where
there is no Lustre, or a layout of an unknown kind, there is nothing to say.
"""

from __future__ import annotations

import os
import struct
from typing import Optional

ATTRIBUTE = "lustre.lov"

_PLAIN = (0x0BD10BD0, 0x0BD30BD0)  # LOV_USER_MAGIC_V1 and _V3
_COMPOSITE = 0x0BD60BD0  # LOV_USER_MAGIC_COMP_V1: progressive layouts
_LAYOUT = struct.Struct("<II16sIH")  # magic, pattern, the object's identity, bytes a stripe, stripes
_ALL = 0xFFFF


def stripe_note(directory: str) -> str:
    """A line on the stripes of new files in ``directory``, or "" where it is not on Lustre or has no such layout."""
    layout = _layout(directory)
    if layout is None or len(layout) < 4:
        return ""
    (magic,) = struct.unpack_from("<I", layout)
    if magic == _COMPOSITE:
        return "Lustre spreads new files over more servers as they grow (lfs getstripe -d)"
    if magic not in _PLAIN or len(layout) < _LAYOUT.size:
        return ""
    size, count = _LAYOUT.unpack_from(layout)[3:]
    if count == _ALL:
        return "Lustre spreads new files over all servers"
    if count == 0:
        return "Lustre spreads new files as the filesystem's default says (lfs getstripe -d)"
    each = " of %d KiB" % (size >> 10) if size else ""
    more = "; large files may be faster with more (lfs setstripe -c)" if count == 1 else ""
    return "Lustre spreads new files over %d stripe%s%s%s" % (count, "" if count == 1 else "s", each, more)


def _layout(directory: str) -> Optional[bytes]:
    try:
        return os.getxattr(directory, ATTRIBUTE)
    except OSError:  # no Lustre, or nothing is set there
        return None
