"""What megatron-core takes for granted about CUDA, and what each assumption becomes on a machine without a GPU.

`PATCHES` is the whole list: small functions, each removing one assumption (its docstring says where megatron-core
makes it). `apply()` runs them once, before megatron.core is imported. `torch.cuda.is_available()` goes on answering
False, so torch and transformers keep to their own CPU paths. Factories are wrapped one by one rather than by a
TorchFunctionMode, which would cost time on every operation and would not reach other threads.
"""

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch.utils import _device as torch_device_context

from megarlhf.device import carried

_FACTORIES = (
    "empty", "zeros", "ones", "full", "tensor", "arange", "linspace", "eye", "as_tensor", "empty_strided",
    "rand", "randn", "randint", "randperm",
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
)  # fmt: skip
_NEW_METHODS = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")
_TYPES = ("FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ByteTensor")
_MEMORY_BYTES = 16 * 2**30
"""What `mem_get_info` and `get_device_properties` say of the card that is not there; nothing of ours reads it."""


def names_cuda(device) -> bool:
    """True for "cuda", "cuda:1" and torch.device("cuda", 0); False for None, other devices, numbers and dtypes."""
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class NoStream:
    """A stream on a device without streams: everything has already happened in order."""

    def __init__(self, device=None, priority: int = 0):
        self.device = torch.device("cpu")
        self.priority = priority

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream) -> None:
        pass

    def wait_event(self, event) -> None:
        pass

    def record_event(self, event=None) -> "NoEvent":
        event = NoEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def __enter__(self) -> "NoStream":
        return self

    def __exit__(self, *exception) -> None:
        pass


class NoEvent:
    """An event on a device without streams: recorded means done. Times are the host's, so elapsed_time is true."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._recorded_s = 0.0

    def record(self, stream=None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream=None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "NoEvent") -> float:
        """Milliseconds from this event to `end`, as torch.cuda.Event gives them."""
        return (end._recorded_s - self._recorded_s) * 1e3


class NoStreamContext:
    """`with torch.cuda.stream(...)`: enters nothing."""

    def __init__(self, stream=None):
        self.stream = stream

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception) -> None:
        pass


class OneGenerator:
    """`torch.cuda.default_generators`: the CPU's generator, whatever device is asked for."""

    def __getitem__(self, device) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 0


def _answers(value) -> Callable:
    """A new function that answers `value` whatever it is asked. New each time: torch.compile refuses one function
    object under two torch names."""

    def answer(*arguments, **options):
        return value

    return answer


def _on_cpu(function: Callable) -> Callable:
    """`function` with a cuda device read as cpu and pinned memory dropped (pinning needs a CUDA driver)."""

    @functools.wraps(function)
    def factory(*arguments, **options):
        if options:
            if names_cuda(options.get("device")):
                options["device"] = torch.device("cpu")
            if options.get("pin_memory"):
                options["pin_memory"] = False
        return function(*arguments, **options)

    return factory


def patch_current_device() -> None:
    """Assumed nearly everywhere (buffers, optimizer, schedules): `device=torch.cuda.current_device()`."""

    def current_device() -> torch.device:
        return torch.device("cpu")

    torch.cuda.current_device = current_device
    torch.cuda.set_device = _answers(None)


def patch_factories() -> None:
    """Assumed by schedules, gradient scaler, optimizers and copy services: `device="cuda"` and `pin_memory=True`.

    torch's own list of device constructors (what `with torch.device("meta")` acts on) is cached first, so that it
    holds the real functions: they are what the wrapped ones call.
    """
    torch_device_context._device_constructors()
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        setattr(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))


def patch_tensor_moves() -> None:
    """Assumed by optimizers and routers: `.cuda()`, `.to("cuda")`, `.pin_memory()` on tensors and modules."""
    tensor_to = torch.Tensor.to

    @functools.wraps(tensor_to)
    def to(self, *arguments, **options):
        if arguments and names_cuda(arguments[0]):
            arguments = (torch.device("cpu"), *arguments[1:])
        if options and names_cuda(options.get("device")):
            options["device"] = torch.device("cpu")
        return tensor_to(self, *arguments, **options)

    def cuda(self, device=None, non_blocking=False, memory_format=torch.preserve_format):
        return self

    def module_cuda(self, device=None):
        return self

    def pin_memory(self, device=None):
        return self

    torch.Tensor.to = to
    torch.Tensor.cuda = cuda
    torch.Tensor.pin_memory = pin_memory
    torch.nn.Module.cuda = module_cuda


def patch_tensor_types() -> None:
    """Assumed by the mixed-precision and distributed optimizers: parameters answer `.type()` with a torch.cuda name.

    `Tensor.type()` therefore answers 'torch.cuda.FloatTensor' for a CPU tensor; `Tensor.type(name)` accepts both.
    """
    tensor_type = torch.Tensor.type

    @functools.wraps(tensor_type)
    def type_of(self, dtype=None, *arguments, **options):
        if dtype is None:
            return tensor_type(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return tensor_type(self, dtype, *arguments, **options)

    torch.Tensor.type = type_of
    for name in _TYPES:
        setattr(torch.cuda, name, getattr(torch, name))


def patch_random_state() -> None:
    """Assumed by the tensor-parallel random tracker: a CUDA generator that can be seeded, read and set.

    `manual_seed` seeds the generator itself: torch.manual_seed calls torch.cuda.manual_seed_all, and must not come
    back here. `_lazy_call` is what tensor_parallel.random wraps its state changes in; it runs them at once.
    """

    def get_rng_state(device=None):
        return torch.default_generator.get_state()

    def set_rng_state(state, device=None):
        torch.default_generator.set_state(state)

    def manual_seed(seed: int):
        torch.default_generator.manual_seed(int(seed))

    def run_now(callable, **options):
        callable()

    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = get_rng_state
    torch.cuda.set_rng_state = torch.cuda.random.set_rng_state = set_rng_state
    torch.cuda.manual_seed = torch.cuda.random.manual_seed = manual_seed
    torch.cuda.default_generators = OneGenerator()
    torch.cuda._lazy_call = run_now
    torch.cuda._lazy_init = _answers(None)


def patch_streams() -> None:
    """Assumed by gradient reduction, pipeline helpers and copy services: streams and events can be made and waited for.

    Classes, not functions: they appear in annotations such as `torch.cuda.Stream | None`.
    """
    torch.cuda.Stream = NoStream
    torch.cuda.Event = NoEvent
    torch.cuda.stream = NoStreamContext
    torch.cuda.device = NoStreamContext
    torch.cuda.current_stream = _answers(NoStream())
    torch.cuda.default_stream = _answers(NoStream())
    torch.cuda.set_stream = _answers(None)
    torch.cuda.is_current_stream_capturing = _answers(False)
    torch.Tensor.record_stream = _answers(None)


def patch_device_facts() -> None:
    """Assumed by timers, memory reports, range markers and kernel choices: the device can be asked about itself."""
    properties = SimpleNamespace(
        name="cpu", total_memory=_MEMORY_BYTES, multi_processor_count=1, major=0, minor=0, gcnArchName=""
    )
    for name, value in (
        ("synchronize", None),
        ("empty_cache", None),
        ("memory_allocated", 0),
        ("max_memory_allocated", 0),
        ("memory_reserved", 0),
        ("max_memory_reserved", 0),
        ("reset_peak_memory_stats", None),
        ("memory_stats", {}),
        ("mem_get_info", (_MEMORY_BYTES, _MEMORY_BYTES)),
        ("get_device_properties", properties),
        ("get_device_capability", (0, 0)),
    ):
        setattr(torch.cuda, name, _answers(value))
    torch.cuda.nvtx.range_push = _answers(None)
    torch.cuda.nvtx.range_pop = _answers(None)


def patch_all_to_all() -> None:
    """Assumed by the dispatcher of mixtures of experts: split sizes copied off the device, which makes them arrays;
    where they are on the host already they stay tensors, and torch wants numbers."""
    exchange = torch.distributed.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(output, input, output_split_sizes=None, input_split_sizes=None, *arguments, **options):
        sizes = (output_split_sizes, input_split_sizes)
        sizes = [each.tolist() if isinstance(each, torch.Tensor) else each for each in sizes]
        return exchange(output, input, *sizes, *arguments, **options)

    torch.distributed.all_to_all_single = all_to_all_single


def patch_collectives() -> None:
    """Assumed by tensor-parallel layers: a sum over ranks costs little, and may run beside computation. gloo's takes
    milliseconds, and the processor; where ranks share memory they have their own (see `carried.py`)."""
    carried.patch()


PATCHES: tuple[Callable[[], None], ...] = (
    patch_current_device,
    patch_factories,
    patch_tensor_moves,
    patch_tensor_types,
    patch_random_state,
    patch_streams,
    patch_device_facts,
    patch_all_to_all,
    patch_collectives,
)
"""Every change made to torch for the CPU, in the order in which they are made."""


def apply() -> None:
    """Make all patches. The caller (`device.prepare`) sees to it that this happens once."""
    for patch in PATCHES:
        patch()
