# SPDX-License-Identifier: Apache-2.0
"""First words of the questions that an LLM asks itself, so that its corpus holds code and sums beside talk.

A small model left to itself hardly ever asks for code, yet that is where drafts pay most. An empty start leaves the
choice to the LLM; a quarter of them are. The LLM goes on from each, so no question is fixed here.
"""

TALK = (
    "",
    "What is",
    "How do I",
    "Explain",
    "Write a short",
    "Compose",
    "Imagine",
    "Give me a list of",
    "Summarize the following",
    "Describe",
    "Why",
    "Rewrite",
)
CODE = (
    "Write a Python function that",
    "Finish this function.\n\ndef ",
    "Here is the start of a program:\n```python\nfrom typing import List\n\ndef ",
    "```python\nimport math\n\ndef ",
    "Implement",
    "What does this code do?\n```python\n",
)
SUMS = (
    "A farmer has",
    "Anna buys",
    "If a train",
    "There are 12",
    "Every day, Peter",
    "A box holds",
)
STARTS = tuple(
    start for three in zip(TALK, (*CODE, *CODE), (*SUMS, *SUMS), strict=True) for start in (three[0], *three[1:], "")
)
