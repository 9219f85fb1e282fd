# SPDX-License-Identifier: Apache-2.0
import copy
import json
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import fields

import pytest

vllm = pytest.importorskip("vllm")

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

from specinfer_vllm import plugin  # noqa: E402
from specinfer_vllm.config import TreeOptionError, TreeOptions  # noqa: E402
from specinfer_vllm.patches import hooks  # noqa: E402
from specinfer_vllm.patches.hooks import PATCHES  # noqa: E402
from specinfer_vllm.patches.patch import Hook, HookMissing  # noqa: E402
from specinfer_vllm.patches.speculative_config import TreeSpeculativeConfig, tree_config  # noqa: E402

TARGETS = {
    "vllm.engine.arg_utils.EngineArgs.add_cli_args",
    "vllm.engine.arg_utils.EngineArgs.create_speculative_config",
    "vllm.engine.arg_utils.EngineArgs.create_engine_config",
    "vllm.sampling_params.SamplingParams._validate_spec_decode",
}

# In a process of its own, with the plug-in kept out: what vLLM says by itself.
PLAIN = """
import contextlib, io, json, sys
from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

def words(call):
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            call()
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error} {said.getvalue()}"

model = sys.argv[1]
config = EngineArgs(model=model, max_model_len=256).create_engine_config()
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
print(json.dumps({
    "config": str(config),
    "hash": config.compute_hash(),
    "flag": words(lambda: parser.parse_args(["--model", model, "--speculative-config", "tree"])),
    "method": words(lambda: parser.parse_args(["--model", model, "--spec-method", "tree"])),
    "dict": words(lambda: EngineArgs(model=model, speculative_config={"method": "tree"}).create_engine_config()),
    "ours": [name for name in sys.modules if name.startswith("specinfer_vllm.")],
}))
"""


@pytest.fixture(autouse=True)
def plugged_in():
    """The plug-in is in place before and after every test, whatever the test does."""
    plugin.register()
    yield
    plugin.register()
    assert all(patch.is_applied() for patch in PATCHES)


@pytest.fixture
def unplugged():
    """As if vLLM had not loaded the plug-in yet."""
    for patch in PATCHES:
        patch.revert()


@pytest.fixture
def log(caplog, monkeypatch):
    """What the plug-in says, which vLLM's logger does not hand on to pytest."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING, "vllm.specinfer")
    return caplog


@pytest.fixture(scope="module")
def plain(model_path) -> dict:
    """vLLM's own words, from a process in which the plug-in is not allowed."""
    environment = {**os.environ, "VLLM_PLUGINS": "", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    command = [sys.executable, "-c", PLAIN, str(model_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def configured(model, **options):
    return EngineArgs(model=str(model), max_model_len=256, **options).create_engine_config()


def parsed(model, *flags: str):
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(model), "--max-model-len", "256", *flags])
    return AsyncEngineArgs.from_cli_args(arguments)


def surface() -> dict[str, int]:
    """Every attribute of every module and class of vLLM that is loaded, by identity."""
    found = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "vllm" or not hasattr(module, "__dict__"):
            continue
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = id(value)
            if isinstance(value, type) and value.__module__ == name:
                found.update({f"{name}.{key}.{inner}": id(each) for inner, each in list(vars(value).items())})
    return found


def targets() -> dict[str, int]:
    """What stands at the patched places, by identity."""
    return {name: value for name, value in surface().items() if name in TARGETS}


# -- vLLM without a tree -----------------------------------------------------------------------------------------------


def test_nothing_but_the_patched_methods_differs(unplugged):
    hooks.check(hooks.PLUGIN)  # imports what it looks at
    before = surface()
    plugin.apply_patches()
    after = surface()
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed == TARGETS


def test_without_the_flag_the_configuration_is_the_one_without_the_plugin(model_path, plain):
    config = configured(model_path)
    assert (str(config), config.compute_hash()) == (plain["config"], plain["hash"])
    assert config.speculative_config is None and tree_config(config) is None
    assert plain["ours"] == []


def test_other_methods_are_left_to_vllm(model_path):
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    config = configured(model_path, speculative_config=ngram)
    assert type(config.speculative_config) is vllm.config.SpeculativeConfig
    assert config.speculative_config.method == "ngram"
    assert not config.parallel_config.worker_cls.startswith("specinfer_vllm")
    assert parsed(model_path, "--speculative-config", json.dumps(ngram)).speculative_config == ngram
    assert parsed(model_path, "--speculative-config", "None").speculative_config is None


def test_loading_the_plugin_imports_no_runner():
    code = (
        "import sys, vllm.engine.arg_utils; before = set(sys.modules); import specinfer_vllm.plugin as p; p.register();"
        "new = set(sys.modules) - before; print(sorted(n for n in new if n.startswith('vllm')));"
        "print(sorted(n for n in new if n.startswith('specinfer_vllm') and n.count('.') == 1));"
        "print(sorted(n for n in new if n.startswith('specinfer_vllm.tree.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    theirs, ours, trees = done.stdout.splitlines()[-3:]
    assert "worker" not in theirs and "sched" not in theirs and "spec_decode" not in theirs
    names = ("config", "patches", "plugin", "tree")
    assert ours == str([f"specinfer_vllm.{name}" for name in names])
    assert trees == "['specinfer_vllm.tree.static']"  # plain Python


def test_without_the_package_vllm_refuses_a_tree_in_its_own_words(plain):
    assert "--speculative-config" in plain["flag"] and "tree" in plain["flag"]
    assert "invalid choice: 'tree'" in plain["method"]
    assert "ValidationError" in plain["dict"] and "method" in plain["dict"] and "specinfer" not in plain["dict"]


# -- standing aside ----------------------------------------------------------------------------------------------------


def refuses_tree(model) -> bool:
    """Whether vLLM is as it was: it takes its own options and no tree."""
    assert configured(model).speculative_config is None
    with pytest.raises(ValueError, match="Input should be"):
        configured(model, speculative_config={"method": "tree"})
    return not any(patch.is_applied() for patch in PATCHES)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "1.0.0", "dev"])
def test_on_an_unknown_vllm_the_plugin_says_so_and_stands_aside(unplugged, log, monkeypatch, model_path, version):
    with monkeypatch.context() as patched:
        patched.setattr(vllm, "__version__", version)
        plugin.register()
    assert f"stands aside, `--speculative-config tree` is not available: vLLM {version} is not one of" in log.text
    assert ">=0.32" in log.text
    assert refuses_tree(model_path)


def test_a_missing_hook_is_named_and_nothing_is_patched(unplugged, log, monkeypatch, model_path):
    gone = Hook("vllm.v1.attention.selector", "renamed_since")
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "PLUGIN", (*hooks.PLUGIN, gone))
        plugin.register()
    assert "stands aside" in log.text and "vllm.v1.attention.selector.renamed_since: not found" in log.text
    assert refuses_tree(model_path)


def test_a_changed_target_is_named_and_nothing_is_patched(unplugged, log, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(EngineArgs, "create_speculative_config", lambda self, everything: None)
        plugin.register()
    assert "EngineArgs.create_speculative_config: parameters are (self, everything)" in log.text
    assert not any(patch.is_applied() for patch in PATCHES)


def test_all_patches_or_none(unplugged, log, monkeypatch):
    def fail():
        raise OSError("disk on fire")

    before = targets()
    with monkeypatch.context() as patched:
        patched.setattr(PATCHES[-1], "apply", fail)
        plugin.register()
    assert "stands aside" in log.text and "disk on fire" in log.text
    assert targets() == before


def test_registering_again_changes_nothing(log):
    before = targets()
    plugin.register()
    assert targets() == before
    assert log.text == ""


# -- every form of the flag --------------------------------------------------------------------------------------------

FORMS = {
    "word": ["--speculative-config", "tree"],
    "word with an equals sign": ["--speculative-config=tree"],
    "underscores": ["--speculative_config", "tree"],
    "short": ["-sc", "tree"],
    "json": ["--speculative-config", '{"method": "tree"}'],
    "dotted": ["--speculative-config.method", "tree"],
    "dotted short": ["-sc.method", "tree"],
    "method": ["--spec-method", "tree"],
    "method with underscores": ["--spec_method=tree"],
    "said twice": ["--spec-method", "tree", "--speculative-config", "tree"],
}


@pytest.mark.parametrize("flags", FORMS.values(), ids=FORMS)
def test_every_form_of_the_flag_gives_a_tree(model_path, flags):
    config = parsed(model_path, *flags).create_engine_config()
    assert isinstance(config.speculative_config, TreeSpeculativeConfig)
    assert config.parallel_config.worker_cls.startswith("specinfer_vllm.")
    assert config.scheduler_config.scheduler_cls.startswith("specinfer_vllm.")
    assert config.scheduler_config.async_scheduling is False


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", '{"method": "tree", "num_nodes": 6, "depth": 3}'],
        ["--speculative-config", '{"method": "tree", "num-nodes": 6, "depth": 3}'],
        ["--speculative-config.method", "tree", "--speculative-config.num-nodes", "6", "--speculative-config.depth=3"],
        ["--speculative-config", "tree", "--speculative-config.num_nodes", "6", "--speculative_config.depth", "3"],
        ["--spec-method", "tree", "--speculative-config.depth", "3", "--spec-tokens", "6"],
        ["-sc", "tree", "-sc.num-nodes", "6", "--speculative-config.depth", "3"],
    ],
)
def test_options_reach_the_configuration_in_every_form(model_path, flags):
    tree = parsed(model_path, *flags).create_engine_config().speculative_config.tree
    assert (tree.num_nodes, tree.depth) == (6, 3)


def test_lists_may_be_dotted(model_path):
    flags = ["--speculative-config", "tree", "--speculative-config.proposers+", "recycling,ngram"]
    assert parsed(model_path, *flags).create_engine_config().speculative_config.tree.proposers == ("recycling", "ngram")


def test_a_json_file_may_be_given(model_path, tmp_path):
    file = tmp_path / "tree.json"
    file.write_text('{"method": "tree", "num_nodes": 6}')
    for config in (
        parsed(model_path, "--speculative-config", str(file)).create_engine_config(),
        configured(model_path, speculative_config=str(file)),
    ):
        assert config.speculative_config.tree.num_nodes == 6


PYTHON_FORMS = ("tree", '{"method": "tree"}', {"method": "tree"}, {"method": "Tree"}, TreeOptions())


@pytest.mark.parametrize("value", PYTHON_FORMS, ids=repr)
def test_every_form_in_python_gives_a_tree(model_path, value):
    config = configured(model_path, speculative_config=value)
    assert config.speculative_config.tree == TreeOptions.from_value("tree")


def test_the_options_survive_the_way_into_another_process(model_path):
    config = configured(model_path, speculative_config={"method": "tree", "num_nodes": 6, "share_recycling": True})
    arrived = pickle.loads(pickle.dumps(config)).speculative_config
    assert arrived.tree == config.speculative_config.tree
    assert arrived.num_speculative_tokens == 6 and arrived.num_lookahead_tokens == 0
    assert repr(arrived) == repr(config.speculative_config) and "num_nodes" in repr(arrived)


def test_other_options_compile_to_other_graphs(model_path):
    hashes = {configured(model_path, speculative_config=each).compute_hash() for each in ("tree", TreeOptions(depth=2))}
    assert len(hashes) == 2


@pytest.mark.parametrize("value", PYTHON_FORMS[:3], ids=repr)
def test_engine_args_come_out_as_they_went_in(model_path, value):
    args = EngineArgs(model=str(model_path), max_model_len=256, speculative_config=copy.deepcopy(value))
    configs = [args.create_engine_config() for _ in range(2)]
    assert configs[0].speculative_config.tree == configs[1].speculative_config.tree
    assert (args.speculative_config, args.worker_cls, args.scheduler_cls) == (value, "auto", None)
    args.speculative_config = None
    plain = args.create_engine_config()
    assert plain.speculative_config is None
    assert not plain.parallel_config.worker_cls.startswith("specinfer_vllm")


def test_engine_args_come_out_as_they_went_in_when_the_tree_is_refused(model_path):
    args = EngineArgs(model=str(model_path), max_model_len=4, speculative_config="tree")
    with pytest.raises(TreeOptionError):
        args.create_engine_config()
    assert (args.speculative_config, args.worker_cls, args.scheduler_cls) == ("tree", "auto", None)


def test_spec_model_and_spec_tokens_mean_an_ssm_and_nodes(model_path, ssm_path):
    flags = ["--spec-method", "tree", "--spec-model", str(ssm_path), "--spec-tokens", "6"]
    tree = parsed(model_path, *flags).create_engine_config().speculative_config.tree
    assert [each.model for each in tree.ssms] == [str(ssm_path)]
    assert tree.max_nodes == 6


# -- slips of the pen --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--speculative-config", "trees"], "'trees' is no method; did you mean 'tree'?"),
        (["--speculative-config", "{method: tree}"], "in a shell, put it in single quotes"),
        (["--speculative-config", "none/tree.json"], "'none/tree.json' cannot be read"),
    ],
)
def test_a_flag_that_cannot_be_read_is_explained_by_the_parser(model_path, capsys, flags, message):
    with pytest.raises(SystemExit):
        parsed(model_path, *flags)
    said = capsys.readouterr().err
    assert "argument --speculative-config/-sc" in said and message in said


@pytest.mark.parametrize(
    "options, message",
    [
        ({"speculative_config": "trees"}, "method: 'trees' is no method; did you mean 'tree'"),
        ({"speculative_config": {"method": "trees"}}, "method: 'trees' is no method; did you mean 'tree'"),
        ({"speculative_config": {"num-nodes": 3}}, 'num-nodes: an option of method \'tree\'; add "method": "tree"'),
        ({"speculative_config": "tree", "spec_method": "ngram"}, "spec_method: 'ngram' and .*method='tree' are two"),
        (
            {"speculative_config": {"method": "ngram"}, "spec_method": "tree"},
            "spec_method: 'tree' and .*='ngram' are two",
        ),
        (
            {"speculative_config": {"method": "tree", "num-nodes": 3}, "spec_tokens": 4},
            "spec_tokens: 4 and .*num_nodes",
        ),
        (
            {"speculative_config": {"method": "tree", "ssms": ["a"]}, "spec_model": "b"},
            "spec_model: 'b' and .*ssms say",
        ),
    ],
)
def test_what_was_meant_for_a_tree_is_explained(model_path, options, message):
    with pytest.raises(TreeOptionError, match=message):
        configured(model_path, **options)


def test_no_option_of_a_tree_has_the_name_of_one_of_vllms():
    theirs = {each.name for each in fields(vllm.config.SpeculativeConfig)}
    assert not theirs & {each.name for each in fields(TreeOptions)}


def test_a_model_that_brings_its_own_method_is_refused(model_path, tmp_path):
    config = json.loads((model_path / "config.json").read_text())
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config["speculators_config"] = {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [proposal],
        "verifier": {"name_or_path": str(model_path), "architectures": ["LlamaForCausalLM"]},
    }
    config |= {"speculators_model_type": "eagle3", "draft_vocab_size": 100, "transformer_layer_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for value in ("tree", {"method": "tree", "num_nodes": 4}):
        with pytest.raises(TreeOptionError, match="'tree' was asked for and the method is 'eagle3'"):
            configured(tmp_path, speculative_config=value)


# -- the list of hooks -------------------------------------------------------------------------------------------------


def overridden(ours: type, theirs: type) -> set[str]:
    """Methods of `theirs` that `ours` defines itself, constructors aside."""
    return {name for name, each in vars(ours).items() if callable(each) and hasattr(theirs, name)} - {"__init__"}


def test_every_method_that_is_overridden_is_in_the_list():
    from specinfer_vllm.attention.cpu import TreeCPUAttentionImpl, TreeCPUAttentionMetadataBuilder
    from specinfer_vllm.engine.runner_v1 import CPUModelRunner, TreeRunnerMixin
    from specinfer_vllm.engine.scheduler import Scheduler, TreeScheduler

    listed = {str(hook).rpartition(".")[2] for hook in hooks.ALL}
    methods = overridden(TreeRunnerMixin, CPUModelRunner) | overridden(TreeScheduler, Scheduler)
    for ours in (TreeCPUAttentionImpl, TreeCPUAttentionMetadataBuilder):
        methods |= overridden(ours, ours.__base__)
    assert methods and methods <= listed


def test_every_hook_is_found_and_says_why_it_is_there():
    hooks.check(hooks.ALL)
    assert all(hook.reason and hook.versions for hook in hooks.ALL)
    assert len({str(hook) for hook in hooks.ALL}) == len(hooks.ALL)
    assert [patch.target for patch in PATCHES] == list(hooks.PLUGIN[: len(PATCHES)])


def test_the_worker_names_a_missing_hook_before_it_builds_a_runner(monkeypatch):
    import vllm.v1.worker.cpu_worker as module

    from specinfer_vllm.patches.cpu_worker import runner_class

    original = module.CPUModelRunner
    with runner_class(dict):
        assert module.CPUModelRunner is dict
    assert module.CPUModelRunner is original
    monkeypatch.delattr(original.__mro__[1], "_prepare_inputs")
    with pytest.raises(HookMissing, match="CPUModelRunner._prepare_inputs: not found"), runner_class(dict):
        pass
    assert module.CPUModelRunner is original
