# SPDX-License-Identifier: Apache-2.0
import numpy as np

from specinfer_vllm.bench import picture
from specinfer_vllm.metrics import Showcase

TREE = Showcase(
    tokens=[0, 1, 2, 3, 4, 5],
    parent=[-1, 0, 1, 0, 3, 1],
    owners=[[], ["ngram"], ["ngram", "recycling"], ["ssm0"], ["ssm0"], ["ngram"]],
    accepted=[3],
    bonus=6,
)


def decode(tokens: list[int]) -> str:
    return "a $b [c] \n d e f g".split(" ")[tokens[0]]


def test_the_accepted_path_is_a_straight_line_and_no_two_nodes_share_a_place():
    parent = [*TREE.parent, 3]
    depth, line = picture._layout(parent, {0, 3, 6})
    assert [line[node] for node in (0, 3, 6)] == [0, 0, 0]
    assert len(set(zip(depth, line, strict=True))) == len(parent)
    assert all(depth[node] == depth[parent[node]] + 1 for node in range(1, len(parent)))


def test_a_picture_is_drawn_whatever_the_tokens_are(tmp_path):
    path = picture.png(TREE, decode, tmp_path / "tree.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert picture.text(TREE, decode).children


def test_branches_are_shown_rather_than_longer_chains():
    accepted, is_chain = np.array([0, 5, 2, 0]), np.array([True, True, False, False])
    assert Showcase.ranks(accepted, is_chain).argmax() == 2
    assert Showcase.ranks(accepted, is_chain).tolist()[::3] == [0, 0]
    assert TREE.rank > 5
