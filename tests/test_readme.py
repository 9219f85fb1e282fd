# SPDX-License-Identifier: Apache-2.0
"""The README's options table names every option, and no other."""

import re
from dataclasses import fields
from pathlib import Path

from specinfer_vllm.config import TreeOptions

README = Path(__file__).parents[1] / "README.md"


def test_the_options_table_names_every_option():
    table = README.read_text().split("| option | meaning |")[1].split("\n\n")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {each.name for each in fields(TreeOptions)}
