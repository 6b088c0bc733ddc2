# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Several processes of one job: which rank each is, how they talk, and a temporary directory that all of them share."""
