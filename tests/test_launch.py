# SPDX-License-Identifier: Apache-2.0
"""What a tree cannot be combined with is refused while the configuration is built, long before weights are read."""

import json
import logging
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig, ModelConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import base_loader  # noqa: E402

from specinfer_vllm.config import VERIFIERS, TreeOptionError, TreeOptions  # noqa: E402
from specinfer_vllm.engine import launch  # noqa: E402
from specinfer_vllm.engine.vocabulary import draftable_tokens  # noqa: E402
from specinfer_vllm.patches import hooks  # noqa: E402
from specinfer_vllm.patches.patch import Hook  # noqa: E402
from specinfer_vllm.propose.primer import find_primer, primer_path  # noqa: E402
from specinfer_vllm.propose.successors import SuccessorRows  # noqa: E402

CONTEXT = 256
VOCABULARY = 49152


@pytest.fixture(autouse=True)
def no_weights(monkeypatch):
    """Nothing here may get as far as reading weights."""

    def load(*args, **kwargs):
        raise AssertionError("weights are read")

    monkeypatch.setattr(base_loader.BaseModelLoader, "load_model", load)


@pytest.fixture
def configure(model_path):
    """Build the configuration of an engine that serves a tree."""

    def build(tree: dict | str = "tree", model: Path = model_path, **options):
        value = {"method": "tree", **tree} if isinstance(tree, dict) else tree
        settings = {"max_model_len": CONTEXT, **options}
        return EngineArgs(model=str(model), speculative_config=value, **settings).create_engine_config()

    return build


@pytest.fixture
def folder(model_path, tmp_path):
    """A model's folder with the LLM's files but its weights, changed as asked."""

    def make(name: str = "model", tokenizer=None, without: tuple[str, ...] = (), **config) -> Path:
        made = tmp_path / name
        made.mkdir()
        for file in ("tokenizer.json", "tokenizer_config.json"):
            if file not in without:
                shutil.copy(model_path / file, made)
        if tokenizer is not None:
            (made / "tokenizer.json").write_text(json.dumps(tokenizer))
        plain = json.loads((model_path / "config.json").read_text())
        (made / "config.json").write_text(json.dumps({**plain, "num_hidden_layers": 1, **config}))
        return made

    return make


@pytest.fixture
def tokenizer(model_path) -> dict:
    return json.loads((model_path / "tokenizer.json").read_text())


# -- options and lengths -----------------------------------------------------------------------------------------------


def test_a_tree_passes(configure):
    assert configure().speculative_config.num_speculative_tokens >= 1


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"num_node": 3}, "num_node: unknown option; did you mean 'num_nodes'"),
        ({"num_nodes": -1}, "num_nodes: -1 is out of range; give 1 to 1024 nodes"),
        ({"batch_nodes": 1 << 40}, "batch_nodes: 1099511627776 is out of range"),
    ],
)
def test_a_bad_option_is_refused(configure, tree, message):
    with pytest.raises(TreeOptionError, match=message):
        configure(tree)


@pytest.mark.parametrize(
    "tree, length, message",
    [
        ({"depth": 15}, 16, "depth: a tree of 15 levels never fits max_model_len=16; use at most 14 levels or raise"),
        ("tree", 4, "depth: a tree of [0-9]+ levels never fits max_model_len=4"),
        ({"num_nodes": 63}, 64, "num_nodes: 63 nodes never fit max_model_len=64; use at most 62"),
    ],
)
def test_a_tree_that_never_fits_is_refused(configure, tree, length, message):
    with pytest.raises(TreeOptionError, match=message):
        configure(tree, max_model_len=length)


def test_an_expansion_that_never_fits_is_refused(configure, model_path):
    with pytest.raises(TreeOptionError, match="expansion: a tree of 8 levels never fits max_model_len=9"):
        configure({"ssms": [str(model_path)], "expansion": [1] * 8}, max_model_len=9)
    paths = [[0] * depth for depth in range(1, 9)]
    with pytest.raises(TreeOptionError, match=r"\.tree: a tree of 8 levels never fits max_model_len=9"):
        configure(
            {"ssms": [str(model_path), {"model": str(model_path), "tree": paths}], "expansion": [1]}, max_model_len=9
        )


def test_the_deepest_tree_that_fits_passes(configure):
    assert configure({"depth": 14}, max_model_len=16).speculative_config.tree.max_depth == 14


def test_a_small_token_budget_is_explained(configure, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    tree = {"num_nodes": 4, "batch_nodes": 16}
    configure(tree, max_num_batched_tokens=16, max_num_seqs=16)
    assert "max_num_batched_tokens=16 is less than a full batch with its trees needs (32" in caplog.text
    caplog.clear()
    configure(tree, max_num_batched_tokens=32, max_num_seqs=16)
    assert "is less than a full batch" not in caplog.text


# -- settings of vLLM --------------------------------------------------------------------------------------------------

REFUSED = {
    "kv connector": (
        {"kv_transfer_config": KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")},
        "kv_transfer_config: .*leave it out",
    ),
    "kv offloading": ({"kv_offloading_size": 1.0}, "kv_offloading_size=1.0: .*leave it out"),
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2: .*use pipeline_parallel_size=1"),
    "decode context": ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2: .*use 1"),
    "prefill context": ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size=2: .*use 1"),
    "fp8": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8': .*use kv_cache_dtype='auto'"),
    "fp8 by its full name": ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2': .*use kv_cache_dtype='auto'"),
    "async": ({"async_scheduling": True}, "async_scheduling: .*leave it out or say False"),
    "lora": ({"enable_lora": True}, "enable_lora: .*serve without adapters"),
    "worker": ({"worker_cls": "my.Worker"}, "worker_cls: 'my.Worker' cannot be combined .*leave it out"),
    "pickled worker": ({"worker_cls": b"..."}, "worker_cls: a bytes cannot be combined .*leave it out"),
    "scheduler": ({"scheduler_cls": "my.Scheduler"}, "scheduler_cls: 'my.Scheduler' cannot be combined .*leave it out"),
    "scheduler class": ({"scheduler_cls": dict}, "scheduler_cls: a type cannot be combined .*leave it out"),
    "watermark": ({"watermark_config": {"algorithm": "a"}}, "watermark_config: .*leave it out"),
    "sampling mask": ({"return_sampling_mask": True}, "return_sampling_mask: .*leave it out"),
    "routed experts": ({"enable_return_routed_experts": True}, "enable_return_routed_experts: not supported"),
    "fast prefill": ({"kv_sharing_fast_prefill": True}, "kv_sharing_fast_prefill: .*leave it off"),
}


@pytest.mark.parametrize("options, message", REFUSED.values(), ids=REFUSED)
def test_a_setting_that_is_in_the_way_is_refused_by_name_with_the_fix(configure, options, message):
    with pytest.raises(TreeOptionError, match=f"^{message}") as refused:
        configure(**options)
    assert "method 'tree'" in str(refused.value)


@pytest.mark.parametrize(
    "options", [{"async_scheduling": False}, {"kv_cache_dtype": "float16"}, {"enable_lora": False}]
)
def test_harmless_settings_pass(configure, options):
    assert configure(**options).speculative_config is not None


def test_every_setting_that_is_refused_exists_in_vllm(configure, model_path):
    args, model = EngineArgs(model=str(model_path)), configure().model_config
    missing = [each.name for each in launch.ARGUMENTS if not hasattr(args, each.name)]
    missing += [each.name for each in launch.MODELS if not hasattr(model, each.name)]
    assert not missing


def test_a_quantised_cache_that_the_checkpoint_asks_for_is_refused(configure):
    config = configure()
    config.cache_config.cache_dtype = "fp8_e4m3"  # what vLLM makes of 'auto' then
    with pytest.raises(TreeOptionError, match="kv_cache_dtype='fp8_e4m3': .*use kv_cache_dtype='auto'"):
        launch.check(config)


def test_a_connector_that_vllm_adds_itself_is_refused(configure):
    config = configure()
    config.kv_transfer_config = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    with pytest.raises(TreeOptionError, match="^kv_transfer_config: not supported"):
        launch.check(config)


# -- devices, runners, vLLMs -------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator(monkeypatch):
    """A vLLM that runs on something else than a CPU; is_cuda_alike is the test's to say."""
    from vllm.platforms import current_platform

    def pretend(name: str, is_cuda_alike: bool) -> None:
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
        monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: is_cuda_alike)
        monkeypatch.setattr(type(current_platform), "device_name", name)

    return pretend


def test_a_device_without_an_adapter_is_refused_by_name(configure, accelerator):
    accelerator("xpu", is_cuda_alike=False)
    with pytest.raises(TreeOptionError, match="method: 'tree' runs on CPUs and on NVIDIA and AMD GPUs, not on xpu"):
        configure()


def test_the_v1_runner_is_refused_on_a_gpu(configure, accelerator, monkeypatch):
    accelerator("cuda", is_cuda_alike=True)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(TreeOptionError, match="VLLM_USE_V2_MODEL_RUNNER=0: on a GPU .*V2 runner only; unset it"):
        configure()


def test_the_v2_runner_is_refused_without_triton(configure, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(TreeOptionError, match="VLLM_USE_V2_MODEL_RUNNER=1 asks for .* needs Triton.*unset it"):
        configure()


@pytest.fixture
def runner_v2(monkeypatch):
    """A machine on which vLLM takes the V2 runner."""
    import vllm.config.vllm
    import vllm.triton_utils

    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for module in (vllm.triton_utils, vllm.config.vllm):
        monkeypatch.setattr(module, "HAS_TRITON", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_nodes": 64}, "batch_nodes: 64 is not served by vLLM's V2 runner; its trees have num_nodes nodes"),
        ({"row_cost": 0.1}, "row_cost: 0.1 is not served by vLLM's V2 runner; .*; leave it out, and set num_nodes"),
        ({"share_recycling": True}, "share_recycling: True is not served by vLLM's V2 runner; leave it out: each"),
        ({"seed": 3}, "seed: 3 is not served by vLLM's V2 runner; .* vLLM's own --seed"),
    ],
)
def test_what_the_v2_runner_does_not_serve_is_refused(configure, runner_v2, options, message):
    with pytest.raises(TreeOptionError, match=message):
        configure(options)


def test_the_v2_runner_is_prepared_for(configure, runner_v2):
    config = configure({"num_nodes": 5, "proposers": ["ngram", "recycling"], "merge": "first"})
    assert config.speculative_config.method == "draft_model"
    assert config.use_v2_model_runner
    assert config.num_lookahead_tokens >= 5
    assert config.speculative_config.use_ngram()  # draft-free proposers scan the tokens, on the device


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_the_v2_runner_serves_every_verifier(configure, runner_v2, ssm_path, verifier):
    tree = configure({"ssms": [str(ssm_path)], "verifier": verifier}).speculative_config.tree
    assert tree.verifier == verifier


def test_a_runner_that_vllm_takes_on_its_own_is_refused(configure, monkeypatch):
    config = configure()
    monkeypatch.setattr(type(config), "use_v2_model_runner", property(lambda self: True))
    with pytest.raises(TreeOptionError, match="prepared for vLLM's V1 runner, and vLLM takes the other one"):
        launch.check(config)


@pytest.mark.parametrize("runner", ["V1", "V2"])
@pytest.mark.parametrize("name", ["torch", "flashinfer", "xformers"])
def test_a_cpus_own_attention_has_no_stand_in(configure, request, runner, name):
    if runner == "V2":
        request.getfixturevalue("runner_v2")
    with pytest.raises(TreeOptionError, match=f"tree_attention: '{name}' .* on a CPU trees have their own.*leave it"):
        configure({"tree_attention": name})


def test_a_vllm_that_changed_is_refused_by_the_hook(configure, monkeypatch):
    gone = Hook("vllm.v1.core.sched.scheduler", "Scheduler.renamed_since")
    monkeypatch.setattr(hooks, "LAUNCH", (*hooks.LAUNCH, gone))
    with pytest.raises(
        TreeOptionError, match="does not fit this vLLM: vllm.*Scheduler.renamed_since: not found.*doctor"
    ):
        configure()


# -- models ------------------------------------------------------------------------------------------------------------


def test_a_mamba_model_is_refused(configure, folder):
    sizes = {"hidden_size": 64, "state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": 4}
    mamba = folder(architectures=["MambaForCausalLM"], model_type="mamba", intermediate_size=128, **sizes)
    with pytest.raises(TreeOptionError, match=f"^model: '{mamba}': is_attention_free: .*recurrent state"):
        configure(model=mamba)


@pytest.mark.parametrize("attribute", ["is_hybrid", "is_encoder_decoder", "uses_mrope", "use_mla", "uses_alibi"])
def test_a_model_that_trees_cannot_verify_is_refused(configure, monkeypatch, attribute):
    monkeypatch.setattr(ModelConfig, attribute, property(lambda self: True))
    with pytest.raises(TreeOptionError, match=f"^model: .*: {attribute}: not supported with method 'tree': .*; use"):
        configure()


def test_a_pooling_model_is_refused(configure):
    with pytest.raises(TreeOptionError, match="^model: .*: runner_type='pooling': .*use a generating model"):
        configure(runner="pooling", convert="embed")


# -- SSMs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/no/such/folder", "./missing", "models/of/mine", "~/missing"])
def test_an_ssm_path_that_leads_nowhere_is_refused(configure, folder, path):
    shown = os.path.expanduser(path)
    with pytest.raises(TreeOptionError, match=rf"ssms\[1\]: '{shown}' is no folder; give a folder with config.json"):
        configure({"ssms": [folder(), path]})


def test_a_folder_without_a_model_is_refused(configure, tmp_path):
    with pytest.raises(TreeOptionError, match=rf"ssms\[0\]: '{tmp_path}' has no config.json"):
        configure({"ssms": [str(tmp_path)]})


def test_a_hub_id_that_cannot_be_reached_is_refused(configure):
    with pytest.raises(TreeOptionError, match=r"ssms\[0\]: 'nobody/nothing' is no model that vLLM can load"):
        configure({"ssms": ["nobody/nothing"]})


def test_a_model_that_vllm_does_not_know_is_refused(configure, folder):
    unknown = folder(architectures=["NoSuchForCausalLM"], model_type="no_such")
    with pytest.raises(TreeOptionError, match=r"ssms\[0\]: .* is no model that vLLM can load \(.+\); give"):
        configure({"ssms": [unknown]})


def test_an_ssm_like_the_llm_passes(configure, folder):
    config = configure({"ssms": [folder()], "expansion": [2, 1]})
    assert config.speculative_config.num_speculative_tokens == 4
    assert config.speculative_config.num_lookahead_tokens == 3
    config = configure({"ssms": [folder("other")], "tree": [[0], [1], [0, 0], [0, 1], [0, 0, 0]]})
    assert config.speculative_config.num_speculative_tokens == 5
    assert config.speculative_config.num_lookahead_tokens == 3  # the next root, and two nodes that have children


def test_an_ssm_without_a_tokenizer_takes_the_llms(configure, folder):
    configure({"ssms": [folder(without=("tokenizer.json", "tokenizer_config.json"))]})


def test_a_tokenizer_that_cannot_be_read_is_refused(configure, folder):
    broken = folder()
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(TreeOptionError, match=r"ssms\[0\]: the tokenizer of .* cannot be read"):
        configure({"ssms": [broken]})


def test_another_vocabulary_is_refused_with_the_first_token_that_differs(configure, folder, tokenizer):
    vocabulary = tokenizer["model"]["vocab"]
    names = {i: token for token, i in vocabulary.items()}
    for first, second in ((1027, 1028), (2000, 2001)):
        vocabulary[names[first]], vocabulary[names[second]] = second, first
    other = folder(tokenizer=tokenizer)
    with pytest.raises(TreeOptionError) as refused:
        configure({"ssms": [str(folder("same")), str(other)]})
    assert str(refused.value).startswith("speculative_config.ssms[1]: ")
    assert f"token 1027 is {names[1028]!r} here and {names[1027]!r} there" in str(refused.value)
    assert "Use an SSM of the same tokenizer family" in str(refused.value)


def test_a_head_that_is_far_too_small_is_refused(configure, folder):
    with pytest.raises(
        TreeOptionError, match=r"ssms\[0\]: .* has 1000 token ids and the LLM 49152; that is another voc"
    ):
        configure({"ssms": [folder(without=("tokenizer.json", "tokenizer_config.json"), vocab_size=1000)]})


@pytest.mark.parametrize("padded", [VOCABULARY + 128, VOCABULARY - 100])
def test_padding_may_differ(configure, folder, padded):
    config = configure({"ssms": [folder(vocab_size=padded)]})
    assert config.speculative_config.tree.ssms


def test_padded_ids_are_never_drafted(configure, folder):
    config = configure(model=folder("padded", vocab_size=VOCABULARY + 512))
    llm = config.model_config
    assert llm.get_vocab_size() == VOCABULARY + 512
    assert draftable_tokens(VOCABULARY + 128, llm) == VOCABULARY  # both heads have more; the tokenizer does not
    assert draftable_tokens(VOCABULARY, llm) == VOCABULARY
    assert draftable_tokens(VOCABULARY - 100, llm) == VOCABULARY - 100


def test_without_a_tokenizer_both_heads_decide(configure, folder):
    llm = configure(model=folder("padded", vocab_size=VOCABULARY + 512), skip_tokenizer_init=True).model_config
    assert draftable_tokens(VOCABULARY + 128, llm) == VOCABULARY + 128


def test_a_recurrent_ssm_is_refused(configure, folder):
    sizes = {"hidden_size": 64, "state_size": 16, "expand": 2, "conv_kernel": 4, "time_step_rank": 4}
    mamba = folder(architectures=["MambaForCausalLM"], model_type="mamba", intermediate_size=128, **sizes)
    with pytest.raises(TreeOptionError, match=r"ssms\[0\]: .* has no attention; use a plain text decoder"):
        configure({"ssms": [mamba]})


def test_an_ssm_whose_own_tree_never_fits_its_context_is_refused(configure, folder):
    short = folder(max_position_embeddings=32)
    with pytest.raises(
        TreeOptionError, match=r"ssms\[0\]: its tree takes 48 slots of a context of 32 tokens .*smaller"
    ):
        configure({"ssms": [{"model": short, "width": 16}], "depth": 4})


def test_an_ssm_that_cannot_be_split_like_the_llm_is_refused(configure, folder):
    config = configure({"ssms": [folder()]})
    config.parallel_config.tensor_parallel_size = 2  # 9 heads
    with pytest.raises(
        TreeOptionError,
        match=r"ssms\[0\]: .* cannot run on the LLM's ranks \(.*9.*\); use another SSM, .* ssm_placement 'replicated'",
    ):
        launch.check(config)


def test_kv_heads_that_the_ranks_do_not_divide_are_refused(configure, folder):
    config = configure({"ssms": [folder("few", num_attention_heads=8, num_key_value_heads=2, hidden_size=512)]})
    config.parallel_config.tensor_parallel_size = 4
    launch.check(config)  # each KV head on two ranks
    config = configure({"ssms": [folder("odd", num_attention_heads=12, num_key_value_heads=6, hidden_size=768)]})
    config.parallel_config.tensor_parallel_size = 4
    with pytest.raises(TreeOptionError, match=r"ranks \(6 KV heads cannot be divided among 4 ranks\); .*'replicated'"):
        launch.check(config)


@pytest.mark.parametrize("placement", ["replicated", "one_per_rank"])
def test_an_ssm_that_is_not_sharded_may_have_any_heads(configure, runner_v2, folder, placement):
    narrow = folder()
    np.save(narrow / "draft_vocab.npy", np.arange(64, dtype=np.int32))
    config = configure({"ssms": [narrow], "ssm_placement": placement})
    config.parallel_config.tensor_parallel_size = 2  # 9 heads
    launch.check(config)


def test_one_ssm_per_rank_is_refused_on_the_v1_runner(configure, ssm_path):
    tree = {"ssms": [str(ssm_path)], "ssm_placement": "one_per_rank"}
    configure(tree)  # with one rank there is nothing to place
    with pytest.raises(
        TreeOptionError, match="ssm_placement: 'one_per_rank' does not run on vLLM's V1 runner; use 'replicated'"
    ):
        configure(tree, tensor_parallel_size=3)


def test_one_ssm_per_rank_is_prepared_for_on_the_v2_runner(configure, runner_v2, ssm_path):
    tree = {"ssms": [str(ssm_path)], "ssm_placement": "one_per_rank"}
    assert configure(tree, tensor_parallel_size=3).speculative_config.tree.ssm_placement == "one_per_rank"


# -- primer ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def primer(tmp_path):
    """A primer file for a vocabulary."""

    def make(path: Path, vocab_size: int = VOCABULARY) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        SuccessorRows(4, 2, vocab_size).save(path)
        return path

    return make


def test_a_primer_that_cannot_be_read_is_refused(configure, either_runner, primer, tmp_path):
    (tmp_path / "text.npz").write_text("no primer")
    for name, said in {"missing.npz": "No such file", "text.npz": "is no primer"}.items():
        with pytest.raises(TreeOptionError, match=rf"primer: .*{said}.*primer='none'"):
            configure({"primer": str(tmp_path / name)})
    other = primer(tmp_path / "other.npz", VOCABULARY + 1)
    with pytest.raises(TreeOptionError, match=r"primer: .*vocabulary of 49153 tokens, this LLM has 49152"):
        configure({"primer": other})


def test_the_llms_own_primer_is_found(configure, primer, model_path, monkeypatch, tmp_path):
    monkeypatch.setenv("SPECINFER_CACHE", str(tmp_path))
    assert find_primer("auto", model_path) is None
    configure()
    own = primer(primer_path(model_path))
    assert find_primer("auto", model_path) == own and find_primer("none", model_path) is None
    configure()
    own.write_text("cut short by a full disk")
    with pytest.raises(TreeOptionError, match="primer: .*is no primer"):
        configure()
    configure({"primer": "none"})
    configure({"proposers": ["ngram"]})


# -- settings of vLLM, on either runner --------------------------------------------------------------------------------

# Ranks and microbatches, by which nothing may be served that trees do not know.
REFUSED_ON_BOTH = {
    name: REFUSED[name]
    for name in (
        "kv connector",
        "kv offloading",
        "pipeline",
        "decode context",
        "prefill context",
        "lora",
        "watermark",
        "sampling mask",
        "routed experts",
        "fast prefill",
    )
} | {
    "dual batch overlap": ({"enable_dbo": True}, "enable_dbo: .*would split a tree's rows; leave it out"),
    "microbatches": ({"ubatch_size": 2}, "ubatch_size=2: .*would split a tree's rows; leave it out"),
    "batch-sharded sampling": (
        {"enable_batch_sharded_sampling": True, "tensor_parallel_size": 2},
        "enable_batch_sharded_sampling: .*not sharded yet; leave it out",
    ),
}


@pytest.fixture(params=["V1", "V2"])
def either_runner(request):
    """vLLM takes that runner."""
    if request.param == "V2":
        request.getfixturevalue("runner_v2")


@pytest.mark.parametrize("name", REFUSED_ON_BOTH)
def test_a_setting_is_refused_on_either_runner(configure, either_runner, name):
    options, message = REFUSED_ON_BOTH[name]
    with pytest.raises(TreeOptionError, match=f"^{message}") as refused:
        configure(**options)
    assert "method 'tree'" in str(refused.value)


def test_a_hybrid_model_is_refused_on_either_runner(configure, either_runner, monkeypatch):
    monkeypatch.setattr(ModelConfig, "is_hybrid", property(lambda self: True))
    with pytest.raises(TreeOptionError, match="^model: .*: is_hybrid: not supported with method 'tree': .*; use"):
        configure()


def test_a_draft_vocabulary_needs_its_head_on_one_rank(configure, either_runner, folder):
    narrow = folder()
    np.save(narrow / "draft_vocab.npy", np.arange(64, dtype=np.int32))
    config = configure({"ssms": [narrow]})
    config.parallel_config.tensor_parallel_size = 3  # the LLM's 9 heads
    with pytest.raises(TreeOptionError, match=r"ssms\[0\]: a draft vocabulary needs the whole head on one rank"):
        launch.check(config)


# -- several devices ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "is_moe", "is_refused"), [(2, True, True), (1, True, False), (2, False, False)])
def test_ssms_beside_experts_on_data_parallel_ranks_are_refused(ssm_path, ranks, is_moe, is_refused):
    tree = TreeOptions.from_value({"method": "tree", "ssms": [str(ssm_path)]})
    parallel = SimpleNamespace(data_parallel_size=ranks, is_moe_model=is_moe)
    refused = pytest.raises(TreeOptionError, match="data_parallel_size=2: .*leave ssms out")
    with refused if is_refused else nullcontext():
        launch.check_data_parallel(tree, parallel)
    launch.check_data_parallel(TreeOptions.from_value("tree"), parallel)
