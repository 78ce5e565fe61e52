"""Preparing a process, and the few questions about its device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    product = device.linear_float32(left, right.t(), torch.empty(left.shape[0], right.shape[1]))
    assert product.dtype == torch.float32
    torch.testing.assert_close(product.double(), left.double() @ right.double(), rtol=1e-5, atol=1e-4)


def prepared_beside(folder: Path) -> subprocess.CompletedProcess:
    """`megarlhf.device.prepare` and megatron-core's import in a process that finds the packages in `folder`."""
    code = "from megarlhf import device; device.prepare(); import megatron.core"
    path = os.pathsep.join([str(folder), os.getcwd(), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, env=environment)


def distribution(folder: Path, name: str) -> None:
    info = folder / f"{name.replace('-', '_')}-2.20.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.20.2\n")


def test_an_apex_that_is_not_nvidias_is_named(tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").write_text("")
    run = prepared_beside(tmp_path)
    assert run.returncode == 1 and f"the package apex at {tmp_path}/apex/__init__.py is not NVIDIA's" in run.stderr
    assert "pip uninstall apex" in run.stderr


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ((), "is installed without transformer-engine-cu12 or -cu13 and transformer-engine-torch"),
        (("cu13",), "is installed without transformer-engine-torch"),
        (("cu13", "torch"), "is installed and there is no GPU"),
    ],
)
def test_a_transformer_engine_that_cannot_serve_here_is_named(parts, words, tmp_path):
    if torch.cuda.is_available() and len(parts) == 2:
        pytest.skip("there is a GPU: the package would serve")
    (tmp_path / "transformer_engine").mkdir()
    (tmp_path / "transformer_engine/__init__.py").write_text("raise RuntimeError('empty meta package')")
    for part in ("", *(f"-{name}" for name in parts)):
        distribution(tmp_path, f"transformer-engine{part}")
    run = prepared_beside(tmp_path)
    assert run.returncode == 1 and f"transformer-engine 2.20.2 {words}" in run.stderr, run.stderr[-500:]
    assert "empty meta package" not in run.stderr
