# SPDX-License-Identifier: Apache-2.0
"""Token trees as flat arrays: a batch at a time, without vLLM.

topology.py   the arrays, their order, their ancestor bits and the exchange format
merge.py      the union of several proposers' trees
static.py     shapes known beforehand: expansions <k1,...,km>, and any other as paths of ranks
shape.py      the static shape that decodes fastest, from recorded acceptance
expand.py     the choice of the best nodes
paths.py      sums over paths and preorder places, the arithmetic under the three above
checks.py     what arrays must hold to be trees
"""
