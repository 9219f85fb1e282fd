# SPDX-License-Identifier: Apache-2.0
"""One benchmark per Triton kernel: checked against its torch reference, then timed. Needs torch and triton only."""
