"""megarlhf's models with layers te have the parameters that its local ones have, by the same names, cut the same way;
and megatron-core's direct calls show why something has to be done whenever weights change."""

import json
from pathlib import Path

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.errors import LayoutError
from tests import tiny
from tests.distributed.pool import run_on_ranks
from tests.families import VARIANTS
from tests.transformer_engine_cpu.test_checkpoints import LAYOUT, marks_of

DENSE = {"llama": {}, "llama tied": {"tied": True}, "gemma3": VARIANTS["gemma3"] | {"num_hidden_layers": 4}}
DENSE |= {kind: VARIANTS[kind] for kind in ("mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma2")}


def build(folder: str, groups, layers: str, *, takes_adapters: bool = False):
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.precision.linears import Linears
    from megarlhf.weights.load import load_weights

    linears = Linears(layers, takes_adapters=takes_adapters)
    architecture = Architecture.from_folder(folder)
    model = build_model(architecture, groups, head="vocabulary", dtype=torch.float32, seed=None, linears=linears)
    load_weights(model, folder)
    return model


def compared(rank: int, world_size: int, folders: list[str]) -> list[str]:
    """What differs between local layers, Transformer Engine's, and those that adapters will stand beside."""
    from megarlhf.parallel.groups import build_groups

    groups, found = build_groups(LAYOUT, world_size), []
    for folder in folders:
        local = build(folder, groups, "local").named_parameters()
        for takes_adapters in (False, True):
            model = build(folder, groups, "te", takes_adapters=takes_adapters)
            theirs = model.named_parameters()
            found += [f"{folder}: {key}" for key in local.keys() ^ theirs.keys()]
            for key in local.keys() & theirs.keys():
                if marks_of(local[key]) != marks_of(theirs[key]) or not torch.equal(local[key], theirs[key]):
                    found.append(f"{folder}: {key}: {marks_of(local[key])} {marks_of(theirs[key])}")
            kinds = {type(module).__name__ for module in model.chunks[0].decoder.layers.modules()}
            is_fused = not takes_adapters and Path(folder).name != "olmo2"
            expected = {"TELayerNormColumnParallelLinear" if is_fused else "TEColumnParallelLinear"}
            if {kind for kind in kinds if "ColumnParallelLinear" in kind} != expected:
                found.append(f"{folder}: {sorted(kinds)}")
    return found


def test_parameters_of_every_dense_family_are_those_of_local_layers(tmp_path):
    folders = [str(tiny.write_llama(tmp_path / kind, **settings)) for kind, settings in DENSE.items()]
    assert run_on_ranks(4, compared, folders) == [[], [], [], []]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_mixtures_are_refused(tmp_path, single_rank, kind):
    from megarlhf.parallel.groups import build_groups

    folder = tiny.write_llama(tmp_path / kind, family=kind)
    with pytest.raises(LayoutError, match=f"layers te of {kind} models with experts are not built; set layers to loc"):
        build(str(folder), build_groups(Layout(), 1), "te")


WIDE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize("fields", [{}, {"fp8": "e4m3", "fp8_recipe": "blockwise"}], ids=["no fp8", "blockwise"])
def test_a_direct_call_of_megatron_cores_model_computes_with_old_weights_until_it_is_told(
    tmp_path, single_rank, fields
):
    """The trap that `Model.weights_changed` is there for. Without FP8 nothing is kept."""
    from tests.transformer_engine_cpu.theirs import empty_model, global_groups

    folder = tiny.write_llama(tmp_path / "llama", **WIDE)
    with global_groups(Layout()), torch.no_grad():
        model = empty_model(json.loads((folder / "config.json").read_text()), Layout(), **fields).eval()
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
        for layer in model.decoder.layers:  # its attention has no kernel here; a token sees itself
            layer.self_attention.core_attention.forward = lambda query, key, value, *_, **named: query.flatten(2)

        def logits():
            tokens, places = torch.arange(16)[None], torch.arange(16)[None]
            return model(tokens, places, None)

        before = logits()
        for name, parameter in model.named_parameters():
            if "linear_fc" in name and "layer_norm" not in name:
                parameter.mul_(0.5)
        after = logits()
        model.set_is_first_microbatch()
        told = logits()
    assert torch.equal(before, after) == bool(fields)
    assert not torch.allclose(before, told, atol=1e-2)
