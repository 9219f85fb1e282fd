# SPDX-License-Identifier: Apache-2.0
"""Every touch of vLLM, one file per upstream target. Installed as `specinfer_vllm.patches`."""
