"""Optional packages that take megatron-core down with them when they are only half there; asked before its import."""

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec


def installed(name: str) -> str | None:
    """Version of a distribution; None when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def can_import(module: str) -> bool:
    """A top-level module can be found; it is not imported. A mere folder of that name, such as wandb's own `wandb/` of
    the runs that were started here, is none."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None


def has_real_apex() -> bool:
    """NVIDIA's apex with its kernels, by the module that they are in; the name `apex` alone says nothing."""
    return can_import("amp_C")


def has_fused_weight_gradients() -> bool:
    """apex's kernel that adds a linear's weight gradient to the main gradient."""
    return can_import("fused_weight_gradient_mlp_cuda")


def package_violations(*, has_gpu: bool) -> list[str]:
    """What is installed so that importing megatron-core fails, or computes with the wrong thing, a sentence each."""
    return [*_transformer_engine(has_gpu), *_apex()]


def _transformer_engine(has_gpu: bool) -> list[str]:
    if not can_import("transformer_engine"):
        return []
    found = installed("transformer-engine") or "of unknown version"
    has_core = any(installed(f"transformer-engine-{cuda}") for cuda in ("cu12", "cu13"))
    missing = [] if has_core else ["transformer-engine-cu12 or -cu13"]
    missing += [] if installed("transformer-engine-torch") else ["transformer-engine-torch"]
    if missing:
        return [
            f"transformer-engine {found} is installed without {' and '.join(missing)}: its import raises, and "
            "megatron-core's with it. Remove it (pip uninstall transformer-engine), or install all of it "
            "(pip install --no-build-isolation 'megarlhf[te]')"
        ]
    if not has_gpu:
        return [
            f"transformer-engine {found} is installed and there is no GPU: megatron-core would take its optimizer, "
            "which needs one. Use an environment without it on machines without a GPU"
        ]
    return []


def _apex() -> list[str]:
    spec = find_spec("apex")
    if spec is None or has_real_apex():
        return []
    where = spec.origin or ", ".join(spec.submodule_search_locations or ())
    return [
        f"the package apex at {where} is not NVIDIA's with its kernels (there is no amp_C), and megatron-core takes "
        "any apex for it. Remove it (pip uninstall apex); NVIDIA's is built from its repository and not needed"
    ]
