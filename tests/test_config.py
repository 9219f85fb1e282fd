# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pytest

from specinfer_vllm.config import (
    MAX_NODES,
    PROPOSERS,
    SsmOptions,
    TreeOptionError,
    TreeOptions,
    ssm_draws,
    ssm_slots,
)
from specinfer_vllm.tree.static import StaticTree, num_nodes

EXPANSION = (1, 1, 3, 1, 1, 1, 1, 1)
PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0))


def read(**options) -> TreeOptions:
    return TreeOptions.from_value({"method": "tree", **options})


@pytest.mark.parametrize(
    "value",
    ["tree", " tree ", "Tree", '{"method": "tree"}', '{"method":"TREE"}', {"method": "tree"}, {}, TreeOptions()],
)
def test_every_form_of_the_bare_word_is_the_same_tree(value):
    options = TreeOptions.from_value(value)
    assert options == TreeOptions()
    assert options.free_proposers == ("recycling",)
    assert options.max_nodes >= 1 and options.max_depth >= 1 and options.max_ssm_slots == 0


def test_a_path_to_a_json_file_is_read(tmp_path: Path):
    file = tmp_path / "tree.json"
    file.write_text('{"method": "tree", "num-nodes": 5}')
    assert TreeOptions.from_value(str(file)) == TreeOptions.from_value(file) == read(num_nodes=5)


def test_dashes_and_underscores_are_the_same():
    assert read(**{"num-nodes": 5, "share-recycling": True}) == read(num_nodes=5, share_recycling=True)


@pytest.mark.parametrize("written", [[1, 1, 3], (1, 1, 3), "1,1,3", "<1,1,3>", "[1, 1, 3]", ["1", "1", "3"]])
def test_an_expansion_may_be_written_as_in_the_paper(written):
    assert read(ssms=["a"], expansion=written).expansion == (1, 1, 3)


def test_a_single_level_may_be_a_number():
    assert read(ssms=["a"], expansion=3).expansion == read(ssms=["a"], expansion="3").expansion == (3,)


@pytest.mark.parametrize(
    "written",
    [PATHS, list(map(list, reversed(PATHS))), str(list(PATHS)), json.dumps(PATHS), f" {PATHS} "],
    ids=["tuples", "lists in another order", "as vLLM took it", "JSON text", "tuples as text"],
)
def test_a_tree_may_be_written_in_any_order_and_as_text(written):
    assert read(ssms=["a"], tree=written).tree == read(ssms=[{"model": "a", "tree": written}]).ssms[0].tree == PATHS


def test_a_lone_ssm_or_proposer_need_not_stand_in_a_list():
    assert read(ssms="a") == read(ssms=["a"]) == read(ssms={"model": "a"}) == read(ssms=[SsmOptions("a")])
    assert read(ssms=Path("a/b")) == read(ssms="a/b")
    assert read(proposers="ngram") == read(proposers=["ngram"])
    assert read(proposers="ngram, recycling").proposers == PROPOSERS


def test_a_home_folder_is_found():
    assert read(ssms="~/a").ssms[0].model == str(Path.home() / "a")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_nodes": 64},
        {"ssms": ["a", {"model": "b", "expansion": "1,2", "revision": "main"}], "expansion": EXPANSION},
        {"ssms": ["a", {"model": "b", "tree": PATHS}], "expansion": "2,1"},
        {"ssms": ["a"], "tree": PATHS},
        {"ssms": ["a"], "proposers": ["recycling"], "share_recycling": True, "depth": 3, "seed": 7},
    ],
)
def test_options_survive_json(options):
    found = read(**options)
    assert TreeOptions.from_value(json.dumps(found.as_dict())) == found


def test_reading_does_not_change_what_was_given():
    given = {"method": "tree", "num-nodes": 5, "ssms": [{"model": "a", "expansion": "1,2"}]}
    before = json.dumps(given)
    TreeOptions.from_value(given)
    assert json.dumps(given) == before


def test_the_tree_of_the_paper_has_twenty_nodes_and_eight_levels():
    options = read(ssms=["a"], expansion=list(EXPANSION))
    assert (options.max_nodes, options.max_depth) == (num_nodes(EXPANSION), len(EXPANSION)) == (20, 8)
    assert ssm_slots(options, 0) == 17  # the last level is drawn, not read


def test_trees_of_several_ssms_need_the_sum_of_their_nodes_and_the_most_of_their_slots():
    options = read(ssms=["a", {"model": "b", "expansion": [2, 2, 2]}], expansion=[3, 1])
    assert options.max_nodes == 6 + 14
    assert options.max_ssm_slots == 6
    assert options.free_proposers == ()


def test_a_static_tree_has_its_own_size_and_reads_what_has_children():
    options = read(ssms=["a", {"model": "b", "expansion": [2, 2]}], tree=PATHS)
    assert options.static_trees == (StaticTree.of_paths(PATHS), StaticTree.of_expansion((2, 2)))
    assert (options.max_nodes, options.max_depth, options.cost_of_row) == (6 + 6, 3, 0)
    assert (ssm_slots(options, 0), ssm_slots(options, 1)) == (3, 2)
    assert read(ssms=["a"], tree=PATHS, depth=5, num_nodes=4, row_cost=0.1).max_nodes == 4


def test_an_expansion_as_a_tree_asks_for_the_same():
    tree = StaticTree.of_expansion(EXPANSION)
    given, drawn = read(ssms=["a"], tree=tree.paths), read(ssms=["a"], expansion=EXPANSION)
    assert given.static_trees == drawn.static_trees
    assert (given.max_nodes, given.max_ssm_slots) == (drawn.max_nodes, drawn.max_ssm_slots)


@pytest.mark.parametrize("verifier", ["naive", "mss", "without_replacement", "traversal"])
def test_any_tree_goes_with_verifiers_that_draw_child_after_child(verifier):
    read(ssms=["a"], tree=PATHS, verifier=verifier)
    read(ssms=["a"], tree=[[0], [1], [0, 0], [1, 0]], verifier="top_k_plus_one")


def test_one_requests_tree_fits_into_the_step_unless_the_user_says_otherwise():
    assert read(num_nodes=100).max_nodes == 100
    assert read(ssms=["a"], expansion=EXPANSION).max_nodes == 20
    assert read(ssms=["a"], expansion=EXPANSION).cost_of_row == 0 < read().cost_of_row
    assert read(ssms=["a"], expansion=EXPANSION, batch_nodes=12).max_nodes == 12


REFUSED = {
    "unknown option": ({"num_node": 3}, "num_node: unknown option; did you mean 'num_nodes'"),
    "vllm's name": ({"num_speculative_tokens": 3}, "num_speculative_tokens: unknown option; did you mean 'num_nodes'"),
    "vllm's model": ({"model": "a"}, "model: unknown option; did you mean 'ssms'"),
    "nothing near": ({"zzz": 3}, "zzz: unknown option; known: ssms, proposers"),
    "unknown in an ssm": ({"ssms": [{"model": "a", "widht": 3}]}, r"ssms\[0\].widht: unknown option; did you mean"),
    "given twice": ({"num_nodes": 3, "num-nodes": 4}, "num_nodes: given twice"),
    "other method": ({"method": "ngram"}, "method: 'ngram' is not 'tree'"),
    "negative": ({"num_nodes": -3}, "num_nodes: -3 is out of range; give 1 to 1024 nodes"),
    "zero": ({"depth": 0}, "depth: 0 is out of range; give 1 to 64 nodes"),
    "absurd nodes": ({"num_nodes": 10**9}, "num_nodes: 1000000000 is out of range"),
    "absurd depth": ({"depth": 65}, "depth: 65 is out of range"),
    "absurd batch": ({"batch_nodes": 10**9}, "batch_nodes: 1000000000 is out of range"),
    "negative seed": ({"seed": -1}, "seed: -1 is out of range"),
    "cost above one": ({"row_cost": 1.5}, "row_cost: 1.5 is out of range; give 0 to 1"),
    "cost not a number": ({"row_cost": float("nan")}, "row_cost: nan is not a number"),
    "text for a number": ({"num_nodes": "8"}, "num_nodes: '8' is not a whole number; give 1 to 1024 nodes, unquoted"),
    "fraction": ({"num_nodes": 8.5}, "num_nodes: 8.5 is not a whole number"),
    "boolean for a number": ({"num_nodes": True}, "num_nodes: True is not a whole number"),
    "text for a boolean": ({"share_recycling": "True"}, "share_recycling: 'True' is not true or false"),
    "null": ({"seed": None}, "seed: null given; leave it out"),
    "number for text": ({"merge": 3}, "merge: 3 is not text"),
    "unknown verifier": ({"verifier": "typical"}, "verifier: 'typical' is not one of auto, greedy, naive, mss"),
    "a rule without probabilities": ({"verifier": "mss"}, "verifier: 'mss' weighs the probabilities of SSMs"),
    "a rule that needs all children": (
        {"verifier": "mss", "ssms": ["a"], "branches": 2},
        "branches: it would choose among sampled children",
    ),
    "fewer nodes than ssms that draw": (
        {"verifier": "mss", "ssms": ["a"] * 5, "num_nodes": 4},
        "num_nodes: 4 nodes for 5 SSMs, .* give at least 5",
    ),
    "unknown proposer": ({"proposers": ["n-gram"]}, "proposers: 'n-gram' is not one of ngram, recycling"),
    "proposer twice": ({"proposers": ["ngram", "ngram"]}, "proposers: .* names a proposer twice"),
    "nothing proposes": ({"proposers": []}, "proposers: nothing proposes tokens; give ssms"),
    "proposers no list": ({"proposers": 3}, "proposers: 3 is no list"),
    "ssm without model": ({"ssms": [{"width": 3}]}, r"ssms\[0\].model: missing"),
    "ssm of a wrong kind": ({"ssms": [3]}, r"ssms\[0\]: 3 is neither a path nor a dict"),
    "ssm with a number for a path": ({"ssms": [{"model": 3}]}, r"ssms\[0\].model: 3 is not text"),
    "ssms null": ({"ssms": None}, "ssms: None is no list"),
    "too many ssms": ({"ssms": ["a"] * 9}, "ssms: 9 SSMs; give at most 8"),
    "too wide": ({"ssms": [{"model": "a", "width": 65}]}, r"ssms\[0\].width: 65 is out of range"),
    "width beside an expansion": ({"ssms": [{"model": "a", "width": 2, "expansion": [1]}]}, r"ssms\[0\].width: an exp"),
    "width beside a tree": ({"ssms": [{"model": "a", "width": 2}], "tree": PATHS}, r"ssms\[0\].width: .* or a tree is"),
    "vllm's tree": ({"speculative_token_tree": "[(0,)]"}, "speculative_token_tree: unknown .* did you mean 'tree'"),
    "cost of drafting without ssm": ({"draft_cost": 0.1}, "draft_cost: it is the cost of an SSM's levels"),
    "a placement of no ssm": (
        {"ssm_placement": "replicated"},
        "ssm_placement: 'replicated' is about SSMs and there is",
    ),
    "a placement that is none": (
        {"ssms": ["a"], "ssm_placement": "rank 0"},
        "ssm_placement: 'rank 0' is not one of sha",
    ),
    "an object with a bad tree": ({"ssms": [SsmOptions("a", tree=((0,), (2,)))]}, r"ssms\[0\].tree: \[2\] stands"),
    "tree without ssm": ({"tree": PATHS}, "tree: it shapes the trees of SSMs and there is none"),
    "tree and expansion": (
        {"ssms": ["a"], "tree": PATHS, "expansion": [1]},
        "tree: expansion is given, too, .* one of",
    ),
    "tree and expansion of an ssm": (
        {"ssms": [{"model": "a", "tree": PATHS, "expansion": [1]}]},
        r"ssms\[0\].tree: expansion is given, too",
    ),
    "tree empty": ({"ssms": ["a"], "tree": []}, r"tree: \[\] is no list of paths; write it like \[\[0\],"),
    "tree with the root": ({"ssms": ["a"], "tree": [[], [0]]}, r"tree: \[\[\], \[0\]\] is no list of paths"),
    "tree of numbers": ({"ssms": ["a"], "tree": [0, 1]}, r"tree: \[0, 1\] is no list of paths"),
    "tree that is a number": ({"ssms": ["a"], "tree": 3}, "tree: 3 is no list of paths"),
    "tree of words": ({"ssms": ["a"], "tree": "bushy"}, "tree: 'bushy' is no list of paths"),
    "tree that is code": ({"ssms": ["a"], "tree": "[(0,)] + list('a')"}, "tree: .* is no list of paths"),
    "tree that does not end": ({"ssms": ["a"], "tree": "[" * 9999}, "tree: .* is no list of paths"),
    "tree of text": ({"ssms": ["a"], "tree": [["0"]]}, r"tree: \['0'\] holds something else than whole numbers"),
    "tree of booleans": ({"ssms": ["a"], "tree": [[False]]}, r"tree: \[False\] holds something else"),
    "tree of fractions": ({"ssms": ["a"], "tree": "[(0.0,)]"}, r"tree: \[0.0\] holds something else"),
    "tree below zero": ({"ssms": ["a"], "tree": [[0], [-1]]}, r"tree: \[-1\]; at most 64 levels, and ranks from 0 to"),
    "tree too wide": ({"ssms": ["a"], "tree": [[64]]}, r"tree: \[64\]; at most 64 levels, and ranks from 0 to 63"),
    "tree too deep": ({"ssms": ["a"], "tree": [[0] * n for n in range(1, 66)]}, "tree: .*; at most 64 levels"),
    "tree too large": ({"ssms": ["a"], "tree": [[0]] * 1025}, "tree: 1025 nodes, at most 1024"),
    "tree with a node twice": (
        {"ssms": ["a"], "tree": [[0], [0, 0], (0, 0)]},
        r"tree: \[0, 0\] is given 2 times; give each node once",
    ),
    "tree without a parent": (
        {"ssms": [{"model": "a", "tree": [[0], [1, 0]]}]},
        r"ssms\[0\].tree: \[1, 0\] stands without its parent \[1\]; add \[1\]",
    ),
    "tree without an elder sibling": (
        {"ssms": ["a"], "tree": [[0], [0, 0], [0, 2]]},
        r"tree: \[0, 2\] stands without its elder sibling \[0, 1\]; add \[0, 1\]",
    ),
    "depth below a tree": ({"ssms": ["a"], "tree": PATHS, "depth": 2}, r"depth: 2 is less than the 3 levels .*'s tree"),
    "a rule that draws the last child": (
        {"ssms": ["a"], "tree": PATHS, "verifier": "top_k_plus_one"},
        r"verifier: 'top_k_plus_one' samples .* ssms\[0\]'s tree .*; use verifier='naive', or an expansion",
    ),
    "expansion without ssm": ({"expansion": [1, 2]}, "expansion: it shapes the trees of SSMs and there is none"),
    "expansion of words": ({"ssms": ["a"], "expansion": "one"}, "expansion: 'one' holds something else"),
    "expansion of fractions": ({"ssms": ["a"], "expansion": [1.5]}, r"expansion: \[1.5\] holds something else"),
    "expansion empty": ({"ssms": ["a"], "expansion": []}, r"expansion: \[\] is no list of widths"),
    "expansion of nothing": ({"ssms": ["a"], "expansion": [2, 0]}, r"expansion: \[2, 0\]; 1 to 64 levels"),
    "expansion too large": ({"ssms": ["a"], "expansion": [10, 10, 10]}, "expansion: .* has 1110 nodes, at most 1024"),
    "depth below expansion": ({"ssms": ["a"], "expansion": [1, 1], "depth": 1}, "depth: 1 is less than the 2 levels"),
    "depth below an ssm's": (
        {"ssms": [{"model": "a", "expansion": [1, 1]}], "depth": 1},
        "depth: 1 is less than the 2",
    ),
    "nodes above the step's": ({"num_nodes": 9, "batch_nodes": 8}, "num_nodes: 9 is more than .* batch_nodes=8; raise"),
    "a primer that nobody reads": ({"primer": "rows.npz", "proposers": "ngram"}, "primer: only 'recycling' reads it"),
    "a primer that is no text": ({"primer": 3}, "primer: 3 is not text"),
    "table without its proposer": (
        {"share_recycling": True, "proposers": "ngram"},
        "share_recycling: 'recycling' is not",
    ),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_by_name_and_with_the_fix(options, message):
    with pytest.raises(TreeOptionError, match=r"^speculative_config\." + message):
        TreeOptions.from_value({"method": "tree", **options})


@pytest.mark.parametrize(
    "value, message",
    [
        (3, "3 given; use 'tree', JSON text, a path to a .json file, or a dict"),
        ("{method: tree}", "JSON is not valid .* single quotes"),
        ("none/tree.json", "'none/tree.json' cannot be read"),
    ],
)
def test_what_cannot_be_read_is_refused(value, message):
    with pytest.raises(TreeOptionError, match=message):
        TreeOptions.from_value(value)


def test_a_file_that_holds_no_dict_is_refused(tmp_path: Path):
    (tmp_path / "tree.json").write_text("[1]")
    with pytest.raises(TreeOptionError, match=r"\[1\] given; use"):
        TreeOptions.from_value(str(tmp_path / "tree.json"))


def test_draws_are_counted_before_anything_is_drafted():
    options = read(ssms=["a", {"model": "b", "expansion": [2, 2, 2]}, {"model": "c", "tree": PATHS}], depth=4)
    assert [ssm_draws(options, index) for index in range(3)] == [4 + 3 * 16, 2 + 4 + 8, len(PATHS)]


def test_the_largest_tree_is_accepted():
    assert read(num_nodes=MAX_NODES, depth=64).max_nodes == MAX_NODES


def test_reading_options_imports_nothing_heavy():
    code = "import sys, specinfer_vllm.cli; print(sorted({'torch', 'vllm', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
