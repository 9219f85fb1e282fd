# SPDX-License-Identifier: Apache-2.0
"""Token-tree speculative decoding for stock vLLM."""

__version__ = "0.1.0"
