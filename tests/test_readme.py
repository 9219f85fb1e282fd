# SPDX-License-Identifier: Apache-2.0
"""What the README says of options, parameters, counters and limits is what the code has."""

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

from specinfer_vllm.cli import as_row, describe
from specinfer_vllm.config import SsmOptions, TreeOptions
from specinfer_vllm.metrics import TreeStats

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def section(title: str) -> str:
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def tables(text: str) -> list[list[tuple[str, ...]]]:
    """The rows of each Markdown table below its heading, cells without back-quotes."""
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [
        [tuple(cell.strip().replace("`", "") for cell in line.strip("|\n ").split(" |")) for line in lines[2:]]
        for lines in (table.splitlines() for table in found)
    ]


@pytest.mark.parametrize(("place", "kind"), [(0, TreeOptions), (1, SsmOptions)])
def test_the_options_are_those_that_the_command_prints(place, kind):
    written = tables(section("Options") + "\n")[place]
    assert written == [as_row(describe(each)) for each in fields(kind)]


def test_every_counter_is_explained():
    names = {name for row in tables(section("Counters"))[0] for name in row[0].split(", ")}
    assert names == {each.name for each in fields(TreeStats)} | {"tokens_per_step"}


def test_every_reason_to_serve_without_drafts_is_explained():
    from specinfer_vllm.engine import sampling

    reasons = set(re.findall(r'return "(\w+)"', inspect.getsource(sampling.refusal))) | {"custom_processors"}
    written = [
        reason for group in re.findall(r"\((`.*?`)\)", section("Sampling parameters")) for reason in group.split(", ")
    ]
    assert {reason.strip("`") for reason in written} == reasons


def test_every_refused_setting_is_listed():
    from specinfer_vllm.engine import launch

    assert {each.name for each in launch.ARGUMENTS} <= set(re.findall(r"`(\w+)`", section("Limits")))


def test_links_lead_somewhere():
    targets = [each for each in re.findall(r"\]\((.*?)\)", README) if not each.startswith("http")]
    assert targets
    assert all((ROOT / target).exists() for target in targets)
