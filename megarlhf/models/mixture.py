"""Mixtures of experts: what config.json says about them, in the words of Mixtral and of Qwen3-MoE. Sizes only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarlhf.config.layout import Layout

_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")


@dataclass(frozen=True)
class Mixture:
    """Layers whose feed-forward part is a choice of `top_k` among `num_experts` SwiGLUs, token by token.

    The router's logits are a linear map of the hidden state; an expert's weight is its softmax over all experts, in
    float32, divided by the sum over the chosen ones when `normalises`.
    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    """Of one expert."""
    normalises: bool
    layers: tuple[int, ...]
    """Global indexes of the layers that are mixtures; the others have one feed-forward part."""


def named_alike(config: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with the number of experts under the one name that is used here, num_experts.

    Mixtral calls it num_local_experts, and so does transformers 5 when it saves a Qwen3-MoE.
    """
    given = [config[name] for name in ("num_local_experts", "num_experts") if config.get(name) is not None]
    return {**config, "num_experts": given[0]} if given else dict(config)


def read_mixture(config: Mapping[str, Any]) -> Mixture:
    """The mixture of a config.json that has its defaults filled in and no `mixture_problems`."""
    return Mixture(
        num_experts=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        ffn_hidden_size=config.get("moe_intermediate_size") or config["intermediate_size"],
        normalises=bool(config["norm_topk_prob"]),
        layers=_sparse_layers(config),
    )


def mistyped(config: Mapping[str, Any]) -> list[str]:
    """Fields of a config.json with experts that are not what every reader expects."""
    found = [name for name in _COUNTS if name in config and not (type(config[name]) is int and config[name] > 0)]
    problems = [f"field {name} is {config[name]!r}; expected a whole number above 0" for name in found]
    dense = config.get("mlp_only_layers")
    if dense is not None and not (isinstance(dense, list) and all(type(layer) is int for layer in dense)):
        problems.append(f"field mlp_only_layers is {dense!r}; expected a list of layer numbers")
    return problems


def mixture_problems(config: Mapping[str, Any]) -> list[str]:
    """What a well-typed config.json with experts asks that cannot be built."""
    problems = []
    number, top_k = config["num_experts"], config["num_experts_per_tok"]
    if top_k > number:
        problems.append(f"num_experts_per_tok {top_k} is more than the {number} experts")
    if config.get("router_jitter_noise"):
        problems.append(f"router_jitter_noise {config['router_jitter_noise']} is not supported; supported: 0")
    if not _sparse_layers(config):
        problems.append("decoder_sparse_step and mlp_only_layers leave no layer with experts; give a dense model")
    return problems


def expert_violations(mixture: Mixture | None, layout: Layout, setting: str, family: str) -> list[str]:
    """Why `layout` cannot hold the experts, a sentence each, opening with `setting` as the user typed it."""
    if mixture is None:
        return [f"{setting}: ep {layout.ep}: {family} models have no experts; set ep to 1"] if layout.ep > 1 else []
    found = []
    if mixture.num_experts % layout.ep:
        fits = [ep for ep in range(1, mixture.num_experts + 1) if mixture.num_experts % ep == 0]
        choices = ", ".join(map(str, fits))
        found.append(f"{setting}: ep {layout.ep} does not divide {mixture.num_experts} experts; choose among {choices}")
    return found


def _sparse_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Layer i has experts when (i + 1) is a multiple of decoder_sparse_step, unless mlp_only_layers names it."""
    dense, step = set(config.get("mlp_only_layers") or ()), config.get("decoder_sparse_step", 1)
    return tuple(i for i in range(config["num_hidden_layers"]) if (i + 1) % step == 0 and i not in dense)
