"""How the routers of a mixture of experts shared out the tokens of one update, as metrics."""

import torch
import torch.distributed as dist

from megarlhf import device
from megarlhf.models.build import Model
from megarlhf.records.metrics import Mean, Metric


def routing_metrics(model: Model) -> dict[str, Metric]:
    """The same on every rank, means over layers with experts (collective over the world).

    busiest_expert: tokens of the busiest expert over the mean of all (1: shared out evenly; E/k: always the same k);
    idle_experts: share of experts without a token; router_entropy: of the router's distribution, mean per token, in
    nats; balance_loss: the load-balancing loss without its coefficient, where there is one. Names begin with
    `experts/`, of a value model with `value_experts/`.
    """
    mixture, tally = model.architecture.mixture, model.tally
    assert mixture is not None and tally is not None, "a model without experts routes nothing"
    counted = torch.zeros(len(mixture.layers), mixture.num_experts + 2, dtype=torch.float64)
    for place, layer in enumerate(mixture.layers):
        if layer + 1 in tally.loads:  # megatron-core numbers layers from 1
            counted[place, :-2] = tally.loads[layer + 1]
            counted[place, -2] = tally.entropies[layer + 1]
            counted[place, -1] = tally.losses.get(layer + 1, torch.zeros(()))
    counted = counted.to(device.current())
    dist.all_reduce(counted, group=model.groups.world)
    loads, entropies, losses = counted[:, :-2].cpu(), counted[:, -2].cpu(), counted[:, -1].cpu()
    mean_load = loads.mean(1).clamp(min=1e-30)
    layers, tokens = len(loads), float(loads.sum()) / mixture.top_k
    found = {
        "busiest_expert": Mean(float((loads.max(1).values / mean_load).sum()), layers),
        "idle_experts": Mean(float((loads == 0).double().mean(1).sum()), layers),
        "router_entropy": Mean(float(entropies.sum()), tokens),
    }
    if tally.balance_coef:
        found["balance_loss"] = Mean(float(losses.sum()), layers)
    prefix = "value_experts" if model.head == "value" else "experts"
    return {f"{prefix}/{name}": metric for name, metric in found.items()}
