"""Does an adapter's every tensor have its place in the base? Read from file headers, without torch.

vLLM ignores tensors for layers that its model does not have, and serves the base as if nothing were wrong.
"""

import math
import re
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from app.base_modules import is_mixture, mixes_tokens
from app.engines.adapter_options import read_options, require_attention_on_mixture, some
from app.engines.base import Adapter
from app.errors import AdapterRejected
from app.tensor_files import BadTensorFile, TensorFile

WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
_Shapes = dict[str, tuple[int, ...]]


def base_shapes(directory: Path) -> _Shapes:
    """The shape of every tensor of a model."""
    return {k: v for path in sorted(directory.glob("*.safetensors")) for k, v in TensorFile.open(path).shapes().items()}


def attention_of_mixture(base: _Shapes) -> list[str]:
    """The layers that an adapter on a mixture of experts may cover, by their last name; none on a dense base."""
    if not is_mixture(base):
        return []
    layers = (name.removesuffix(".weight") for name, shape in base.items() if len(shape) == 2 and mixes_tokens(name))
    return sorted({layer.rpartition(".")[2] for layer in layers})


def check_adapter(adapter: Adapter, base: _Shapes) -> None:
    """Raises AdapterRejected with the reason for an adapter that an engine would misapply or silently ignore."""
    options = read_options(adapter)
    try:
        file = TensorFile.open(adapter.path / WEIGHTS)
        file.require_whole()
        require_attention_on_mixture(adapter, options, file.tensors, base)
        _check_places(adapter, file.shapes(), base, options)
        _check_values(adapter, file)
    except (OSError, BadTensorFile) as error:
        raise AdapterRejected(f"{adapter.name} cannot be read: {error}") from error


def _check_places(adapter: Adapter, tensors: _Shapes, base: _Shapes, options: dict[str, Any]) -> None:
    found = {key: _KEY.fullmatch(key) for key in tensors}
    unknown = [key for key, match in found.items() if match is None or f"{match['module']}.weight" not in base]
    if unknown:
        raise AdapterRejected(f"{adapter.name} has tensors for which the base has no place: {some(unknown)}.")
    modules = {match["module"] for match in found.values() if match}
    if not modules:
        raise AdapterRejected(f"{adapter.name} has no tensors.")
    rank = None if options.get("rank_pattern") else options["r"]
    for module in sorted(modules):
        _check_pair(adapter, module, tensors, base[f"{module}.weight"], rank)
    targets = _targets(options, base)
    if targets is not None and targets != modules:
        raise AdapterRejected(
            f"{adapter.name} has tensors for other modules than its target_modules: {some(sorted(targets ^ modules))}."
        )


def _check_pair(adapter: Adapter, module: str, tensors: _Shapes, weight: tuple[int, ...], rank: int | None) -> None:
    """LoRA A reads what the layer reads, B writes what it writes, and both have the rank that sets their scale."""
    a, b = (tensors.get(f"base_model.model.{module}.lora_{side}.weight", ()) for side in "AB")
    fits = len(weight) == len(a) == len(b) == 2 and (b[0], a[1]) == weight and a[0] == b[1] == (rank or a[0])
    if not fits:
        raise AdapterRejected(
            f"{adapter.name} does not fit the base at {module}: A is {a}, B is {b}, the layer is {weight} and the "
            f"rank is {rank or 'by pattern'}."
        )


def _targets(options: dict[str, Any], base: _Shapes) -> set[str] | None:
    """The base's modules that the configuration names; None where it does so by more than a plain list of names."""
    names = options.get("target_modules")
    narrowed = any(options.get(key) for key in ("layers_to_transform", "exclude_modules", "target_parameters"))
    if not isinstance(names, list) or narrowed:
        return None
    modules = {key.removesuffix(".weight") for key in base if key.endswith(".weight")}
    return {module for module in modules if any(module == name or module.endswith(f".{name}") for name in names)}


def _check_values(adapter: Adapter, file: TensorFile) -> None:
    changes_base = False
    for name, entry in file.tensors.items():
        values = _VALUES.get(entry["dtype"])
        if values is None:
            served = ", ".join(_VALUES)
            raise AdapterRejected(f"{adapter.name} has {name} in {entry['dtype']}; {served} can be served.")
        # The sum of float32 values cannot overflow a double, so it is finite exactly where every value is.
        numbers = values(file.read(name))
        if not math.isfinite(sum(numbers)):
            raise AdapterRejected(f"{adapter.name} has values that are not finite in {name}.")
        changes_base = changes_base or (".lora_B." in name and any(numbers))
    if not changes_base:
        raise AdapterRejected(f"{adapter.name} changes nothing: every LoRA B is zero.")


def _float32(raw: bytes) -> Sequence[float]:
    return memoryview(raw).cast("f")


def _bfloat16(raw: bytes) -> Sequence[float]:
    """The upper two bytes of float32."""
    wide = bytearray(2 * len(raw))
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return _float32(bytes(wide))


def _float16(raw: bytes) -> Sequence[float]:
    return struct.unpack(f"<{len(raw) // 2}e", raw)


_VALUES: dict[str, Callable[[bytes], Sequence[float]]] = {"F32": _float32, "BF16": _bfloat16, "F16": _float16}
