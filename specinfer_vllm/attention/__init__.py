# SPDX-License-Identifier: Apache-2.0
"""Tree attention as vLLM attention backends."""
