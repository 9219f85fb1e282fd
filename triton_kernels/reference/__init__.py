# SPDX-License-Identifier: Apache-2.0
"""Plain torch twins of the kernels, to be read beside their contracts: same names, same arguments, no Triton."""
