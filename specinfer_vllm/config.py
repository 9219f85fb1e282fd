# SPDX-License-Identifier: Apache-2.0
"""The options of a token tree: type, unit, range, default and help of each, and how they are read.

Imports nothing heavy: this module is loaded by every process that unpickles a configuration.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

METHOD = "tree"
PROPOSERS = ("ngram", "recycling")
VERIFIERS = ("auto", "greedy", "naive")
MERGES = ("union", "first")
MAX_NODES = 1024
MAX_DEPTH = 64
MAX_WIDTH = 64
MAX_SSMS = 8


class TreeOptionError(ValueError):
    """An option of the tree is unknown, out of range or contradicts another; the message names it and the fix."""


def option(default: Any, help: str, unit: str = "", low: int | None = None, high: int | None = None, choices=()):
    """A dataclass field that carries what `specinfer options` prints."""
    metadata = {"help": help, "unit": unit, "low": low, "high": high, "choices": tuple(choices)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class SsmOptions:
    """One small speculative model."""

    model: str = option("", "folder or hub id of a decoder model with the LLM's tokenizer")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    expansion: tuple[int, ...] | None = option(None, "children per node on each level; the tree's own when not given")
    width: int = option(4, "nodes kept per level when no expansion is given (EAGLE-2)", "nodes", 1, MAX_WIDTH)


@dataclass(frozen=True)
class TreeOptions:
    """What `--speculative-config tree` may carry. `from_value` reads every form a user can write."""

    ssms: tuple[SsmOptions, ...] = option(tuple, "small speculative models: paths, hub ids, or dicts of their options")
    proposers: tuple[str, ...] | None = option(
        None, "draft-free proposers merged in; ngram and recycling when there is no SSM", choices=PROPOSERS
    )
    expansion: tuple[int, ...] | None = option(
        None, "<k1..km>: children per node on each level of an SSM's tree, e.g. [1,1,3,1,1,1,1,1]"
    )
    num_nodes: int | None = option(None, "most nodes of one request's tree; 8 without SSMs", "nodes", 1, MAX_NODES)
    depth: int | None = option(None, "longest path below the root; the expansion's length or 8", "nodes", 1, MAX_DEPTH)
    batch_nodes: int = option(
        16, "most nodes of all trees in one step; every request keeps its place, the likeliest nodes win", "nodes", 1
    )
    min_score: float = option(0.2, "nodes whose estimated chance of acceptance is lower are not verified", "", 0, 1)
    merge: str = option("union", "union of all proposers' trees, or the first that has one", choices=MERGES)
    verifier: str = option("auto", "acceptance rule of sampled requests; auto = naive", choices=VERIFIERS)
    share_recycling: bool = option(
        False, "one recycling table for all requests: more hits, but a timing side channel between users"
    )
    seed: int = option(0, "seed of the draws and coins of requests that bring no seed", "", 0, 2**63 - 1)

    @classmethod
    def from_value(cls, value: str | Mapping[str, Any]) -> TreeOptions:
        """Read the bare word, JSON text or a dict. Raises TreeOptionError naming the option and the fix."""
        given = dict(read_value(value))
        method = given.pop("method", METHOD)
        if method != METHOD:
            raise TreeOptionError(f"speculative_config.method: {method!r} is not 'tree'; leave it to vLLM or use 'tree'")
        given = {str(name).replace("-", "_"): each for name, each in given.items()}
        given = {name: each for name, each in given.items() if name not in VLLM_FILLED}
        reject_unknown(cls, given, "speculative_config")
        if "ssms" in given:
            given["ssms"] = tuple(read_ssm(each, f"speculative_config.ssms[{i}]") for i, each in list_of(given, "ssms"))
        if given.get("proposers") is not None:
            given["proposers"] = tuple(each for _, each in list_of(given, "proposers"))
        if given.get("expansion") is not None:
            given["expansion"] = read_expansion(given["expansion"], "speculative_config.expansion")
        options = cls(**given)
        options.check()
        return options

    def check(self) -> None:
        """Raise TreeOptionError for the first option that is out of range or contradicts another."""
        check_fields(self, "speculative_config")
        for i, ssm in enumerate(self.ssms):
            check_fields(ssm, f"speculative_config.ssms[{i}]")
        if len(self.ssms) > MAX_SSMS:
            raise TreeOptionError(f"speculative_config.ssms: {len(self.ssms)} SSMs, at most {MAX_SSMS} are supported")
        if len(set(self.free_proposers)) != len(self.free_proposers):
            raise TreeOptionError(f"speculative_config.proposers: {list(self.free_proposers)} names a proposer twice")
        if not self.ssms and not self.free_proposers:
            raise TreeOptionError(
                f"speculative_config: nothing proposes tokens; give ssms=[...] or proposers={list(PROPOSERS)}"
            )
        if self.expansion is not None and self.depth is not None and self.depth < len(self.expansion):
            raise TreeOptionError(
                f"speculative_config.depth: {self.depth} is less than the expansion's {len(self.expansion)} levels; "
                "shorten the expansion or leave depth out"
            )

    @property
    def free_proposers(self) -> tuple[str, ...]:
        """The draft-free proposers in use."""
        if self.proposers is not None:
            return self.proposers
        return () if self.ssms else PROPOSERS

    @property
    def max_depth(self) -> int:
        """Longest path below the root."""
        if self.depth is not None:
            return self.depth
        return max((len(each) for each in self.expansions if each is not None), default=8)

    @property
    def max_nodes(self) -> int:
        """Most nodes of one request's tree, never more than a whole step may hold."""
        if self.num_nodes is not None:
            return min(self.num_nodes, self.batch_nodes) if self.expansion is None else self.num_nodes
        drawn = sum(expansion_nodes(each) for each in self.expansions if each is not None)
        return min(drawn, MAX_NODES) if drawn else min(8, self.batch_nodes)

    @property
    def expansions(self) -> tuple[tuple[int, ...] | None, ...]:
        """Each SSM's expansion, None where it grows its tree best-first."""
        return tuple(ssm.expansion or self.expansion for ssm in self.ssms)

    @property
    def max_ssm_slots(self) -> int:
        """Most nodes that one SSM reads back for a request, each in a KV slot; SSMs share slots, having layers of their own."""
        return max((ssm_slots(self, index) for index in range(len(self.ssms))), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, as `from_value` takes them."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["ssms"] = [{each.name: getattr(ssm, each.name) for each in fields(ssm)} for ssm in self.ssms]
        return json.loads(json.dumps(plain))


# Keys that vLLM itself adds to the dict before it reaches us.
VLLM_FILLED = frozenset({"target_model_config", "target_parallel_config"})


def read_value(value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The dict behind `tree`, '{"method": "tree", ...}' or a dict. Raises TreeOptionError when it is none of them."""
    if isinstance(value, Mapping):
        return value
    if not isinstance(value, str):
        raise TreeOptionError(f"speculative_config: {type(value).__name__} given; use 'tree', JSON text or a dict")
    text = value.strip()
    if not text.startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TreeOptionError(f"speculative_config: not valid JSON ({error}); quote it for the shell") from error


def read_expansion(value: Any, name: str) -> tuple[int, ...]:
    """[1,1,3], '<1,1,3>' or '1,1,3' to (1, 1, 3). Raises TreeOptionError."""
    parts = value.strip("<>[] ").split(",") if isinstance(value, str) else value
    if not isinstance(parts, Sequence) or not parts:
        raise TreeOptionError(f"{name}: {value!r} is no list of widths; write it like [1,1,3,1]")
    try:
        widths = tuple(int(part) if isinstance(part, str) else part for part in parts)
    except ValueError:
        widths = (None,)
    if any(isinstance(width, bool) or not isinstance(width, int) for width in widths):
        raise TreeOptionError(f"{name}: {value!r} holds something else than whole numbers; write it like [1,1,3,1]")
    if len(widths) > MAX_DEPTH or any(not 1 <= width <= MAX_WIDTH for width in widths):
        raise TreeOptionError(f"{name}: {list(widths)}; 1 to {MAX_DEPTH} levels of 1 to {MAX_WIDTH} children each")
    if expansion_nodes(widths) > MAX_NODES:
        raise TreeOptionError(
            f"{name}: {list(widths)} has {expansion_nodes(widths)} nodes, at most {MAX_NODES}; narrow a level"
        )
    return widths


def expansion_nodes(expansion: Sequence[int]) -> int:
    """Nodes below the root of the tree <k1..km>."""
    total, level = 0, 1
    for width in expansion:
        level *= width
        total += level
    return total


def ssm_slots(options: TreeOptions, index: int) -> int:
    """Nodes of one request that SSM `index` reads to draw the level below: every level but the last."""
    expansion = options.expansions[index]
    if expansion is not None:
        return expansion_nodes(expansion[:-1])
    return options.ssms[index].width * (options.max_depth - 1)


def read_ssm(value: Any, name: str) -> SsmOptions:
    """A path or a dict of SsmOptions. Raises TreeOptionError."""
    given = {"model": value} if isinstance(value, str) else value
    if not isinstance(given, Mapping):
        raise TreeOptionError(f"{name}: {value!r} is neither a path nor a dict of options")
    given = {str(key).replace("-", "_"): each for key, each in given.items()}
    reject_unknown(SsmOptions, given, name)
    if given.get("expansion") is not None:
        given["expansion"] = read_expansion(given["expansion"], f"{name}.expansion")
    if not given.get("model"):
        raise TreeOptionError(f"{name}.model: missing; give the folder or hub id of the SSM")
    return SsmOptions(**given)


def list_of(given: Mapping[str, Any], name: str) -> list[tuple[int, Any]]:
    """The numbered entries of a list option; a lone string is a list of one. Raises TreeOptionError."""
    value = given[name]
    entries = [value] if isinstance(value, (str, Mapping)) else value
    if not isinstance(entries, Sequence):
        raise TreeOptionError(f"speculative_config.{name}: {value!r} is no list")
    return list(enumerate(entries))


def reject_unknown(options: type, given: Mapping[str, Any], name: str) -> None:
    """Raise TreeOptionError for the first key that is no option, with the nearest one that is."""
    known = [each.name for each in fields(options)]
    for key in given:
        if key in known:
            continue
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
        raise TreeOptionError(f"{name}.{key}: unknown option; {hint} (`specinfer options` lists all)")


def check_fields(options: Any, name: str) -> None:
    """Check type, range and choices of every field against its metadata. Raises TreeOptionError."""
    for each in fields(options):
        value, rule = getattr(options, each.name), each.metadata
        where = f"{name}.{each.name}"
        if value is None:
            if each.default is None:
                continue
            raise TreeOptionError(f"{where}: null given; leave it out for the default {each.default!r}")
        if each.type.startswith("bool") and not isinstance(value, bool):
            raise TreeOptionError(f"{where}: {value!r} is not true or false")
        if each.type.startswith(("int", "float")):
            check_number(value, where, rule, whole=each.type.startswith("int"))
        if each.type.startswith("str") and not isinstance(value, str):
            raise TreeOptionError(f"{where}: {value!r} is not text")
        for choice in (value if isinstance(value, tuple) else (value,)) if rule["choices"] else ():
            if choice not in rule["choices"]:
                raise TreeOptionError(f"{where}: {choice!r} is not one of {', '.join(rule['choices'])}")


def check_number(value: Any, where: str, rule: Mapping[str, Any], whole: bool) -> None:
    """Check a number's type and range. Raises TreeOptionError."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value:
        raise TreeOptionError(f"{where}: {value!r} is not a {'whole ' if whole else ''}number")
    low, high = rule["low"], rule["high"]
    if (low is not None and value < low) or (high is not None and value > high):
        span = f"at least {low}" if high is None else f"{low} to {high}"
        raise TreeOptionError(f"{where}: {value} is out of range; {span} {rule['unit']}".rstrip())
