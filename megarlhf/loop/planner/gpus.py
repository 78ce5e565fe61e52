"""What a GPU can do at best, and what of that programs reach: the numbers behind estimates of time.

Peaks are dense, from NVIDIA's data sheets; a link's bandwidth is that of one direction. The network is the usual one of
the GPU's HGX or DGX servers: one InfiniBand port a GPU. Shares of the peaks are what published training runs and
serving benchmarks reach, not measurements of this program, which has not been timed on GPUs: hence a range.
"""

from dataclasses import dataclass

from megarlhf.config.check import te_recipes
from megarlhf.config.precision import LEAST_CAPABILITY, lacking_gpu
from megarlhf.config.runs import AnyRun
from megarlhf.errors import ConfigError


@dataclass(frozen=True)
class GPU:
    """One kind of GPU and its surroundings."""

    name: str
    memory_gib: float
    flops: float
    """bfloat16 with float32 accumulation, a second."""
    float32_flops: float
    memory_bandwidth: float
    """Bytes a second."""
    node_bandwidth: float
    """Bytes a second, one direction, to the GPUs of the same node (NVLink)."""
    network_bandwidth: float
    """Bytes a second, one direction, to other nodes."""
    gpus_per_node: int
    source: str
    capability: tuple[int, int] | None
    """CUDA's compute capability; None for a CPU."""
    launch_s: float = 8e-6
    """A kernel that is launched from Python, when it is too small to hide that."""
    overlaps: bool = True
    """Memory is read while it multiplies and while kernels are launched; a core does one after the other."""

    @property
    def is_gpu(self) -> bool:
        """False for the entry that stands for CPU cores."""
        return self.capability is not None


@dataclass(frozen=True)
class Efficiency:
    """Shares of a GPU's peaks."""

    compute: float
    memory: float
    links: float


LIKELY = Efficiency(compute=0.40, memory=0.65, links=0.65)
BEST = Efficiency(compute=0.55, memory=0.85, links=0.85)
WORST = Efficiency(compute=0.25, memory=0.45, links=0.40)

GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU("a100-40", 40, 312e12, 19.5e12, 1.555e12, 300e9, 25e9, 8, "NVIDIA A100 data sheet; HDR InfiniBand", (8, 0)),
        GPU("a100", 80, 312e12, 19.5e12, 2.039e12, 300e9, 25e9, 8, "NVIDIA A100 80GB SXM data sheet; HDR", (8, 0)),
        GPU("h100", 80, 989e12, 67e12, 3.35e12, 450e9, 50e9, 8, "NVIDIA H100 SXM data sheet; NDR InfiniBand", (9, 0)),
        GPU("h200", 141, 989e12, 67e12, 4.8e12, 450e9, 50e9, 8, "NVIDIA H200 SXM data sheet; NDR InfiniBand", (9, 0)),
        GPU("b200", 180, 2250e12, 80e12, 8.0e12, 900e9, 50e9, 8, "NVIDIA HGX B200 data sheet; NDR InfiniBand", (10, 0)),
        GPU(
            "cpu", 16, 50e9, 50e9, 10e9, 2e9, 1e9, 1, "one core, rough figures; every rank a core of one machine",
            None, launch_s=1e-5, overlaps=False,
        ),
    )
}  # fmt: skip


def gpu_violations(settings: AnyRun, gpu: GPU) -> list[str]:
    """What of Transformer Engine the settings ask for and a launch on `gpu` would refuse, a sentence each."""
    found = []
    for name, recipes in te_recipes(settings).items():
        if gpu.capability is None:
            found.append(
                f"--gpu {gpu.name}: {name}.layers: te needs a GPU; set {name}.layers to local or emulated_fp8, or plan "
                "for a GPU"
            )
            continue
        fits = [recipe for recipe in LEAST_CAPABILITY if not lacking_gpu(recipe, gpu.capability)]
        for setting, fp8 in recipes.items():
            lacking = lacking_gpu(fp8.recipe, gpu.capability) if fp8.is_on else ""
            if lacking:
                choices = " or ".join([*fits, "off"])
                found.append(
                    f"--gpu {gpu.name}: {setting}.recipe: {fp8.recipe} needs {lacking}; choose {choices}, or another "
                    "GPU"
                )
    return found


def gpu_named(name: str) -> GPU:
    """Raises ConfigError for a GPU that is not in the table."""
    if name not in GPUS:
        raise ConfigError(f"--gpu {name}: is not in the table; choose one of {', '.join(GPUS)}")
    return GPUS[name]
