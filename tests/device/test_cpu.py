"""One test for each assumption that megatron-core makes about CUDA: the call it makes, answered without a GPU."""

import time

import pytest
import torch

from megarlhf import device
from megarlhf.device import cpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the patches are for machines without a GPU")
CUDA = ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)]


def test_current_device_can_be_passed_as_a_device():
    assert torch.zeros(2, device=torch.cuda.current_device()).device.type == "cpu"
    torch.cuda.set_device(0)


@pytest.mark.parametrize("name", CUDA, ids=str)
def test_factories_read_cuda_as_cpu_and_drop_pinning(name):
    like = torch.arange(3.0)
    made = [
        torch.empty(3, device=name),
        torch.zeros((3,), dtype=torch.float, device=name, pin_memory=True),
        torch.ones(3, device=name),
        torch.full((3,), 2.0, device=name),
        torch.tensor([1.0, 2.0, 3.0], device=name),
        torch.arange(3, device=name),
        torch.rand(3, device=name),
        torch.randn(3, device=name),
        torch.randint(5, (3,), device=name),
        torch.empty_like(like, device=name),
        torch.zeros_like(like, device=name),
        like.new_empty(3, device=name),
        like.new_zeros(3, device=name),
    ]
    assert all(tensor.device.type == "cpu" and tensor.shape == (3,) for tensor in made)
    assert made[4].tolist() == [1.0, 2.0, 3.0]


def test_other_devices_and_device_contexts_work_as_before():
    assert torch.empty(2, device="meta").device.type == "meta"
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"
    assert torch.zeros(2).device.type == "cpu"


def test_moves_to_cuda_stay_where_they_are():
    tensor = torch.arange(3.0)
    for moved in (tensor.cuda(), tensor.to("cuda"), tensor.to(device="cuda:0"), tensor.pin_memory()):
        assert moved.device.type == "cpu" and torch.equal(moved, tensor)
    assert tensor.to("cuda", torch.float64).dtype == torch.float64
    assert tensor.to(torch.int32).dtype == torch.int32
    module = torch.nn.Linear(2, 2)
    assert module.cuda() is module and module.to("cuda").weight.device.type == "cpu"


def test_parameters_answer_with_the_type_names_that_optimizers_compare():
    assert torch.nn.Parameter(torch.zeros(1)).type() == "torch.cuda.FloatTensor"
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1, dtype=torch.half).type() == "torch.cuda.HalfTensor"
    assert torch.zeros(1).type(torch.float64).dtype == torch.float64
    assert torch.zeros(1).type("torch.cuda.LongTensor").dtype == torch.int64
    assert torch.zeros(1).type(torch.zeros(1, dtype=torch.half).type()).dtype == torch.half
    assert torch.cuda.FloatTensor([1.0]).dtype == torch.float32


def test_the_random_tracker_forks_and_comes_back():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(5)
    outside = torch.get_rng_state()
    tracker.add("weights", 7)
    with tracker.fork("weights"):
        first = torch.randn(3)
    with tracker.fork("weights"):
        second = torch.randn(3)
    assert torch.equal(outside, torch.get_rng_state())
    assert torch.equal(first, torch.randn(3, generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(first, second)


def test_random_state_of_the_device_is_the_cpus():
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(2)
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(2))
    torch.manual_seed(3)  # calls torch.cuda.manual_seed_all: must not come back to torch.manual_seed
    assert torch.equal(first, torch.rand(2))
    assert torch.cuda.default_generators[0] is torch.default_generator


def test_streams_and_events_do_nothing_and_events_tell_time():
    stream = torch.cuda.Stream(device="cuda", priority=-1)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        start.record()
        time.sleep(0.01)
        end.record(stream)
    torch.cuda.current_stream().wait_event(end)
    torch.zeros(1).record_stream(stream)
    assert stream.query() and end.query() and stream.record_event().query()
    assert 5 < start.elapsed_time(end) < 5000
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.cuda.Stream | None  # transformers writes this in annotations: a class, not a function


def test_the_device_answers_questions_about_itself():
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == 0 and torch.cuda.memory_stats() == {}
    free, total = torch.cuda.mem_get_info()
    assert free <= total == torch.cuda.get_device_properties(0).total_memory
    assert torch.cuda.get_device_capability() == (0, 0)
    torch.cuda.nvtx.range_push("step")
    torch.cuda.nvtx.range_pop()


def test_the_world_still_sees_a_machine_without_a_gpu():
    import transformers

    assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
    assert not transformers.utils.is_torch_cuda_available()


def test_patches_are_made_once():
    factory = torch.empty
    device.prepare()
    assert torch.empty is factory and not hasattr(factory.__wrapped__, "__wrapped__")


def test_no_function_stands_under_two_names():
    """torch.compile refuses one function object under two torch names."""
    names = ["synchronize", "empty_cache", "memory_allocated", "current_stream", "default_stream", "_lazy_init"]
    functions = [getattr(torch.cuda, name) for name in names]
    assert len(set(map(id, functions))) == len(functions)


def test_compiled_functions_still_compile_on_paths_that_make_tensors():
    explained = torch.compile(lambda x: x + torch.zeros(3, device=x.device), backend="eager")
    assert explained(torch.ones(3)).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("patch", cpu.PATCHES, ids=lambda patch: patch.__name__)
def test_every_patch_says_which_assumption_it_removes(patch):
    assert patch.__doc__.startswith("Assumed ")
