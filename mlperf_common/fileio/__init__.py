# SPDX-FileCopyrightText: Copyright (c) the mlperf-common authors
# SPDX-License-Identifier: Apache-2.0
"""Copy file trees between shared and local filesystems, and prove that the copy is the same."""
