# SPDX-License-Identifier: Apache-2.0
"""Lossless acceptance rules, one per file; torch only, the whole batch at once, nothing read back by the host."""
