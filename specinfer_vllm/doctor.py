# SPDX-License-Identifier: Apache-2.0
"""What `specinfer doctor` finds out: whether `tree` works with the vLLM of this environment, and if not, why.

Given a command line of `vllm serve`, also what that will get: runner, attention, CUDA graphs, trees, or a refusal.

vLLM is imported only through the plug-in, and its absence is a finding like any other.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from typing import TYPE_CHECKING, Any

from specinfer_vllm import __version__, plugin
from specinfer_vllm.patches import hooks
from specinfer_vllm.patches.patch import SUPPORTED_VERSIONS, Hook, HookChanged, HookMissing, is_version_in, vllm_version

if TYPE_CHECKING:
    from specinfer_vllm.engine.outlook import Outlook

GROUP = "vllm.general_plugins"
NAME = "specinfer"
FOUND, MISSING, CHANGED = "found", "missing", "changed"
BOTH = "both"
PATCHED, UNPATCHED, RELIED_ON = "patched", "unpatched", "relied on"


@dataclass(frozen=True)
class HookFinding:
    """One place of vLLM that we rely on.

    runner    V1 or V2 where only that one's adapter uses it, else both
    use       patched (in this process's vLLM), unpatched (it should be), or relied on: subclassed or called
    state     found, missing, or changed since what relies on it was written
    detail    what differs; empty when found
    """

    target: str
    runner: str
    use: str
    reason: str
    versions: str
    state: str
    detail: str


@dataclass(frozen=True)
class Report:
    """Everything the doctor found.

    versions   what is installed, by name; None = not installed
    supported  releases of vLLM whose hooks were read
    device     what vLLM runs on; None when it cannot be asked
    plugin     entry_point, allowed (by VLLM_PLUGINS), VLLM_PLUGINS
    outlook    what the command line gets, or `--speculative-config tree` without one; None when vLLM cannot be asked
    problems   what keeps `tree` from working, a sentence each
    """

    versions: dict[str, str | None]
    supported: str
    device: str | None
    plugin: dict[str, Any]
    hooks: list[HookFinding]
    outlook: Outlook | None
    problems: list[str]

    @property
    def is_healthy(self) -> bool:
        """Whether `--speculative-config tree`, or the command line, can be expected to work."""
        return not self.problems and not (self.outlook and self.outlook.refusals)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `--json`."""
        return {"ok": self.is_healthy, **asdict(self)}


def examine(command_line: Sequence[str] | None = None) -> Report:
    """Load the plug-in as vLLM would, look at every hook, and at the command line when there is one."""
    versions, entry = installed(), entry_point()
    device = outlook = trouble = None
    problems = environment_problems(versions, entry)
    if versions["vllm"] is not None:
        if entry["entry_point"] and entry["allowed"]:
            plugin.register()
        try:
            device, trouble = plugin.device()
            outlook = plugin.outlook(command_line)
        except Exception as error:
            trouble = f"vllm cannot say what it runs on: {type(error).__name__}: {error}"
        problems += [trouble] if trouble else []
    findings = [find(hook) for hook in hooks.ALL]
    runner = outlook.runner if outlook else None
    # What only the other runner's adapter uses may be as it likes.
    problems += [
        each.detail for each in findings if each.state != FOUND and each.runner in (runner or each.runner, BOTH)
    ]
    if not problems and any(finding.use == UNPATCHED for finding in findings):
        problems.append("the plug-in stands aside; its warning says why")
    return Report(versions, SUPPORTED_VERSIONS, device, entry, findings, outlook, problems)


def installed() -> dict[str, str | None]:
    """Versions of what matters. vLLM's wheels have several names, so it is asked itself."""
    wheel = packages_distributions().get("vllm", [None])[0]
    try:
        vllm = vllm_version()
    except Exception:
        vllm = None
    return {
        "specinfer-vllm": __version__,
        "vllm": vllm,
        "vllm wheel": wheel,
        **{name: version_of(name) for name in ("torch", "triton", "transformers")},
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def version_of(distribution: str) -> str | None:
    """Its installed version."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def entry_point() -> dict[str, Any]:
    """Whether vLLM will find the plug-in, and whether VLLM_PLUGINS lets it load."""
    found = [point.value for point in entry_points(group=GROUP) if point.name == NAME]
    listed = os.environ.get("VLLM_PLUGINS")
    return {
        "entry_point": found[0] if found else None,
        "allowed": listed is None or NAME in listed.split(","),
        "VLLM_PLUGINS": listed,
    }


def environment_problems(versions: dict[str, str | None], entry: dict[str, Any]) -> list[str]:
    """What keeps the plug-in from loading, with the fix."""
    found = []
    if versions["vllm"] is None:
        broken = versions["vllm wheel"]
        found.append(
            f"vllm ({broken}) is installed and cannot be imported; try: python -c 'import vllm'"
            if broken
            else "vllm is not installed; install specinfer-vllm[cpu]"
        )
    elif not is_version_in(versions["vllm"], SUPPORTED_VERSIONS):
        found.append(f"vllm {versions['vllm']} is not one of the versions it knows ({SUPPORTED_VERSIONS})")
    if entry["entry_point"] is None:
        found.append(f"the entry point {NAME!r} of {GROUP} is not found; install the package into this environment")
    if not entry["allowed"]:
        found.append(f"VLLM_PLUGINS={entry['VLLM_PLUGINS']} does not allow it; add {NAME!r} or unset VLLM_PLUGINS")
    return found


def find(hook: Hook) -> HookFinding:
    """Look at one hook."""
    state, detail = FOUND, ""
    try:
        hook.check()
    except HookChanged as changed:
        state, detail = CHANGED, str(changed)
    except HookMissing as missing:
        state, detail = MISSING, str(missing)
    patch = next((each for each in hooks.PATCHES if each.target is hook), None)
    use = RELIED_ON if patch is None else PATCHED if patch.is_applied() else UNPATCHED
    return HookFinding(str(hook), runner_of(hook), use, hook.reason, hook.versions, state, detail)


def runner_of(hook: Hook) -> str:
    """Which runner's adapter uses it."""
    in_v1, in_v2 = hook in hooks.RUNNER, hook in hooks.RUNNER_V2
    if in_v1 == in_v2:
        return BOTH
    return "V1" if in_v1 else "V2"
