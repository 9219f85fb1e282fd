# SPDX-License-Identifier: Apache-2.0
"""An SSM must speak the LLM's language: checked on tokenizers and configurations, before any weight is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from specinfer_vllm.config import SHARDED, WHERE, SsmOptions, TreeOptionError, ssm_slots

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
)
# What an SSM must not be: attribute of vLLM's ModelConfig, and what that is called.
NO_SSM = {
    "is_hybrid": "has recurrent layers",
    "is_attention_free": "has no attention",
    "is_encoder_decoder": "is an encoder-decoder model",
    "is_multimodal_model": "reads more than text",
    "use_mla": "has latent attention (MLA)",
    "uses_alibi": "has ALiBi attention",
    "uses_mrope": "has M-RoPE positions",
}


def check_ssm(ssm: SsmOptions, index: int, config: Any) -> None:
    """Raise TreeOptionError unless vLLM can load the SSM, it fits, and its tokens are the LLM's. config: VllmConfig.

    Vocabularies may differ in padding: ids that are no token of the LLM's tokenizer are never drafted.
    """
    name = f"{WHERE}.ssms[{index}]"
    check_folder(name, ssm.model)
    model = read_config(name, ssm, config)
    for attribute, kind in NO_SSM.items():
        if getattr(model, attribute, False):
            raise TreeOptionError(f"{name}: {ssm.model!r} {kind}; use a plain text decoder as the SSM")
    options = config.speculative_config.tree
    if options.ssm_placement == SHARDED:
        check_parallel(name, ssm, model, config.parallel_config)
    check_room(name, ssm.model, model, ssm_slots(options, index))
    check_tokens(name, ssm, config.model_config)
    check_sizes(name, ssm.model, model.get_vocab_size(), config.model_config)
    tree = options.static_trees[index]
    check_draft_vocab(name, ssm, model, config, tree.widest if tree else ssm.width)


def check_folder(name: str, model: str) -> None:
    """Raise TreeOptionError for a path that leads nowhere, before anybody takes it for a hub id and asks for it."""
    is_path = model.startswith((".", os.sep)) or model.count("/") > 1 or "\\" in model
    if is_path and not os.path.isdir(model):
        raise TreeOptionError(f"{name}: {model!r} is no folder; give a folder with config.json, or a hub id")
    if os.path.isdir(model) and not os.path.isfile(os.path.join(model, "config.json")):
        raise TreeOptionError(f"{name}: {model!r} has no config.json; give the folder of a Hugging Face model")


def read_config(name: str, ssm: SsmOptions, config: Any) -> Any:
    """The SSM's ModelConfig, exactly as its weights will be loaded by. Raises TreeOptionError."""
    from specinfer_vllm.propose.ssm import ssm_model_config

    try:
        return ssm_model_config(ssm.model, ssm.revision, config)
    except Exception as error:
        raise TreeOptionError(
            f"{name}: {ssm.model!r} is no model that vLLM can load ({first_line(error)}); "
            "give a folder with config.json or a hub id that can be reached"
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, without pydantic's frame and without what follows."""
    details = getattr(error, "errors", None)
    text = details()[0]["msg"] if callable(details) and details() else str(error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def check_parallel(name: str, ssm: SsmOptions, model: Any, parallel: Any) -> None:
    """Raise TreeOptionError when the SSM cannot be sharded over the LLM's ranks. model: its ModelConfig."""
    ranks, heads = parallel.tensor_parallel_size, model.get_total_num_kv_heads()
    try:
        model.verify_with_parallel_config(parallel)
        if max(ranks, heads) % min(ranks, heads):  # vLLM's layers assert it while they are built
            raise ValueError(f"{heads} KV heads cannot be divided among {ranks} ranks")
    except (ValueError, NotImplementedError) as error:
        raise TreeOptionError(
            f"{name}: {ssm.model!r} cannot run on the LLM's ranks ({first_line(error)}); use another SSM, fewer ranks, "
            "or ssm_placement 'replicated'"
        ) from error


def check_room(name: str, model: str, ssm: Any, slots: int) -> None:
    """Raise TreeOptionError when the SSM's own tree is longer than its context: it would never draft."""
    if slots + 2 > ssm.max_model_len:
        raise TreeOptionError(
            f"{name}: its tree takes {slots} slots of a context of {ssm.max_model_len} tokens ({model!r} under the "
            "LLM's max_model_len), so it never drafts; make its tree, expansion, width or depth smaller"
        )


def check_tokens(name: str, ssm: SsmOptions, llm: Any) -> None:
    """Compare the tokenizers token by token. An SSM without tokenizer files is taken to use the LLM's."""
    from vllm.tokenizers import get_tokenizer

    theirs = known_tokens(llm)
    if theirs is None or lacks_tokenizer(ssm.model):
        return
    try:
        tokenizer = get_tokenizer(ssm.model, revision=ssm.revision, trust_remote_code=llm.trust_remote_code)
    except Exception as error:
        raise TreeOptionError(
            f"{name}: the tokenizer of {ssm.model!r} cannot be read ({first_line(error)}); "
            "mend it, or remove its files if it is the LLM's"
        ) from error
    mine = tokens_by_id(tokenizer)
    for i in sorted(mine.keys() & theirs.keys()):
        if mine[i] != theirs[i]:
            raise TreeOptionError(
                f"{name}: {ssm.model!r} has another vocabulary than the LLM: token {i} is {mine[i]!r} here and "
                f"{theirs[i]!r} there. Use an SSM of the same tokenizer family"
            )


def lacks_tokenizer(model: str) -> bool:
    """Whether a local folder holds weights only."""
    return os.path.isdir(model) and not any((Path(model) / each).exists() for each in TOKENIZER_FILES)


def known_tokens(llm: Any) -> dict[int, str] | None:
    """The LLM's tokens by id; None when it is served without a tokenizer. llm: ModelConfig."""
    from vllm.tokenizers import cached_tokenizer_from_config

    tokenizer = cached_tokenizer_from_config(llm)
    return None if tokenizer is None else tokens_by_id(tokenizer)


def tokens_by_id(tokenizer: Any) -> dict[int, str]:
    """Every token of a tokenizer by its id."""
    return {i: token for token, i in tokenizer.get_vocab().items()}


def check_sizes(name: str, model: str, size: int, llm: Any) -> None:
    """The SSM's head must reach the LLM's tokens; more ids are padding, fewer are allowed down to half of them."""
    vocab_size = llm.get_vocab_size()
    if size < vocab_size // 2:
        raise TreeOptionError(
            f"{name}: {model!r} has {size} token ids and the LLM {vocab_size}; that is another vocabulary. "
            "Use an SSM of the same tokenizer family"
        )


def check_draft_vocab(name: str, ssm: SsmOptions, model: Any, config: Any, width: int) -> None:
    """Raise TreeOptionError for a draft vocabulary that cannot be used. width: children per node at most."""
    from specinfer_vllm.propose.draft_vocab import read_draft_vocab

    try:
        ids = read_draft_vocab(ssm.model, ssm.revision, draftable_tokens(model.get_vocab_size(), config.model_config))
    except ValueError as error:
        raise TreeOptionError(f"{name}: {error}") from None
    if ids is None:
        return
    if len(ids) < width:
        raise TreeOptionError(f"{name}: {width} children per node of a draft vocabulary of {len(ids)} tokens; lower it")
    is_sharded = config.speculative_config.tree.ssm_placement == SHARDED
    if is_sharded and config.parallel_config.tensor_parallel_size > 1:
        raise TreeOptionError(
            f"{name}: a draft vocabulary needs the whole head on one rank; remove it, serve with TP 1, or use "
            "ssm_placement 'replicated'"
        )


def draftable_tokens(ssm_vocab: int, llm: Any) -> int:
    """How many ids, from 0, may be drafted: those both heads have and the LLM's tokenizer knows. llm: ModelConfig."""
    tokens = known_tokens(llm)
    known = llm.get_vocab_size() if tokens is None else max(tokens) + 1
    return min(ssm_vocab, llm.get_vocab_size(), known)
