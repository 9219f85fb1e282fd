# SPDX-License-Identifier: Apache-2.0
"""A decoder with random weights, small enough for Triton's interpreter: an LLM, or an SSM of the same vocabulary."""

from pathlib import Path

VOCAB = 512


def make(folder: Path, layers: int, seed: int = 0, hidden: int = 128, heads: int = 4, context: int = 256) -> Path:
    """Save a Llama in fp32 to a folder. Weights are spread widely, so that its best logits are no near ties."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=context,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


def with_three_heads(source: Path, folder: Path) -> Path:
    """Save such a model of four query heads and two KV heads without its last query head, each other with a KV head.

    As a Mistral, since a Llama's hidden size must be a multiple of its heads.
    """
    from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    size, weights = model.config.head_dim, model.state_dict()
    for name, weight in weights.items():
        if "k_proj" in name or "v_proj" in name:
            weights[name] = weight.view(2, size, -1)[[0, 0, 1]].flatten(0, 1)
        elif "q_proj" in name:
            weights[name] = weight[: 3 * size].clone()
        elif "o_proj" in name:
            weights[name] = weight[:, : 3 * size].clone()
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "max_position_embeddings",
        "head_dim",
    )
    config = MistralConfig(
        **{name: getattr(model.config, name) for name in same},
        num_attention_heads=3,
        num_key_value_heads=3,
        sliding_window=None,
        tie_word_embeddings=False,
        rope_parameters=model.config.rope_parameters,
    )
    smaller = MistralForCausalLM(config)
    smaller.load_state_dict(weights)
    smaller.save_pretrained(folder)
    return folder


def cut(source: Path, folder: Path, layers: int) -> Path:
    """Save the first layers of such a model: an SSM whose tokens are its LLM's now and then."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(folder)
    return folder


def primer(path: Path, texts: list[list[int]]) -> Path:
    """Save a primer of such a model that says what followed in these texts, each as long as a primer's context."""
    import numpy as np

    from specinfer_vllm.propose.proposer import Observation
    from specinfer_vllm.propose.successors import CONTEXT, NOBODY, SuccessorRows

    places = [
        ([*text[at::-1], *[-1] * CONTEXT][:CONTEXT], text[at + 1]) for text in texts for at in range(len(text) - 1)
    ]
    context, following = (np.array(each) for each in zip(*places, strict=True))
    rows = SuccessorRows(len(places), 1, VOCAB)
    seen = Observation(np.arange(len(places)), context[:, 0], following[:, None], np.ones((len(places), 1)))
    rows.append(np.full(len(places), NOBODY), np.ascontiguousarray(context[:, 1:], np.int32), seen)
    rows.save(path)
    return path
