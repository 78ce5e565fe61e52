"""Transformer Engine's pure torch quantiser, read from its wheel without installing it (`make te-reference`)."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

WHEEL = Path(__file__).parents[3] / ".te"


def current_scaling() -> ModuleType:
    """transformer_engine.pytorch.custom_recipes.reference_current_scaling; skips the test where there is no wheel.

    Of what it imports only base classes and types are used here, so empty ones stand in: the package itself would load
    its CUDA library.
    """
    file = WHEEL / "transformer_engine/pytorch/custom_recipes/reference_current_scaling.py"
    if not file.is_file():
        pytest.skip("no unpacked transformer-engine wheel in .te; `make te-reference` fetches it")
    spec = importlib.util.spec_from_file_location("te_reference", file)
    module = importlib.util.module_from_spec(spec)
    stand_ins = _stand_ins()
    kept = {name: sys.modules.get(name) for name in stand_ins}
    sys.modules |= stand_ins
    try:
        spec.loader.exec_module(module)
    finally:
        for name, before in kept.items():
            sys.modules.pop(name) if before is None else sys.modules.update({name: before})
    return module


def _stand_ins() -> dict[str, ModuleType]:
    import torch

    class Quantizer:
        def __init__(self, *, rowwise: bool, columnwise: bool):
            self.rowwise_usage, self.columnwise_usage = rowwise, columnwise

    names = (
        "transformer_engine",
        "transformer_engine.pytorch",
        "transformer_engine.pytorch.custom_recipes",
        "transformer_engine.pytorch.quantized_tensor",
    )
    made = {name: ModuleType(name) for name in names}
    recipes = made["transformer_engine.pytorch.custom_recipes"]
    recipes.gemm = ModuleType("gemm")
    recipes.gemm.MMParams, recipes.gemm.GEMMType = object, type("GEMMType", (), {"FPROP": 0})
    recipes.reference_utils = ModuleType("reference_utils")
    recipes.reference_utils.HIGH_PRECISION_FLOAT_DTYPES = (torch.float, torch.float16, torch.bfloat16, torch.float32)
    tensor = made["transformer_engine.pytorch.quantized_tensor"]
    tensor.Quantizer, tensor.QuantizedTensorStorage = Quantizer, type("QuantizedTensorStorage", (), {})
    return made
