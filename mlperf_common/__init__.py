# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Tools that MLPerf training and inference jobs share: see the subpackages."""

__version__ = "1.0.0"
