# SPDX-License-Identifier: Apache-2.0
"""The options of a token tree: type, unit, range, default and help of each, and how they are read.

Imports nothing heavy: this module is loaded by every process that unpickles a configuration.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from specinfer_vllm.tree.static import StaticTree, num_nodes

METHOD = "tree"
PROPOSERS = ("ngram", "recycling")
# recycling weighs the request's own text against the LLM's rows: ngram beside it proposes nothing new.
DEFAULT_PROPOSERS = ("recycling",)
VERIFIERS = ("auto", "greedy", "naive", "mss", "without_replacement", "top_k_plus_one", "traversal")
NEED_SSMS = VERIFIERS[3:]  # they compare the LLM's law with the law an SSM sampled from
MERGES = ("union", "first")
SHARDED, REPLICATED, ONE_PER_RANK = PLACEMENTS = ("sharded", "replicated", "one_per_rank")
TRITON = "triton"
TREE_ATTENTIONS = (TRITON, "torch", "flashinfer", "xformers")
MAX_NODES = 1024
MAX_BATCH_NODES = 1 << 20
MAX_DEPTH = 64
MAX_WIDTH = 64
MAX_SSMS = 8
AUTO, NONE = "auto", "none"
DEFAULT_NODES = 8
DEFAULT_DEPTH = 8
DEFAULT_ROW_COST = 0.05  # measured on CPUs: 0.035 to 0.06 of a pass over one row
DEFAULT_DRAFT_COST = 0.08  # of an SSM as the workshop makes them
WHERE = "speculative_config"
# What users of vLLM's other methods would write: the option of a tree that means the same.
RENAMED = {
    "draft_model": "ssms",
    "draft_models": "ssms",
    "max_depth": "depth",
    "max_nodes": "num_nodes",
    "model": "ssms",
    "num_speculative_tokens": "num_nodes",
    "proposer": "proposers",
    "rejection_sample_method": "verifier",
    "speculative_token_tree": "tree",
    "ssm": "ssms",
}


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

    model: str = option("", "folder or hub id of a decoder model with the LLM's tokenizer; must be given")
    revision: str | None = option(None, "branch, tag or commit of a hub model")
    expansion: tuple[int, ...] | None = option(None, "children per node on each level; the tree's own when not given")
    tree: tuple[tuple[int, ...], ...] | None = option(None, "its nodes; the tree's own when not given")
    dtype: str = option(
        AUTO,
        "of its matrices: auto = bfloat16 beside an LLM in float32 on CPUs that multiply it, if the verifier does not "
        "sample from it, else the LLM's; llm = the LLM's",
        choices=(AUTO, "llm"),
    )
    width: int = option(4, "nodes kept per level when no static tree is given (EAGLE-2)", "nodes", 1, MAX_WIDTH)


@dataclass(frozen=True)
class TreeOptions:
    """What `--speculative-config tree` may carry. `from_value` reads every form a user can write."""

    ssms: tuple[SsmOptions, ...] = option(tuple, "small speculative models: paths, hub ids, or dicts of their options")
    proposers: tuple[str, ...] | None = option(
        None, "draft-free proposers merged in; recycling when there is no SSM", choices=PROPOSERS
    )
    expansion: tuple[int, ...] | None = option(
        None, "<k1..km>: children per node on each level of an SSM's tree, e.g. [1,1,3,1,1,1,1,1]"
    )
    tree: tuple[tuple[int, ...], ...] | None = option(
        None,
        "instead of an expansion: the nodes of an SSM's tree in any order, each as the ranks among siblings on its "
        "path, e.g. [[0],[1],[0,0]]",
    )
    num_nodes: int | None = option(
        None, f"most nodes of one request's tree; all of the static trees' or {DEFAULT_NODES}", "nodes", 1, MAX_NODES
    )
    depth: int | None = option(
        None, f"longest path below the root; the static trees' depth or {DEFAULT_DEPTH}", "nodes", 1, MAX_DEPTH
    )
    batch_nodes: int | None = option(
        None,
        "most nodes of all trees in one step, the likeliest of the batch; unlimited when not given",
        "nodes",
        1,
        MAX_BATCH_NODES,
    )
    row_cost: float | None = option(
        None,
        "time of one more row in an LLM pass; nodes that are not worth theirs are not verified. "
        f"0 verifies all; default {DEFAULT_ROW_COST}, or 0 with a static tree, which says what to verify",
        "passes over one row",
        0,
        1,
    )
    draft_cost: float | None = option(
        None,
        "time of one level of an SSM's drafting; levels of likeliest children that are not worth it are not drafted. "
        f"0 drafts all; default {DEFAULT_DRAFT_COST}, or 0 with a static tree, which says what to draft",
        "passes over one row",
        0,
        1,
    )
    branches: int | None = option(
        None, "most children per node; 1 makes chains, unlimited when not given", "", 1, MAX_WIDTH
    )
    merge: str = option("union", "union of all proposers' trees, or the first that has one", choices=MERGES)
    ssm_placement: str = option(
        SHARDED,
        "where SSMs are under tensor parallelism: sharded as the LLM is; replicated = each rank has all of them whole; "
        "one_per_rank = SSM i, whole, on rank i modulo ranks: they draft at the same time and exchange what they drew",
        choices=PLACEMENTS,
    )
    verifier: str = option(
        "auto",
        "acceptance rule of sampled requests; auto = naive, whose output does not depend on what is drafted; the last "
        "four weigh the SSMs' probabilities",
        choices=VERIFIERS,
    )
    share_recycling: bool = option(
        False, "one recycling table for all requests: more hits, but a timing side channel between users"
    )
    primer: str = option(
        "auto",
        "what recycling knows before a request's first step: a file from specinfer primer, 'none', or 'auto' for "
        "this LLM's own if one was made",
    )
    tree_attention: str = option(
        TRITON,
        "what attends to the rows of trees on a GPU: the package's own kernel, or, to check it or in its place, torch "
        "or a library that is installed; these read the trees on the host and take no full CUDA graphs",
        choices=TREE_ATTENTIONS,
    )
    seed: int = option(0, "seed of the draws and coins of requests that bring no seed", "", 0, 2**63 - 1)

    @classmethod
    def from_value(cls, value: str | Mapping[str, Any] | TreeOptions) -> TreeOptions:
        """Read any form that `read_value` takes. Raises TreeOptionError naming the option and the fix."""
        given = read_value(value)
        method = given.pop("method", METHOD)
        if not is_tree(method):
            raise TreeOptionError(f"{WHERE}.method: {method!r} is not {METHOD!r}; leave it to vLLM or use {METHOD!r}")
        reject_unknown(cls, given, WHERE)
        if "ssms" in given:
            given["ssms"] = tuple(read_ssm(each, f"{WHERE}.ssms[{i}]") for i, each in enumerate(entries(given, "ssms")))
        if isinstance(given.get("proposers"), str):
            given["proposers"] = [each.strip() for each in given["proposers"].split(",")]
        if given.get("proposers") is not None:
            given["proposers"] = tuple(entries(given, "proposers"))
        read_shape(given, WHERE)
        if isinstance(given.get("primer"), (str, os.PathLike)):
            given["primer"] = os.path.expanduser(given["primer"])
        options = cls(**given)
        options.check()
        return options

    def check(self) -> None:
        """Raise TreeOptionError for the first option that is out of range, contradicts another or would be ignored."""
        check_fields(self, WHERE)
        for i, ssm in enumerate(self.ssms):
            check_fields(ssm, f"{WHERE}.ssms[{i}]")
        self._check_proposers()
        self._check_shape()
        self._check_budget()
        self._check_verifier()

    def _check_proposers(self) -> None:
        if len(self.ssms) > MAX_SSMS:
            raise TreeOptionError(f"{WHERE}.ssms: {len(self.ssms)} SSMs; give at most {MAX_SSMS}")
        if len(set(self.free_proposers)) != len(self.free_proposers):
            raise TreeOptionError(
                f"{WHERE}.proposers: {list(self.free_proposers)} names a proposer twice; give each of them once"
            )
        if not self.ssms and not self.free_proposers:
            raise TreeOptionError(
                f"{WHERE}.proposers: nothing proposes tokens; give ssms=[...] or proposers={list(PROPOSERS)}"
            )
        if self.share_recycling and "recycling" not in self.free_proposers:
            raise TreeOptionError(
                f"{WHERE}.share_recycling: 'recycling' is not among the proposers; add it to {WHERE}.proposers "
                "or leave share_recycling out"
            )
        if self.draft_cost is not None and not self.ssms:
            raise TreeOptionError(
                f"{WHERE}.draft_cost: it is the cost of an SSM's levels and there is none; give ssms=[...]"
            )
        if self.ssm_placement != SHARDED and not self.ssms:
            raise TreeOptionError(
                f"{WHERE}.ssm_placement: {self.ssm_placement!r} is about SSMs and there is none; give ssms=[...]"
            )
        if self.primer not in (AUTO, NONE) and "recycling" not in self.free_proposers:
            raise TreeOptionError(
                f"{WHERE}.primer: only 'recycling' reads it, which is not among the proposers; add it to "
                f"{WHERE}.proposers or leave primer out"
            )

    def _check_shape(self) -> None:
        if (name := shape_option(self)) and not self.ssms:
            raise TreeOptionError(
                f"{WHERE}.{name}: it shapes the trees of SSMs and there is none; give ssms=[...], or num_nodes and "
                "depth for draft-free proposers"
            )
        for i, tree in enumerate(self.static_trees):
            if tree is None:
                continue
            if self.depth is not None and self.depth < tree.depth:
                name = self.shape_options[i]
                raise TreeOptionError(
                    f"{WHERE}.depth: {self.depth} is less than the {tree.depth} levels of ssms[{i}]'s {name}; "
                    f"shorten the {name} or leave depth out"
                )
            if self.ssms[i].width != SsmOptions.width:
                raise TreeOptionError(
                    f"{WHERE}.ssms[{i}].width: an expansion or a tree is given, which says how wide each level is; "
                    "leave one of them out"
                )

    def _check_budget(self) -> None:
        if None not in (self.num_nodes, self.batch_nodes) and self.num_nodes > self.batch_nodes:
            raise TreeOptionError(
                f"{WHERE}.num_nodes: {self.num_nodes} is more than all trees of a step may have, "
                f"batch_nodes={self.batch_nodes}; raise batch_nodes or lower num_nodes"
            )

    def _check_verifier(self) -> None:
        if self.verifier not in NEED_SSMS:
            return
        if not self.ssms:
            raise TreeOptionError(
                f"{WHERE}.verifier: {self.verifier!r} weighs the probabilities of SSMs and there is none; give "
                "ssms=[...] or use verifier='naive'"
            )
        if self.branches is not None:
            raise TreeOptionError(
                f"{WHERE}.branches: it would choose among sampled children, and {self.verifier!r} is exact only when "
                "all are kept; shape the SSMs' trees by expansion instead, e.g. [1,1,1,1] for a chain"
            )
        for i, tree in enumerate(self.static_trees):
            if self.verifier == "top_k_plus_one" and tree is not None and tree.expansion is None:
                raise TreeOptionError(
                    f"{WHERE}.verifier: {self.verifier!r} samples each node's last child, and ssms[{i}]'s tree gives "
                    "nodes of one level different numbers of children; use verifier='naive', or an expansion"
                )
        if self.batch_nodes is not None:
            raise TreeOptionError(
                f"{WHERE}.batch_nodes: it would drop sampled children by how many there are, and {self.verifier!r} is "
                "exact only when that does not depend on their tokens; bound num_nodes instead"
            )
        if self.wanted_nodes < len(self.ssms):
            raise TreeOptionError(
                f"{WHERE}.num_nodes: {self.wanted_nodes} nodes for {len(self.ssms)} SSMs, of which {self.verifier!r} "
                f"gives each an equal share, here none; give at least {len(self.ssms)}"
            )

    @property
    def free_proposers(self) -> tuple[str, ...]:
        """The draft-free proposers in use."""
        if self.proposers is not None:
            return self.proposers
        return () if self.ssms else DEFAULT_PROPOSERS

    @property
    def samples_drafts(self) -> bool:
        """Whether SSMs sample the children of some requests, instead of proposing their likeliest tokens."""
        return self.verifier in NEED_SSMS

    @property
    def cost_of_row(self) -> float:
        """row_cost, or what it is when it is not given."""
        if self.row_cost is not None:
            return self.row_cost
        return 0.0 if any(self.static_trees) else DEFAULT_ROW_COST

    @property
    def cost_of_level(self) -> float:
        """draft_cost, or what it is when it is not given."""
        if self.draft_cost is not None:
            return self.draft_cost
        return 0.0 if any(self.static_trees) else DEFAULT_DRAFT_COST

    @property
    def max_depth(self) -> int:
        """Longest path below the root."""
        if self.depth is not None:
            return self.depth
        return max((tree.depth for tree in self.static_trees if tree), default=DEFAULT_DEPTH)

    @property
    def longest_path(self) -> int:
        """Most rows of a verified tree that become committed text: its longest path, the root before and one behind."""
        return self.max_depth + 2

    @property
    def max_nodes(self) -> int:
        """Most nodes of one request's tree, never more than a whole step may hold."""
        return self.wanted_nodes if self.batch_nodes is None else min(self.wanted_nodes, self.batch_nodes)

    @property
    def wanted_nodes(self) -> int:
        """Most nodes of one request's tree when it is alone."""
        if self.num_nodes is not None:
            return self.num_nodes
        drawn = sum(tree.num_nodes for tree in self.static_trees if tree)
        return min(drawn, MAX_NODES) or DEFAULT_NODES

    @cached_property
    def static_trees(self) -> tuple[StaticTree | None, ...]:
        """Each SSM's static tree, None where it grows its tree best-first."""
        return tuple(static_tree(ssm) or static_tree(self) for ssm in self.ssms)

    @property
    def shape_options(self) -> tuple[str, ...]:
        """The option that gives each SSM's static tree, '' where it has none."""
        return tuple(shape_option(ssm) or shape_option(self) for ssm in self.ssms)

    @property
    def max_ssm_slots(self) -> int:
        """Most nodes that one SSM reads back for a request, each in a KV slot.

        SSMs share slots, having layers of their own.
        """
        return max((ssm_slots(self, index) for index in range(len(self.ssms))), default=0)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, as `from_value` takes them."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        plain["ssms"] = [{each.name: getattr(ssm, each.name) for each in fields(ssm)} for ssm in self.ssms]
        return json.loads(json.dumps(plain))


def is_tree(method: Any) -> bool:
    """Whether this method is ours."""
    return isinstance(method, str) and method.strip().lower() == METHOD


def resembles_tree(word: Any) -> bool:
    """Whether the word is a slip of the pen for `tree`: nobody's method, and near ours."""
    if not isinstance(word, str) or is_tree(word):
        return False
    return bool(difflib.get_close_matches(word.strip().lower(), [METHOD], cutoff=0.75))


def read_value(value: str | Mapping[str, Any] | TreeOptions) -> dict[str, Any]:
    """A new dict, names with underscores, of what the user wrote.

    value  `tree`; JSON text of an object; the path of a JSON file (ends in .json); a dict; TreeOptions
    Raises TreeOptionError when it is none of them, or names an option twice.
    """
    if isinstance(value, TreeOptions):
        return value.as_dict()
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        value = read_text(value)
    if not isinstance(value, Mapping):
        raise TreeOptionError(f"{WHERE}: {value!r} given; use {METHOD!r}, JSON text, a path to a .json file, or a dict")
    return with_underscores(value, WHERE)


def read_text(text: str) -> Any:
    """What the text stands for: JSON, the JSON in a file, or the bare method. Raises TreeOptionError."""
    text = text.strip()
    source = "JSON"
    if text.endswith(".json"):
        source, text = text, read_file(text)
    elif not text.startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise TreeOptionError(
            f"{WHERE}: {source} is not valid ({error}); in a shell, put it in single quotes"
        ) from error


def read_file(path: str) -> str:
    """The text of the file. Raises TreeOptionError."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TreeOptionError(f"{WHERE}: {path!r} cannot be read ({error}); give the path of a JSON file") from error


def with_underscores(given: Mapping[Any, Any], name: str) -> dict[str, Any]:
    """The same options with underscores in their names. Raises TreeOptionError when that makes two of them one."""
    renamed: dict[str, Any] = {}
    for key, value in given.items():
        plain = str(key).replace("-", "_")
        if plain in renamed:
            raise TreeOptionError(f"{name}.{plain}: given twice, with a dash and with an underscore; give it once")
        renamed[plain] = value
    return renamed


def read_expansion(value: Any, name: str) -> tuple[int, ...]:
    """[1,1,3], '<1,1,3>' or '1,1,3' to (1, 1, 3). Raises TreeOptionError."""
    if isinstance(value, int):
        value = [value]  # a shell turns the single level 3 into a number
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
    if (nodes := num_nodes(widths)) > MAX_NODES:
        raise TreeOptionError(f"{name}: {list(widths)} has {nodes} nodes, at most {MAX_NODES}; narrow a level")
    return widths


def read_tree(value: Any, name: str) -> tuple[tuple[int, ...], ...]:
    """[[0],[1],[0,0]] or '[(0,), (1,), (0, 0)]' to ((0,), (1,), (0, 0)), level by level. Raises TreeOptionError."""
    paths = literal(value) if isinstance(value, str) else value
    if not is_list(paths) or not paths or not all(is_list(path) and path for path in paths):
        raise TreeOptionError(f"{name}: {value!r} is no list of paths; write it like [[0],[1],[0,0]]")
    if len(paths) > MAX_NODES:
        raise TreeOptionError(f"{name}: {len(paths)} nodes, at most {MAX_NODES}; leave some out")
    for path in paths:
        if any(isinstance(rank, bool) or not isinstance(rank, int) for rank in path):
            raise TreeOptionError(
                f"{name}: {list(path)} holds something else than whole numbers; give the ranks on the path, 0 first"
            )
        if len(path) > MAX_DEPTH or any(not 0 <= rank < MAX_WIDTH for rank in path):
            raise TreeOptionError(
                f"{name}: {list(path)}; at most {MAX_DEPTH} levels, and ranks from 0 to {MAX_WIDTH - 1}"
            )
    try:
        return tuple(StaticTree.of_paths(paths).paths)
    except ValueError as error:
        raise TreeOptionError(f"{name}: {error}") from None


def literal(text: str) -> Any:
    """What a Python literal stands for, None where the text is none."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def is_list(value: Any) -> bool:
    """Whether the value is a list or a tuple, or what a configuration library has in their place."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def read_shape(given: dict[str, Any], name: str) -> None:
    """Read the expansion or the tree among the options in place. Raises TreeOptionError, also where both are given."""
    shapes = {"expansion": read_expansion, "tree": read_tree}
    found = [each for each in shapes if given.get(each) is not None]
    if len(found) > 1:
        raise TreeOptionError(f"{name}.tree: expansion is given, too, and both say what is drafted; give one of them")
    for each in found:
        given[each] = shapes[each](given[each], f"{name}.{each}")


def shape_option(options: TreeOptions | SsmOptions) -> str:
    """Which option gives a static tree here, '' when none does."""
    return next((name for name in ("expansion", "tree") if getattr(options, name) is not None), "")


def static_tree(options: TreeOptions | SsmOptions) -> StaticTree | None:
    """The static tree that these options give."""
    if options.tree is not None:
        return StaticTree.of_paths(options.tree)
    return None if options.expansion is None else StaticTree.of_expansion(options.expansion)


def ssm_slots(options: TreeOptions, index: int) -> int:
    """Nodes of one request that SSM `index` reads to draw the level below: all that have children."""
    tree = options.static_trees[index]
    if tree is not None:
        return tree.num_read
    return options.ssms[index].width * (options.max_depth - 1)


def ssm_draws(options: TreeOptions, index: int) -> int:
    """Draws of SSM `index` for one request whose tree is as deep as it may be."""
    tree, width = options.static_trees[index], options.ssms[index].width
    return tree.num_nodes if tree is not None else width + (options.max_depth - 1) * width**2


def read_ssm(value: Any, name: str) -> SsmOptions:
    """A path, a dict of SsmOptions, or SsmOptions. Raises TreeOptionError."""
    if isinstance(value, SsmOptions):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, (str, os.PathLike)):
        value = {"model": value}
    if not isinstance(value, Mapping):
        raise TreeOptionError(f"{name}: {value!r} is neither a path nor a dict of options; give one of them")
    given = with_underscores(value, name)
    reject_unknown(SsmOptions, given, name)
    read_shape(given, name)
    if isinstance(given.get("model"), os.PathLike):
        given["model"] = os.fspath(given["model"])
    if not given.get("model"):
        raise TreeOptionError(f"{name}.model: missing; give the folder or hub id of the SSM")
    if isinstance(given["model"], str) and given["model"].startswith("~"):
        given["model"] = os.path.expanduser(given["model"])
    return SsmOptions(**given)


def entries(given: Mapping[str, Any], name: str) -> Sequence[Any]:
    """The entries of a list option; a single one need not stand in a list. Raises TreeOptionError."""
    value = given[name]
    if isinstance(value, (str, os.PathLike, Mapping, SsmOptions)):
        return [value]
    if not isinstance(value, Sequence):
        raise TreeOptionError(f"{WHERE}.{name}: {value!r} is no list; write it like [...]")
    return value


def reject_unknown(options: type, given: Mapping[str, Any], name: str) -> None:
    """Raise TreeOptionError for the first key that is no option, with the nearest one that is."""
    known = [each.name for each in fields(options)]
    for key in given:
        if key in known:
            continue
        near = [RENAMED[key]] if RENAMED.get(key) in known else difflib.get_close_matches(key, known, n=1)
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
            raise TreeOptionError(f"{where}: {value!r} is not true or false; write it without quotes, in lower case")
        if each.type.startswith(("int", "float")):
            check_number(value, where, rule, whole=each.type.startswith("int"))
        if each.type.startswith("str") and not isinstance(value, str):
            raise TreeOptionError(f"{where}: {value!r} is not text; write it in quotes")
        for choice in (value if isinstance(value, tuple) else (value,)) if rule["choices"] else ():
            if choice not in rule["choices"]:
                raise TreeOptionError(f"{where}: {choice!r} is not one of {', '.join(rule['choices'])}")


def check_number(value: Any, where: str, rule: Mapping[str, Any], whole: bool) -> None:
    """Check a number's type and range. Raises TreeOptionError."""
    kinds = int if whole else (int, float)
    low, high, unit = rule["low"], rule["high"], rule["unit"]
    span = f"{low} to {high} {unit}".rstrip()
    if isinstance(value, bool) or not isinstance(value, kinds) or value != value:
        raise TreeOptionError(f"{where}: {value!r} is not a {'whole ' if whole else ''}number; give {span}, unquoted")
    if not low <= value <= high:
        raise TreeOptionError(f"{where}: {value} is out of range; give {span}")
