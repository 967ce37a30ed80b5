"""Adapter files are checked against the base's headers without torch: the same verdicts as the local engine's."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from app.engines.adapter_shapes import WEIGHTS, base_shapes, check_adapter  # noqa: E402
from app.engines.base import Adapter  # noqa: E402
from app.errors import AdapterRejected  # noqa: E402
from app.settings import TINY_MODEL  # noqa: E402
from tests.mixture import ATTENTION, FURTHER, write_adapter, write_mixture  # noqa: E402

RANK = 4
BASE = base_shapes(TINY_MODEL)


@pytest.fixture
def adapter(tmp_path: Path) -> Adapter:
    """An adapter of rank 4 on q_proj and down_proj."""
    modules = [key.removesuffix(".weight") for key in BASE if key.endswith(("q_proj.weight", "down_proj.weight"))]
    tensors = {}
    for module in modules:
        out, inside = BASE[f"{module}.weight"]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, inside)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(out, RANK).bfloat16()
    save_file(tensors, tmp_path / WEIGHTS)
    options = {"peft_type": "LORA", "r": RANK, "target_modules": ["q_proj", "down_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(options))
    return Adapter("riacho", 1, tmp_path)


def options(**changed: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = path / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changed))

    return change


def tensors(edit: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        held = load_file(path / WEIGHTS)
        edit(held)
        save_file(held, path / WEIGHTS)

    return change


def rename(held: dict[str, Any]) -> None:
    key = next(iter(held))
    held[key.replace("layers.0", "layers.99")] = held.pop(key)


def poison(value: float) -> Callable[[dict[str, Any]], None]:
    def edit(held: dict[str, Any]) -> None:
        for tensor in held.values():
            tensor[0, 0] = value

    return edit


def to(dtype: Any, value: float) -> Callable[[Path], None]:
    """All tensors in another dtype, one value of each changed."""

    def edit(held: dict[str, Any]) -> None:
        held.update({name: tensor.to(dtype) for name, tensor in held.items()})
        poison(value)(held)

    return tensors(edit)


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: (path / WEIGHTS).write_bytes((path / WEIGHTS).read_bytes()[:size])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "renamed": (tensors(rename), r"no place: .*layers\.99"),
    "one side only": (tensors(lambda held: held.pop(next(iter(held)))), "does not fit"),
    "no tensors": (tensors(lambda held: held.clear()), "no tensors"),
    "a layer is missing": (tensors(lambda held: [held.pop(k) for k in list(held) if "s.0." in k]), "modules"),
    "NaN": (tensors(poison(float("nan"))), "not finite"),
    "infinite": (tensors(poison(float("-inf"))), "not finite"),
    "NaN in half": (to(torch.float16, float("nan")), "not finite"),
    "infinite in half": (to(torch.float16, float("inf")), "not finite"),
    "double": (to(torch.float64, 1.0), "F64; F32, BF16, F16 can be served"),
    "truncated": (cut(-8), "truncated"),
    "no header": (cut(4), "no safetensors file"),
    "empty": (cut(0), "no safetensors file"),
    "weights missing": (lambda path: (path / WEIGHTS).unlink(), "cannot be read"),
    "other rank": (options(r=8), "does not fit"),
    "other targets": (options(target_modules=["q_proj"]), "other modules than its target_modules"),
    "DoRA": (options(use_dora=True), "use_dora"),
}


def test_a_good_adapter_passes(adapter: Adapter) -> None:
    """In float32 and bfloat16, large values included."""
    tensors(poison(3e38))(adapter.path)
    check_adapter(adapter, BASE)


def test_half_precision_passes(adapter: Adapter) -> None:
    """Float16 as well, the largest value included."""
    to(torch.float16, 65504.0)(adapter.path)
    check_adapter(adapter, BASE)


def test_a_pattern_sets_ranks_and_a_regular_expression_targets(adapter: Adapter) -> None:
    """What a plain list does not say is left to the engine."""
    options(rank_pattern={"q_proj": RANK}, r=16, target_modules=".*(q_proj|down_proj)")(adapter.path)
    check_adapter(adapter, BASE)


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_adapter_is_refused(adapter: Adapter, case: str) -> None:
    """With the reason, before any engine sees it."""
    change, message = BROKEN[case]
    change(adapter.path)
    with pytest.raises(AdapterRejected, match=message):
        check_adapter(adapter, BASE)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("mixture"))


def test_on_a_mixture_of_experts_attention_passes(mixture: Path, tmp_path: Path) -> None:
    """The base's own files have one matrix an expert and projection."""
    base = base_shapes(mixture)
    assert "model.layers.1.mlp.experts.7.down_proj.weight" in base
    check_adapter(Adapter("riacho", 1, write_adapter(tmp_path, mixture, target_modules=ATTENTION)), base)


@pytest.mark.parametrize("case", FURTHER)
def test_on_a_mixture_of_experts_more_than_attention_is_refused(mixture: Path, tmp_path: Path, case: str) -> None:
    """As peft writes such adapters; the message names a tensor and says what can be served."""
    options, named = FURTHER[case]
    adapter = Adapter("riacho", 1, write_adapter(tmp_path, mixture, **options))
    with pytest.raises(AdapterRejected, match=f"{named}.*a mixture of experts covers attention only"):
        check_adapter(adapter, base_shapes(mixture))


@pytest.mark.parametrize("module", ["mlp.experts.0.gate_proj", "mlp.gate"])
def test_an_adapter_that_fits_an_experts_own_matrix_is_refused(mixture: Path, tmp_path: Path, module: str) -> None:
    """Other trainers write one adapter an expert; its shapes fit the base's files."""
    base = base_shapes(mixture)
    name = f"model.layers.0.{module}"
    out, inside = base[f"{name}.weight"]
    pair = {"A": torch.ones(RANK, inside), "B": torch.ones(out, RANK)}
    save_file({f"base_model.model.{name}.lora_{side}.weight": t for side, t in pair.items()}, tmp_path / WEIGHTS)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK}))
    with pytest.raises(AdapterRejected, match="covers attention only"):
        check_adapter(Adapter("riacho", 1, tmp_path), base)


def test_parameters_beside_attention_are_refused(mixture: Path, tmp_path: Path) -> None:
    """The configuration asks for experts, though the file has no tensors for them."""
    write_adapter(tmp_path, mixture, target_modules=ATTENTION)
    options(target_parameters=["mlp.experts.down_proj"])(tmp_path)
    with pytest.raises(AdapterRejected, match=r"mlp\.experts\.down_proj; .*covers attention only"):
        check_adapter(Adapter("riacho", 1, tmp_path), base_shapes(mixture))
