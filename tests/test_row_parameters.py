# SPDX-License-Identifier: Apache-2.0
"""A tree row's processed logits are those of a plain pass over that row's path, parameter by parameter.

Plain means vLLM's own batch and sampler with one request per row, whose output already ends with the path.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm import SamplingParams  # noqa: E402
from vllm.v1.sample.logits_processor import (  # noqa: E402
    LogitBiasLogitsProcessor,
    LogitsProcessors,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.sampler import Sampler  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from specinfer_vllm.engine import sampling  # noqa: E402
from specinfer_vllm.engine.row_parameters import change_logits  # noqa: E402
from specinfer_vllm.tree.topology import from_arrays  # noqa: E402
from specinfer_vllm.verify.walk import TreeRows  # noqa: E402

VOCAB = 200
PROMPT = [5, 6, 7, 5, 9]
STOP = 3
# Three requests: a fork, a root alone, a chain. Their outputs so far, one long, one empty.
OUTPUTS = [[8, 9, 10], [], [5, 11]]
TREES = from_arrays(
    offsets=[0, 5, 6, 9],
    tokens=[10, 8, 9, 7, 11, 0, 11, 12, 5],
    parent=[-1, 0, 1, 0, 3, -1, -1, 0, 1],
)
PARAMETERS = {
    "temperature": {"temperature": 0.6},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 7},
    "more than the vocabulary": {"top_k": VOCAB + 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.2},
    "logit_bias": {"logit_bias": {8: 4.0, 12: -100.0}},
    "allowed": {"allowed_token_ids": [7, 8, 9, 40, 41]},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.4},
    "bad words": {"bad_words": ["x"]},
    "min_tokens": {"min_tokens": 4},
    "all": {
        "temperature": 0.9,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "logit_bias": {8: 2.0},
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": 5,
        "bad_words": ["x"],
    },
}
BAD_WORDS = [[8, 9], [12], [9, 7, 11], [5, 11, 12]]  # single tokens, within a path, across its start


def params(**given) -> SamplingParams:
    made = SamplingParams(**{"temperature": 1.0, **given})
    made._all_stop_token_ids = {STOP}
    if given.get("bad_words"):
        made._bad_words_token_ids = BAD_WORDS
    return made


def batch_of(requests: list[tuple[SamplingParams, list[int]]]) -> InputBatch:
    """vLLM's batch of requests, each with its output so far."""
    config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=len(requests)))
    device = torch.device("cpu")
    kinds = (MinTokensLogitsProcessor, LogitBiasLogitsProcessor, MinPLogitsProcessor)
    batch = InputBatch(
        max_num_reqs=len(requests),
        max_model_len=64,
        max_num_batched_tokens=64,
        device=device,
        vocab_size=VOCAB,
        block_sizes=[16],
        max_num_blocks_per_req=[4],
        logitsprocs=LogitsProcessors(kind(config, device, False) for kind in kinds),
    )
    for i, (wanted, output) in enumerate(requests):
        batch.add_request(CachedRequestState(str(i), PROMPT, [], wanted, None, ([0],), 0, list(output)))
    batch.refresh_metadata()
    return batch


def rows_alone(requests: list[SamplingParams]) -> list[tuple[SamplingParams, list[int]]]:
    """Every row of TREES as a request whose output ends with the row's path."""
    made = []
    for row in range(TREES.num_rows):
        request, local = int(TREES.request[row]), int(TREES.local[row])
        start = int(TREES.offsets[request])
        path = [int(TREES.tokens[start + node]) for node in TREES.path(request, local)]
        made.append((requests[request], OUTPUTS[request] + path))
    return made


def plain_law(logits: torch.Tensor, batch: InputBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(processed logits, law) of a plain batch, by vLLM's own sampler."""
    sampler, metadata = Sampler("processed_logits"), batch.sampling_metadata
    processed = sampler.apply_logits_processors(logits.clone(), metadata, predict_bonus_token=False)
    best = processed.argmax(dim=-1)
    if metadata.all_greedy:
        return processed, torch.nn.functional.one_hot(best, VOCAB).float()
    law = sampler.sample(processed.clone(), metadata)[1].softmax(dim=-1)
    greedy = metadata.temperature < sampling.GREEDY_BELOW
    law[greedy] = torch.nn.functional.one_hot(best[greedy], VOCAB).float()
    return processed, law


def compared(requests: list[SamplingParams]) -> tuple[sampling.RowLaws, torch.Tensor]:
    """Assert equality for all rows; the rows' laws."""
    logits = torch.randn(TREES.num_rows, VOCAB, generator=torch.Generator().manual_seed(3)) * 3
    kept = logits.clone()
    together = batch_of(list(zip(requests, OUTPUTS, strict=True)))
    laws = sampling.RowLaws(logits, together.sampling_metadata, TreeRows.of(TREES), Sampler())
    every = torch.arange(TREES.num_rows)
    processed, law = plain_law(logits, batch_of(rows_alone(requests)))
    assert torch.equal(laws.processed(every)[0], processed)
    assert torch.equal(laws.best(), processed.argmax(dim=-1))
    if not together.sampling_metadata.all_greedy:
        assert torch.equal(laws[every], law)
        assert torch.equal(laws[torch.tensor([4, 5, 8])], law[[4, 5, 8]])
        assert torch.equal(laws[torch.tensor([4, 2, 8])], law[[4, 2, 8]])  # one row moved, two stayed
    assert torch.equal(logits, kept)
    return laws, law


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_row_gets_what_its_path_gives_it(name):
    requests = [params(**PARAMETERS[name]) for _ in OUTPUTS]
    compared(requests)


@pytest.mark.parametrize("name", PARAMETERS)
@pytest.mark.parametrize("place", range(3))
def test_in_a_mixed_batch_too(name, place):
    others = [params(temperature=0.0), params(temperature=0.7, top_p=0.8), params(temperature=0.0)]
    others[place] = params(**PARAMETERS[name])
    compared(others)


def test_a_batch_without_such_parameters_is_left_alone():
    plain = batch_of([(params(), []), (params(temperature=0.5, top_p=0.5, min_p=0.1), []), (params(top_k=3), [])])
    assert not change_logits(plain.sampling_metadata)
    for name in ("logit_bias", "allowed", "presence", "frequency", "repetition", "bad words", "min_tokens"):
        assert change_logits(batch_of([(params(**PARAMETERS[name]), [])]).sampling_metadata), name


def test_ignoring_the_path_is_caught(monkeypatch):
    """Negative control: penalties of the committed text only."""
    from specinfer_vllm.engine import row_parameters

    def without_path(metadata, trees, rows, requests):
        return [list(metadata.output_token_ids[request]) for request in requests]

    monkeypatch.setattr(row_parameters, "_outputs", without_path)
    for name in ("presence", "frequency", "repetition", "bad words"):
        with pytest.raises(AssertionError):
            compared([params(**PARAMETERS[name]) for _ in OUTPUTS])


def test_a_fixed_row_has_its_token_for_certain():
    laws, _ = compared([params(), params(top_k=3), params(temperature=0.0)])
    laws.fix(torch.tensor([5]), torch.tensor([17]))
    assert int(laws.best()[5]) == 17
    law = laws[torch.tensor([5])]
    assert float(law[0, 17]) == 1.0 and float(law.sum()) == 1.0


@pytest.mark.parametrize("poison", [float("nan"), float("-inf")])
def test_logits_that_say_nothing_give_the_first_token(poison):
    """As plain vLLM's argmax does; the request's neighbours are not touched."""
    logits = torch.randn(TREES.num_rows, VOCAB, generator=torch.Generator().manual_seed(4))
    logits[1] = poison
    batch = batch_of([(params(), output) for output in OUTPUTS])
    laws = sampling.RowLaws(logits, batch.sampling_metadata, TreeRows.of(TREES), Sampler())
    law = laws[torch.tensor([1, 2])]
    assert float(law[0, 0]) == 1.0 and law.isfinite().all()
    torch.testing.assert_close(law[1], logits[2].softmax(dim=-1))


def test_a_tiny_temperature_is_greedy():
    """vLLM raises temperatures below 0.01 to 0.01 and calls those below 1e-5 greedy."""
    requests = [params(temperature=1e-6) for _ in OUTPUTS]
    laws, law = compared(requests)
    assert law.isfinite().all()
