"""Makes a process one in which Transformer Engine's own Python runs, on a machine without a GPU.

Its sources are the unpacked wheel in .te (`make te-reference`), which is never installed. Its compiled half is
`kernels.py`; packages that only its kernels and exporters need are stood in for by name where they are not installed;
and `EDITS` is every line of it that is read differently, each because it asks whether there is a GPU. megatron-core and
megarlhf go on seeing none: `torch.cuda.is_available()` stays False.
"""

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

ROOT = Path(__file__).parents[2]
WHEEL = ROOT / ".te"
VERSION = "2.20.2"
NAME = f"transformer-engine {VERSION}"
HOPPER, BLACKWELL = (9, 0), (10, 0)
BY_NAME = ("onnx", "onnxscript", "triton", "einops", "pydantic")
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "transformer_engine.common": (
        (
            "def load_framework_extension(framework: str) -> None:\n",
            "def load_framework_extension(framework): return\ndef _(framework):\n",
        ),
    ),
    "transformer_engine.pytorch.module.base": (
        ("if not torch.cuda.is_available():", "if False:"),
        ("if not inp.is_cuda:", "if False:"),
    ),
    "transformer_engine.pytorch.utils": (('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cpu")'),),
    "transformer_engine.pytorch.quantization": (("float(torch.version.cuda)", "13.0"),),
    "transformer_engine.pytorch.distributed": (("torch.distributed._coalescing_manager(", "tex.each_by_itself("),),
}
"""(what a module says, what it is read as); it must say it."""


class _Anything(type):
    """A class with every attribute, each again such a class; calling it gives back what it is called with."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(cls, name, made)
        return made

    def __call__(cls, *arguments, **named):
        return arguments[0] if len(arguments) == 1 and callable(arguments[0]) else cls

    def __getitem__(cls, key):
        return cls

    def __int__(cls):
        return id(cls)


class _NoKernel(_Anything):
    """A name of the compiled half for which there is no kernel here."""

    def __call__(cls, *arguments, **named):
        raise NotImplementedError(f"tests/transformer_engine_cpu/kernels.py has no {cls.__name__}")


class _ByName(ModuleType):
    __path__ = ()
    __version__ = "9.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Anything(name, (), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages that are not installed, by name."""

    def __init__(self, names: tuple[str, ...]):
        self.names = names

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.partition(".")[0] in self.names else None

    def create_module(self, spec):
        return _ByName(spec.name)

    def exec_module(self, module):
        pass


class _Edited(importlib.machinery.SourceFileLoader):
    """A module of the wheel with its `EDITS`."""

    def get_data(self, path):
        text = super().get_data(path)
        if not path.endswith(".py"):
            return text
        text = text.decode()
        for old, new in EDITS[self.name]:
            assert old in text, f"{path} does not say {old!r}: is it version {VERSION}?"
            text = text.replace(old, new)
        return text.encode()

    def get_code(self, fullname):  # never from a compiled file, which the edits would be missing from
        return self.source_to_code(self.get_data(self.path), self.path)


class _Wheel(importlib.abc.MetaPathFinder):
    """The wheel's modules, and the three distributions that a whole installation has.

    No path: processes that this one starts inherit its paths, and are not to find Transformer Engine by themselves.
    """

    def find_spec(self, name, path, target=None):
        if name in EDITS:
            place = WHEEL / name.replace(".", "/")
            is_package = place.is_dir()
            file = str(place / "__init__.py" if is_package else place.with_suffix(".py"))
            where = [str(place)] if is_package else None
            return importlib.util.spec_from_file_location(
                name, file, loader=_Edited(name, file), submodule_search_locations=where
            )
        return importlib.machinery.PathFinder.find_spec(name, [str(WHEEL)]) if name == "transformer_engine" else None

    def find_distributions(self, context):
        parts = ("transformer_engine", "transformer_engine_cu13", "transformer_engine_torch")
        asked = (context.name or "").replace("-", "_")
        return [_Part(part) for part in parts if asked == part]


class _Part(importlib.metadata.Distribution):
    def __init__(self, name: str):
        self._name = name

    def read_text(self, filename):
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path):
        return WHEEL / path


def is_unpacked() -> bool:
    """The wheel is there."""
    return (WHEEL / f"transformer_engine-{VERSION}.dist-info").is_dir()


def activate() -> None:
    """`import transformer_engine.pytorch` works from here on, and takes itself to run on Hopper.

    Idempotent; comes before the first import of megatron.core.
    """
    if "transformer_engine" in sys.modules:
        return
    assert (WHEEL / "transformer_engine").is_dir(), (
        f"no unpacked transformer-engine wheel in {WHEEL}: make te-reference"
    )
    assert "megatron.core" not in sys.modules, "megatron.core was imported without Transformer Engine in this process"
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "NVTE_TORCH_COMPILE": "0", "TORCHDYNAMO_DISABLE": "1"}
    os.environ["NVTE_UNFUSED_FP8_UPDATE"] = "1"  # delayed scaling's histories move on in torch
    from megarlhf import device

    device.prepare()
    missing = tuple(name for name in BY_NAME if importlib.util.find_spec(name) is None)
    sys.meta_path.insert(0, _Wheel())
    sys.meta_path.append(_Finder(missing))
    if "pydantic" in missing:
        importlib.import_module("pydantic.dataclasses").dataclass = dataclasses.dataclass
    pretend(HOPPER)
    _stand_in_for_the_compiled_half()
    importlib.import_module("transformer_engine.pytorch")


def _stand_in_for_the_compiled_half() -> None:
    from tests.transformer_engine_cpu import kernels

    def absent(name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(kernels, name, _NoKernel(name, (), {}))
        return getattr(kernels, name)

    kernels.__getattr__ = absent
    sys.modules["transformer_engine_torch"] = kernels


def pretend(capability: tuple[int, int]) -> None:
    """From here on Transformer Engine takes itself to run on a GPU of this compute capability."""
    import torch

    properties = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=132, name="cpu")
    torch.cuda.get_device_capability = lambda *_: capability
    torch.cuda.get_device_properties = lambda *_: properties
    if "transformer_engine.pytorch.quantization" in sys.modules:
        from transformer_engine.pytorch import quantization, utils

        utils._get_device_compute_capability.cache_clear()
        for recipe in ("FP8", "MXFP8", "FP8_BLOCK_SCALING"):
            setattr(quantization, f"_{recipe}_SUPPORT", None)
