"""What Transformer Engine's layers need of a machine is said before anything is built; nothing is left out silently."""

import pytest

from megarlhf.config.precision import FP8
from megarlhf.device.transformer_engine import Machine, in_words, missing_for_te

HOPPER, BLACKWELL, ADA, AMPERE = (9, 0), (10, 0), (8, 9), (8, 0)


def missing(recipe: str, capability: tuple[int, int] | None, cuda: tuple[int, ...] = (13, 0), version="2.20.2"):
    return missing_for_te(Machine(version, capability, cuda), "actor", {"actor.fp8": FP8(recipe)})


@pytest.mark.parametrize(
    "recipe,capability",
    [("tensorwise", ADA), ("delayed", HOPPER), ("blockwise", HOPPER), ("mxfp8", BLACKWELL), ("off", AMPERE)],
)
def test_a_recipe_runs_where_its_kernels_are(recipe, capability):
    assert missing(recipe, capability) == []


@pytest.mark.parametrize(
    "recipe,capability,cuda,words",
    [
        ("mxfp8", HOPPER, (13, 0), "compute capability 10.0 or more, and this one has 9.0; choose tensorwise or"),
        ("mxfp8", (12, 0), (13, 0), "10.0 to 11.x, and this one has 12.0"),
        ("blockwise", HOPPER, (12, 8), "CUDA 12.9 or newer, and torch was built for 12.8"),
        ("blockwise", ADA, (13, 0), "compute capability 9.0 or more, and this one has 8.9"),
        ("tensorwise", AMPERE, (13, 0), "has 8.0; choose off"),
    ],
)
def test_a_recipe_without_its_kernels_is_refused_with_what_would_run(recipe, capability, cuda, words):
    (line,) = missing(recipe, capability, cuda)
    assert line.startswith(f"actor.fp8.recipe: {recipe} needs ") and words in line


def test_layers_te_need_the_package_and_a_gpu():
    (line,) = missing("off", HOPPER, version=None)
    assert line.startswith("actor.layers: te needs Transformer Engine, which is not installed; install it")
    (line,) = missing("blockwise", None)
    assert line.startswith("actor.layers: te needs a GPU, and there is none here")


def test_the_diagnosis_says_what_could_run():
    assert in_words(Machine("2.20.2", HOPPER, (13, 0))).endswith("FP8 recipes: tensorwise, delayed, blockwise")
    assert in_words(Machine("2.20.2", AMPERE, (13, 0))) == "layers te; FP8 recipes: none"
    assert in_words(Machine(None, HOPPER)) == "no layers te: not installed"
    assert in_words(Machine("2.20.2", None)) == "no layers te: no GPU"


def test_this_machine_is_asked_without_importing_the_package():
    assert Machine.here().capability is None, "tests run without a GPU"


def test_optimizers_are_of_the_adam_that_is_asked_for():
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from megarlhf import device

    before = optimizer.Adam, distrib_optimizer.Adam
    with device.using_adam("torch"):
        import torch

        assert optimizer.Adam is distrib_optimizer.Adam is torch.optim.AdamW and optimizer.USING_PYTORCH_OPTIMIZER
    assert (optimizer.Adam, distrib_optimizer.Adam) == before
    assert device.best_adam(has_te_layers=False) == "torch"
