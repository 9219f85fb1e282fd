# SPDX-License-Identifier: Apache-2.0
"""An SSM must speak the LLM's language: checked on tokenizers and configurations, before any weight is read."""

from __future__ import annotations

from typing import Any

from specinfer_vllm.config import SsmOptions, TreeOptionError


def check_ssm(ssm: SsmOptions, index: int, llm: Any) -> None:
    """Raise TreeOptionError unless the SSM exists, is a decoder, and its tokens are the LLM's. llm: ModelConfig.

    Vocabularies may differ in padding: ids that are no token of the LLM's tokenizer are never drafted.
    """
    from transformers import AutoConfig

    name = f"speculative_config.ssms[{index}]"
    try:
        config = AutoConfig.from_pretrained(ssm.model, revision=ssm.revision, trust_remote_code=llm.trust_remote_code)
    except Exception as error:
        raise TreeOptionError(
            f"{name}: {ssm.model!r} is no model that can be read ({str(error).splitlines()[0]}); "
            "give a folder with config.json or a hub id that can be reached"
        ) from error
    if any(getattr(config, key, None) for key in ("is_encoder_decoder", "mamba_d_state", "layers_block_type")):
        raise TreeOptionError(f"{name}: {ssm.model!r} ({config.model_type}) is no plain decoder; use one as the SSM")
    check_tokens(name, ssm, llm)
    check_sizes(name, ssm.model, config.get_text_config().vocab_size, llm)


def check_tokens(name: str, ssm: SsmOptions, llm: Any) -> None:
    """Compare the tokenizers token by token. An SSM without tokenizer files is taken to use the LLM's."""
    from transformers import AutoTokenizer
    from vllm.tokenizers import get_tokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(ssm.model, revision=ssm.revision, trust_remote_code=llm.trust_remote_code)
    except Exception:
        return
    mine = tokens_by_id(tokenizer)
    theirs = tokens_by_id(get_tokenizer(llm.tokenizer, trust_remote_code=llm.trust_remote_code))
    for i in sorted(mine.keys() & theirs.keys()):
        if mine[i] != theirs[i]:
            raise TreeOptionError(
                f"{name}: {ssm.model!r} has another vocabulary than the LLM: token {i} is {mine[i]!r} here and {theirs[i]!r} "
                "there. Use an SSM of the same tokenizer family"
            )


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Every token of a tokenizer by its id."""
    return {i: token for token, i in tokenizer.get_vocab().items()}


def check_sizes(name: str, model: str, size: int, llm: Any) -> None:
    """The SSM's head must reach the LLM's tokens; more ids are padding, fewer are allowed down to none of the tokens."""
    vocab_size = llm.get_vocab_size()
    if size < vocab_size // 2:
        raise TreeOptionError(
            f"{name}: {model!r} has {size} token ids and the LLM {vocab_size}; that is another vocabulary. "
            "Use an SSM of the same tokenizer family"
        )


def draftable_tokens(ssm_vocab: int, llm: Any) -> int:
    """How many ids, from 0, may be drafted: those both heads have and the LLM's tokenizer knows. llm: ModelConfig."""
    from vllm.tokenizers import get_tokenizer

    known = max(get_tokenizer(llm.tokenizer, trust_remote_code=llm.trust_remote_code).get_vocab().values()) + 1
    return min(ssm_vocab, llm.get_vocab_size(), known)
