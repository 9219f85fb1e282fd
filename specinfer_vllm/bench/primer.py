# SPDX-License-Identifier: Apache-2.0
"""Makes an LLM's primer: what it writes to these prompts, and what else it held likely at each place.

`specinfer primer MODEL` takes about two minutes for SmolLM2-135M on two cores, once per LLM. The
prompts are plain tasks of many kinds and belong to no benchmark.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from specinfer_vllm.bench import cache, recording
from specinfer_vllm.propose.primer import primer_path
from specinfer_vllm.propose.proposer import Observation
from specinfer_vllm.propose.recycling import WIDTH
from specinfer_vllm.propose.successors import CONTEXT, NOBODY, SuccessorRows

TOKENS = 192
PROMPTS = (
    "Explain how a bicycle stays upright while it moves.",
    "Write a short story about a lighthouse keeper and a lost dog.",
    "List ten ideas for a healthy breakfast.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the main causes of the First World War?",
    "Write a polite email that asks a colleague for a meeting next week.",
    "Give me a recipe for tomato soup, step by step.",
    "Write a Python function that checks whether a string is a palindrome.",
    "Compare cats and dogs as pets.",
    "What is the difference between a virus and a bacterium?",
    "Summarise the plot of Romeo and Juliet in five sentences.",
    "Write a Python function that counts the words in a text and returns a dictionary.",
    "How do I learn to play the guitar as an adult?",
    "Write a poem about the first snow of the year.",
    "Solve this problem: a train travels 180 km in 2 hours. What is its average speed? Explain each step.",
    "Write a Python function that removes duplicates from a list while keeping the order.",
    "What should I consider before buying a used car?",
    "Explain photosynthesis to a ten-year-old child.",
    "Write a product description for a wooden desk lamp.",
    "Write a Python class for a bank account with deposit and withdraw methods.",
    "Describe a day in the life of a nurse.",
    "What are the advantages and disadvantages of working from home?",
    'Translate "Good morning, how are you?" into French and Spanish.',
    "Write a Python function that finds the largest and the smallest number in a list.",
    "How does the stock market work?",
    "Write a dialogue between a teacher and a student about homework.",
    "Give three arguments for and three against school uniforms.",
    "Write a Python function that sorts a list of tuples by the second element.",
    "What is machine learning, and where is it used?",
    "Plan a three-day trip to Rome.",
    "Explain the rules of chess briefly.",
    "Write a Python function that reads a CSV file and computes the average of a column.",
    "Write a cover letter for a junior accountant.",
    "What happens when water boils?",
    "Write a SQL query that finds the five customers with the most orders.",
    "Write a Python function that validates an email address with a regular expression.",
    "How can a small company reduce its energy costs?",
    "Tell me about the history of the Eiffel Tower.",
    'Correct the grammar: "She don\'t has any apples and he like them."',
    "Write a Python function that merges two sorted lists into one sorted list.",
    "What is inflation and how does it affect people?",
    "Write a motivational speech for a football team.",
    "Explain the difference between a stack and a queue.",
    "Write a Python function that computes the greatest common divisor of two numbers.",
    "Create a weekly workout plan for beginners.",
    "What are black holes?",
    "Write a review of a book about the sea.",
    "Write a Python function that converts a temperature from Celsius to Fahrenheit and back.",
    "How do vaccines work?",
    "Write a job advertisement for a software developer.",
    "If all roses are flowers and some flowers fade quickly, can we conclude that some roses fade quickly?",
    "Write a Python function that checks whether a number is prime, with a docstring and examples.",
    "Give advice to someone who is nervous before an exam.",
    "Explain how rainbows form.",
    "Write a press release about a new public library.",
    "Write a Python function that returns all permutations of a string.",
    "What did ancient Egyptians believe about life after death?",
    "Make a table that compares solar, wind and nuclear energy.",
    "How can I improve my writing?",
    "Write a Python function that groups a list of words by their first letter.",
    "Describe the water cycle.",
    "Write a JavaScript function that reverses a string.",
    'Extract the names and dates from this text: "Anna met Bob on 3 May 2019; Carla joined them on 7 June."',
    "Write a Python function that adds two matrices given as nested lists.",
    "What are the duties of a mayor?",
    "Write a funny letter from a cat to its owner.",
    "How many ways are there to choose 3 people out of 8? Show the calculation.",
    "Write a Python function that finds the longest word in a sentence.",
    'What is the meaning of the proverb "a stitch in time saves nine"?',
    "Explain supply and demand with an example.",
    "Write an HTML page with a heading, a list and a link.",
    "Write a Python function that implements binary search on a sorted list.",
    "What are good habits for a better sleep?",
    "Describe the main parts of a computer.",
    "Write a short biography of Marie Curie.",
    "Write a Python function that returns the sum of the digits of an integer.",
    "Explain climate change and its effects.",
    "Write an introduction for an essay about social media.",
    "How does a refrigerator work?",
    "Write a Python function that rotates a list by k positions.",
)


def build(model: str | Path, out: Path | None = None, prompts: int = len(PROMPTS), tokens: int = TOKENS) -> Path:
    """The primer of `model` at `out` (default: where the engine looks for it); not made again where it lies.

    A run that was stopped is gone on with. prompts, tokens: how many of the prompts, and output tokens of each.
    """
    out = out or primer_path(model)
    if out.exists():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:prompts]]
    unfinished = out.with_suffix(".recording.npz")
    rows(recording.record(model, chats, tokens, WIDTH, unfinished)).save(out)
    unfinished.unlink()
    return out


def rows(recorded: recording.Recording) -> SuccessorRows:
    """All rows of a recording, as a primer."""
    result = SuccessorRows(max(len(recorded.outputs), 1), WIDTH, recorded.vocab_size)
    for chat in range(recorded.num_chats):
        text, prompt = recorded.text(chat)
        first = recorded.output_offsets[chat]
        count = len(text) - prompt
        # Row i was read at the token in front of output i, thus the last prompt token comes first.
        before = text[max(0, prompt - CONTEXT) : prompt - 1][::-1]
        tail = np.full((1, CONTEXT - 1), -1, np.int32)
        tail[0, : len(before)] = before
        result.append(
            np.full(1, NOBODY, np.int64),
            tail,
            Observation(
                np.zeros(count, np.int64),
                text[prompt - 1 : -1],
                recorded.successors[first : first + count],
                recorded.probabilities[first : first + count],
            ),
        )
    return result


def main(arguments: list[str] | None = None) -> int:
    """Make a primer and say where it lies."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="folder or hub id (default: SmolLM2-135M-Instruct, as in the demo)")
    parser.add_argument("--out", type=Path, help="file to write; default: where the engine looks for it")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), help=f"prompts to use (default {len(PROMPTS)})")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"output tokens of each (default {TOKENS})")
    options = parser.parse_args(arguments)
    if not 1 <= options.prompts <= len(PROMPTS) or options.tokens < 1:
        parser.error(f"--prompts: 1 to {len(PROMPTS)}, --tokens: at least 1")
    model = options.model
    if model is None:
        from specinfer_vllm.bench import smollm2

        model = smollm2.model_path()
    cache.say(f"primer: {build(model, options.out, options.prompts, options.tokens)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
