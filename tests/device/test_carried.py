"""A group's carrier does its sums and gathers of floating-point numbers; everything else stays the backend's."""

import torch
import torch.distributed as dist

from tests.distributed.pool import run_on_ranks


class Tens:
    """A carrier that shows that it was asked."""

    def all_reduce(self, tensor):
        tensor.fill_(10)

    def all_gather(self, output, part):
        output.fill_(20)

    def reduce_scatter(self, output, whole):
        output.fill_(30)


def asked(rank: int, world_size: int, is_carried: bool) -> dict[str, float]:
    """The first number that each collective gives over a group of its own."""
    from megarlhf import device

    group = dist.new_group(list(range(world_size)))
    if is_carried:
        device.carry(group, Tens())
    found = {}
    for name, options in (("sum", {}), ("maximum", {"op": dist.ReduceOp.MAX}), ("later", {"async_op": True})):
        tensor = torch.ones(2)
        handle = dist.all_reduce(tensor, group=group, **options)
        assert (handle is None) == (name != "later")
        if handle:
            handle.wait()
        found[name] = tensor[0].item()
    whole_number, part, whole = torch.ones(2, dtype=torch.int64), torch.ones(1), torch.ones(world_size)
    dist.all_reduce(whole_number, group=group)
    dist.all_gather_into_tensor(whole, part, group=group)
    found |= {"whole number": whole_number[0].item(), "gather": whole[0].item()}
    dist.reduce_scatter_tensor(part, torch.ones(world_size), group=group)
    return found | {"scatter": part.item()}


def test_a_carrier_is_asked_for_what_it_can_do_and_for_its_group_only():
    plain = {"sum": 2, "maximum": 1, "later": 2, "whole number": 2, "gather": 1, "scatter": 2}
    assert run_on_ranks(2, asked, False) == [plain] * 2
    carried = plain | {"sum": 10, "later": 10, "gather": 20, "scatter": 30}
    assert run_on_ranks(2, asked, True) == [carried] * 2


def bound(rank: int, world_size: int) -> list[bool]:
    """Whether megatron-core's tensor-parallel layers call the functions that know of carriers."""
    from megatron.core.tensor_parallel import layers, mappings

    return [
        module.dist_all_gather_func is dist.all_gather_into_tensor
        and module.dist_reduce_scatter_func is dist.reduce_scatter_tensor
        for module in (layers, mappings)
    ]


def test_tensor_parallel_layers_ask_carriers():
    assert run_on_ranks(1, bound) == [[True, True]]
