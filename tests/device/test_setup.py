"""Preparing a process, and the few questions about its device."""

import subprocess
import sys

import torch

from megarlhf import device


def test_this_process_is_prepared_and_on_one_kind_of_device():
    assert device.is_prepared()
    assert (device.current().type, device.backend()) in {("cpu", "gloo"), ("cuda", "nccl")}


def test_megatron_core_first_is_refused():
    code = "import sys; sys.modules['megatron.core'] = sys; from megarlhf import device; device.prepare()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if not torch.cuda.is_available():
        assert run.returncode == 1 and "call prepare() first" in run.stderr


def test_memory_calls_work_on_any_device():
    device.synchronize()
    device.empty_cache()
    assert device.memory_allocated_bytes() >= 0
    source = torch.arange(4)
    host = device.pinned(source)
    source += 1
    assert host.tolist() == [0, 1, 2, 3] and host.device.type == "cpu"


def test_low_precision_products_are_not_rounded():
    left, right = torch.randn(5, 64).bfloat16(), torch.randn(64, 7).bfloat16()
    product = device.matmul_float32(left, right)
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-4)
