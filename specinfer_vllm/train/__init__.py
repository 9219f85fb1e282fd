# SPDX-License-Identifier: Apache-2.0
"""The SSM workshop: cut a small model out of the LLM, let the LLM write a corpus, tune SSMs on it."""
