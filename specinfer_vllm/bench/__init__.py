# SPDX-License-Identifier: Apache-2.0
"""What demos, tests and measurements share: a real model, real prompts, runners."""
