"""`riacho vllm`: the command holds what learning needs, and what breaks it is refused."""

import os
from importlib.metadata import entry_points
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from app.cli import cli
from app.engines.vllm_command import FLAGS, VARIABLES, VllmServer
from app.errors import SetupError
from app.settings import TINY_MODEL
from tests.mixture import ATTENTION, write_mixture

MODEL = str(TINY_MODEL)


def test_the_command_holds_every_flag() -> None:
    """With or without --cpu each fixed flag is there with its value."""
    command = " ".join(VllmServer(model=MODEL, slots=4, port=8123).command())
    assert all(" ".join(flag) in command for flag, _ in FLAGS)
    assert f"--model {MODEL}" in command
    assert "--max-cpu-loras 4" in command
    assert "float32" not in command
    assert "--dtype float32" in " ".join(VllmServer(model=MODEL, cpu=True).command())


def test_reasoning_is_parsed_where_a_parser_is_named() -> None:
    """Without a name vLLM gets no option, and everything is the answer."""
    assert "--reasoning-parser qwen3" in " ".join(VllmServer(model=MODEL, reasoning_parser="qwen3").command())
    assert "--reasoning-parser" not in VllmServer(model=MODEL).command()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"extra": ("--logprobs-mode", "raw_logprobs")}, "--logprobs-mode"),
        ({"extra": ("--logprobs_mode=raw_logprobs",)}, "--logprobs-mode"),
        ({"extra": ("--tool-strict-level", "function")}, "--tool-strict-level"),
        ({"extra": ("--generation-conf", "auto")}, "--generation-config"),
        ({"extra": ("--speculative-config.method", "ngram")}, "--speculative-config"),
        ({"extra": ("-q", "fp8")}, "unquantised"),
        ({"max_rank": 24}, "max_rank = 24"),
        ({"batch_loras": 9}, "slots = 8"),
        ({"model": "/nonexistent/model"}, "no model"),
    ],
)
def test_what_breaks_learning_is_refused(options: dict[str, Any], message: str) -> None:
    """The message names the option."""
    with pytest.raises(SetupError, match=message):
        VllmServer(**{"model": MODEL} | options).command()


def test_lora_on_a_mixture_of_experts_is_attentions(tmp_path: Path) -> None:
    """vLLM gets the layers' names, and none for a dense base, where adapters may cover all."""
    command = VllmServer(model=str(write_mixture(tmp_path))).command()
    start = command.index("--lora-target-modules") + 1
    assert list(takewhile(lambda part: not part.startswith("--"), command[start:])) == ATTENTION
    assert "--lora-target-modules" not in VllmServer(model=MODEL).command()


@pytest.mark.parametrize("name", ["VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_CPU_KVCACHE_SPACE"])
def test_a_dangerous_variable_is_refused(name: str) -> None:
    """What the environment brings in can break a server as well as a flag."""
    with pytest.raises(SetupError, match=name):
        VllmServer(model=MODEL).variables({name: "1"})
    assert VllmServer(model=MODEL).variables({}).keys() == VARIABLES.keys()


def test_the_cpu_plugin_is_found_by_its_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the path that `riacho vllm --cpu` gives, beside what is there, vLLM finds the plugin and can load it."""
    path = VllmServer(model=MODEL, cpu=True).variables({"PYTHONPATH": "/mine"})["PYTHONPATH"].split(os.pathsep)
    assert path[1:] == ["/mine"]
    monkeypatch.syspath_prepend(path[0])
    [plugin] = entry_points(group="vllm.general_plugins", name="riacho_vllm_cpu")
    assert callable(plugin.load())


@pytest.mark.parametrize(
    ("host", "exposed"), [("127.0.0.1", False), ("localhost", False), ("::1", False), ("0.0.0.0", True), ("gpu1", True)]
)
def test_an_exposed_address_is_known(host: str, exposed: bool) -> None:
    """Adapter endpoints on anything but loopback deserve a word."""
    assert VllmServer(model=MODEL, host=host).exposed() == exposed


def test_the_help_gives_the_reasons() -> None:
    """Every fixed flag stands in the help; --print runs nothing."""
    runner = CliRunner()
    text = runner.invoke(cli, ["vllm", "--help"]).output
    assert all(flag[0] in text and why in text for flag, why in FLAGS)
    printed = runner.invoke(cli, ["vllm", "--model", MODEL, "--print", "--", "--max-num-seqs", "16"]).output
    assert printed.startswith("VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 ")
    assert printed.endswith("--max-num-seqs 16\n")
