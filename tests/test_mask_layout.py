# SPDX-License-Identifier: Apache-2.0
"""Where grammar masks stand in vLLM 0.32's and 0.33's buffers."""

from types import SimpleNamespace

import pytest

from specinfer_vllm.engine import mask_layout
from specinfer_vllm.engine.mask_layout import PackedMasks032, StridedMasks033

MANAGER = SimpleNamespace(_masked_reasoning_ends=lambda request: (request, 7))


def test_rows_stand_behind_each_other_in_0_32():
    layout = PackedMasks032(stride=5)
    assert layout.starts([1, 5, 3]) == [0, 1, 6, 9]
    assert layout.entry(MANAGER, "request", "grammar", 3, True) == ("grammar", 3, True)


def test_each_request_owns_its_rows_in_0_33():
    layout = StridedMasks033(stride=5)
    assert layout.starts([1, 5, 3]) == [0, 5, 10, 15]
    assert layout.entry(MANAGER, "request", "grammar", 3, True) == ("grammar", 3, True, ())
    assert layout.entry(MANAGER, "request", "grammar", 3, False) == ("grammar", 3, False, ("request", 7))


@pytest.mark.parametrize(("version", "kind"), [("0.32.0+cpu", PackedMasks032), ("0.33.0", StridedMasks033)])
def test_the_release_decides(monkeypatch, version, kind):
    monkeypatch.setattr(mask_layout, "vllm_version", lambda: version)
    assert type(mask_layout.mask_layout(9)) is kind
