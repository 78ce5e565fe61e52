"""RMSNorm for local execution, with the epsilon of the config, usable under sequence parallelism; and where it goes."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, reduce_from_tensor_model_parallel_region
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megarlhf import device
from megarlhf.models.pointwise import rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension; 1 + weight where the config centres norms at 0.

    megatron-core's own wrapper of torch's norm refuses sequence parallelism. All it takes is a mark on the weight: a
    tensor rank sees 1/tp of the tokens, so megatron-core must sum this gradient over them.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=device.current())
        self.weight.sequence_parallel = config.sequence_parallel
        self.is_zero_centered = config.layernorm_zero_centered_gamma
        if self.is_zero_centered:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Of x [..., hidden_size]. Zero-centred norms are float32 inside, the factor 1 + weight too, as in Gemma."""
        if not self.is_zero_centered:
            return self._normed(x, self.weight)
        return self._normed(x.float(), 1 + self.weight.float()).to(x.dtype)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        if not device.is_host() or not torch.is_grad_enabled():  # torch's has a kernel of its own on a GPU only
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        return rms_norm(x, weight, self.eps)


class ProjectionNorm(RMSNorm):
    """RMSNorm of a whole query (or key) projection, of which every tensor rank holds some heads (OLMo 2).

    The weight [heads * D] is whole on every rank. A rank's gradient of it covers its own heads, and megatron-core sums
    the gradients of `q_layernorm` and `k_layernorm` over tensor ranks.
    """

    def __init__(self, config: TransformerConfig, num_heads: int, group: torch.distributed.ProcessGroup):
        """`num_heads` of the whole projection: query heads, or key/value groups."""
        super().__init__(config, num_heads * config.kv_channels, config.layernorm_epsilon)
        self.group = group
        self.num_copies = max(group.size() // num_heads, 1)
        """Ranks that hold one head."""

    def forward(self, x: Tensor) -> Tensor:
        """Of this rank's heads [S, B, heads/tp, D]. Communicates one number a token over the tensor ranks."""
        squares = x.float().square().sum((-2, -1), keepdim=True)
        # Summed forward, and again backward: every rank's output depends on this number.
        squares = copy_to_tensor_model_parallel_region(
            reduce_from_tensor_model_parallel_region(squares, group=self.group), group=self.group
        )
        mean = squares / (self.num_copies * self.weight.numel())
        first = self.group.rank() // self.num_copies * x.shape[-2]
        weight = self.weight.view(-1, x.shape[-1])[first : first + x.shape[-2]]
        return (x.float() * torch.rsqrt(mean + self.eps) * weight).to(x.dtype)


def add_post_norm(linear: torch.nn.Module, config: TransformerConfig) -> None:
    """Norm what a row-parallel linear gives, before it joins the hidden states: `linear.post_layernorm`.

    By a hook, so that an adapter beside the linear, whose hook goes first, adds to what is normed.
    """
    linear.post_layernorm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
    linear.register_forward_hook(_post_norm)


def _post_norm(linear: torch.nn.Module, _inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]):
    result, bias = output
    assert bias is None, "a bias would join after the norm"
    return linear.post_layernorm(result), None
