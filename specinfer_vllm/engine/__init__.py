# SPDX-License-Identifier: Apache-2.0
"""The adapter between token trees and vLLM: one step's decisions, and the hooks of each runner."""
