"""A process of its own: megatron-core's GPTModel made of Transformer Engine's layers reads a checkpoint on the CPU.

python -m tests.weights.transformer_engine_reads TOP KIND...

Transformer Engine's Python is the unpacked wheel in .te (`make te-reference`). Its compiled part, and the packages that
only its kernels need, are stood in for by names: layers are made and their weights are read, nothing is computed.
The model is configured by hand, with no help of megarlhf's builder. TOP/KIND is a Hugging
Face folder, TOP/KIND_megatron the checkpoint; what was read is left in TOP/KIND.pt.
"""

import dataclasses
import enum
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

WHEEL = Path(__file__).parents[2] / ".te"
_DTYPES = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
_BACKENDS = "NVTE_No_Backend NVTE_F16_arbitrary_seqlen NVTE_FP8"
_ABSENT = ("transformer_engine_torch", "onnx", "onnxscript", "triton", "pydantic")


class _Anything(type):
    """A class with every attribute, each again such a class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments, **named):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls

    def __getitem__(cls, key):
        return cls

    def __int__(cls):
        return id(cls)


class _Module(ModuleType):
    __path__ = ()
    __version__ = "9.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(self, name, made)
        return made


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in _ABSENT else None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def prepare() -> None:
    """Transformer Engine can be imported, and finds a GPU of a kind that it knows."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1"}
    import torch

    from megarlhf import device

    device.prepare()
    finder = _StandIns()
    sys.meta_path.append(finder)
    sys.path.insert(0, str(WHEEL))
    compiled = importlib.import_module("transformer_engine_torch")
    compiled.DType = enum.IntEnum("DType", _DTYPES)  # its members are counted at import
    compiled.NVTE_Fused_Attn_Backend = enum.IntEnum("NVTE_Fused_Attn_Backend", _BACKENDS)
    if importlib.util.find_spec("pydantic.dataclasses").loader is finder:
        importlib.import_module("pydantic.dataclasses").dataclass = dataclasses.dataclass
    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda name: None
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, multi_processor_count=132)


def config_of(given: dict):
    """megatron-core's settings for a tiny model's config.json."""
    from megatron.core.transformer import TransformerConfig

    num_experts = given.get("num_experts", given.get("num_local_experts"))
    mixture = {
        "num_moe_experts": num_experts,
        "moe_router_topk": given.get("num_experts_per_tok"),
        "moe_ffn_hidden_size": given.get("moe_intermediate_size", given["intermediate_size"]),
        "moe_grouped_gemm": given["model_type"] == "qwen3_moe",
    }
    return TransformerConfig(
        num_layers=given["num_hidden_layers"],
        hidden_size=given["hidden_size"],
        ffn_hidden_size=given["intermediate_size"],
        num_attention_heads=given["num_attention_heads"],
        num_query_groups=given["num_key_value_heads"],
        kv_channels=given["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=given["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=given["model_type"] == "qwen2",
        qk_layernorm=given["model_type"].startswith("qwen3"),
        use_cpu_initialization=True,
        **(mixture if num_experts else {}),
    )


def empty_model(given: dict, groups):
    """The GPTModel, its weights not numbers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    config = config_of(given)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    torch.cuda.is_available = lambda: True  # every layer of Transformer Engine asks when it is made
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=given["vocab_size"],
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=given["tie_word_embeddings"],
        pg_collection=groups.collection,
    )
    torch.cuda.is_available = lambda: False
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def read(folder: Path, checkpoint: Path) -> dict:
    """Weights by local name after megatron-core's own loader, as strict as it is by default; and the modules' types."""
    from megatron.core import dist_checkpointing

    groups = build_groups(Layout(), 1)
    model = empty_model(json.loads((folder / "config.json").read_text()), groups)
    state = model.sharded_state_dict(metadata={"dp_cp_group": groups.collection.dp_cp})
    model.load_state_dict(dist_checkpointing.load(state, str(checkpoint)))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return {"weights": weights, "modules": sorted({type(module).__name__ for module in model.modules()})}


if __name__ == "__main__":
    prepare()
    import torch

    from megarlhf import device
    from megarlhf.config.layout import Layout
    from megarlhf.parallel.groups import build_groups

    device.join_world()
    top, *kinds = sys.argv[1:]
    for kind in kinds:
        torch.save(read(Path(top, kind), Path(top, f"{kind}_megatron")), Path(top, f"{kind}.pt"))
