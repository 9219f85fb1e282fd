# SPDX-License-Identifier: Apache-2.0
"""Float64 twins of the acceptance rules, one request at a time, to be read beside the paper."""
