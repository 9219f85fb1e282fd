# SPDX-License-Identifier: Apache-2.0
"""Proposers: whatever guesses an LLM's next tokens, one per file behind one interface; only ssm.py needs vLLM."""
