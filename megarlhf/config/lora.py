"""Settings of LoRA: small adapters beside the linear layers are trained, the model itself stays as it is."""

from dataclasses import dataclass

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of most models, in Hugging Face's and PEFT's words."""
_ALL = (*LINEARS, "qkv_proj", "gate_up_proj")
"""With the joined ones of Phi-3: whatever an adapter can be put on."""


@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters of one trained model (arXiv:2106.09685). Dropout is 0."""

    rank: int = 0
    """Rank of the adapters; 0: no adapters, the whole model is trained."""
    alpha: float = 32.0
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...] = LINEARS
    """Linear layers that get an adapter, of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj.

    In Phi-3 models: of qkv_proj, o_proj, gate_up_proj, down_proj. Experts of a mixture, and its router, get none.
    """


def lora_violations(lora: LoRA, setting: str) -> list[str]:
    """What is wrong with `lora`, one sentence each; `setting` is its name as typed, such as actor.lora."""
    found = []
    if lora.rank < 0:
        found.append(f"{setting}.rank: {lora.rank} is out of range; choose 1 or more, or 0 to train the whole model")
    if lora.rank > 0 and lora.alpha <= 0:
        found.append(f"{setting}.alpha: {lora.alpha} is out of range; choose more than 0, such as {2 * lora.rank}")
    unknown = [name for name in lora.targets if name not in _ALL]
    if unknown:
        found.append(f"{setting}.targets: {', '.join(unknown)} cannot have an adapter; choose among {', '.join(_ALL)}")
    if lora.rank > 0 and not lora.targets:
        found.append(f"{setting}.targets: is empty; name at least one of {', '.join(LINEARS)}, or set rank to 0")
    return found
