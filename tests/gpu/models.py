"""Random models of two sizes, what is run through them, and how far apart two of them are."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

RECIPES = (("blockwise", "e4m3"), ("tensorwise", "hybrid"), ("delayed", "hybrid"), ("mxfp8", "e4m3"))


@dataclass(frozen=True)
class Size:
    """Shape of a random model and of what is run through it."""

    config: dict
    rows: int
    prompt_tokens: int
    new_tokens: int
    sampled: int
    """Sequences that are sampled at once."""
    micro_batches: int = 2

    @property
    def max_tokens(self) -> int:
        """Of a micro-batch."""
        return self.num_tokens // self.micro_batches

    @property
    def num_tokens(self) -> int:
        """Of all rows."""
        return self.rows * (self.prompt_tokens + self.new_tokens)


_TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
TINY = Size(_TINY | {"num_hidden_layers": 4, "vocab_size": 1024}, rows=8, prompt_tokens=16, new_tokens=16, sampled=8)
ONE_B = Size(
    {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tied": True, "max_position_embeddings": 4096},
    rows=16,
    prompt_tokens=256,
    new_tokens=256,
    sampled=64,
)
"""The shape of Llama 3.2 1B."""
STAND_IN = Size(
    {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"num_key_value_heads": 1, "head_dim": 64, "vocab_size": 128, "tied": True},
    rows=8,
    prompt_tokens=8,
    new_tokens=8,
    sampled=4,
)
"""What stands for it in a dry run."""


@dataclass
class Lab:
    """What the checks share."""

    is_dry: bool
    folder: Path
    facts: list[str] = field(default_factory=list)

    @property
    def big(self) -> Size:
        return STAND_IN if self.is_dry else ONE_B

    def say(self, words: str) -> None:
        """A fact."""
        self.facts.append(words)
        print(f"  {words}", flush=True)

    def require(self, is_so: bool, words: str) -> None:
        """A fact that has to be so."""
        self.say(f"{words} [{'ok' if is_so else 'WRONG'}]")
        assert is_so, words

    def model_folder(self, size: Size, num_labels: int = 0, seed: int = 0) -> Path:
        """A Hugging Face folder of a random model, written once."""
        path = self.folder / f"{size.config['hidden_size']}x{size.config['num_hidden_layers']}_{num_labels}_{seed}"
        if not path.exists():
            write_model(path, size, num_labels, seed)
        return path


def write_model(folder: Path, size: Size, num_labels: int, seed: int) -> None:
    """As tests.tiny.write_llama, but drawn on the device, for its size, and in bfloat16."""
    import torch
    from safetensors.torch import save_file

    from megarlhf import device
    from tests.tiny import tiny_config, tiny_shapes, write_tokenizer

    folder.mkdir(parents=True)
    config = tiny_config(num_labels=num_labels, **size.config) | {"torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    generator, weights = torch.Generator(device.current()).manual_seed(seed), {}
    for name, shape in tiny_shapes(config).items():
        if "norm" in name:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(shape, generator=generator, device=device.current())
            weights[name] = (drawn / shape[-1] ** 0.5).bfloat16().cpu()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def linears(name: str):
    """Of a name such as "te blockwise e4m3", "emulated blockwise e4m3", "te" or "local"."""
    from megarlhf.config.precision import FP8
    from megarlhf.models.precision.linears import Linears

    layers, _, recipe = name.partition(" ")
    fp8 = FP8(*recipe.split()) if recipe else FP8()
    return Linears("emulated_fp8" if layers == "emulated" else layers, fp8)


def build(folder: Path, name: str, dtype: str = "bfloat16"):
    """A model with these linears and the folder's weights, all on this rank."""
    import torch
    import torch.distributed as dist

    from megarlhf.config.layout import Layout
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    architecture, groups = Architecture.from_folder(folder), build_groups(Layout(), dist.get_world_size())
    model = build_model(
        architecture, groups, head="vocabulary", dtype=getattr(torch, dtype), seed=None, linears=linears(name)
    )
    load_weights(model, folder)
    return model


def batch_of(size: Size, seed: int = 0):
    """Random rows with what PPO's loss of a policy reads."""
    import torch

    from megarlhf.records.experience import Experience, scatter_rows

    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[list[int]]:
        return torch.randint(3, size.config["vocab_size"], (size.rows, count), generator=generator).tolist()

    def noise(scale: float) -> list[list[float]]:
        return (scale * torch.randn(size.rows, size.new_tokens, generator=generator)).tolist()

    rows = range(size.rows)
    batch = Experience.from_completions(
        ids(size.prompt_tokens), ids(size.new_tokens), noise(0.0), row_id=rows, group=rows, finished=[True] * size.rows
    )
    advantage = scatter_rows(noise(1.0), batch.mask)
    return batch.replace(logp_start=batch.logp_rollout - 7, logp_rollout=batch.logp_rollout - 7, advantage=advantage)


def log_probs(model, batch, size: Size):
    """[valid tokens] under the model."""
    from megarlhf.engines.scorer import LogprobScorer

    scored = LogprobScorer(model, "logp_reference", 1.0, size.max_tokens).annotate(batch)
    return scored.logp_reference[batch.mask]


def learner_of(model, size: Size):
    """Trains the model; of the Adam that its layers ask for."""
    from megarlhf.config.settings import Optimizer
    from megarlhf.engines.learner import Learner

    return Learner(model, Optimizer(learning_rate=1e-5), total_updates=100, max_tokens=size.max_tokens)


def part_of(batch):
    """The batch with PPO's loss of a policy."""
    from megarlhf.algorithms.catalogue import PPO as ALGORITHM
    from megarlhf.config.algorithms import PPO
    from megarlhf.engines.learner import Part
    from megarlhf.loop.objectives import objective

    return Part(batch, objective(ALGORITHM, PPO(), "vocabulary"))


@dataclass
class Outcome:
    """What a model says and learns of a batch."""

    logp: object
    gradients: dict
    """By parameter, bfloat16, on the device."""

    def distance(self, other: "Outcome") -> tuple[float, float]:
        """(mean |difference| of log-probs in nats, relative difference of the gradient)."""
        off = sum(
            float((mine.float() - other.gradients[key].float()).square().sum()) for key, mine in self.gradients.items()
        )
        size = sum(float(theirs.float().square().sum()) for theirs in other.gradients.values())
        return float((self.logp - other.logp).abs().mean()), (off / size) ** 0.5


def outcome(model, learner, batch, size: Size) -> Outcome:
    """Of one scoring pass, and one forward and backward pass."""
    import torch

    logp = log_probs(model, batch, size)
    learner.accumulate([part_of(batch)], complete_gradients=True)
    gradients = {key: p.main_grad.to(torch.bfloat16) for key, p in model.named_parameters().items()}
    assert logp.isfinite().all(), "a log-prob is not finite"
    return Outcome(logp, gradients)


def shown(distance: tuple[float, float]) -> str:
    return f"log-probs {distance[0]:.2e} nats, gradient {distance[1]:.2e}"


def requests_of(size: Size, seed: int = 0) -> list:
    """Random prompts to sample from."""
    import torch

    from megarlhf.engines.generator import Request

    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, size.config["vocab_size"], (size.sampled, size.prompt_tokens), generator=generator)
    return [Request(tuple(row), number) for number, row in enumerate(prompts.tolist())]


def sample(model, size: Size) -> list:
    """Completions of full length."""
    from megarlhf.engines.generator import Generator, Sampling

    sampling = Sampling(max_new_tokens=size.new_tokens, stop_ids=(), seed=0)
    return Generator(model, max_slots=size.sampled).generate(requests_of(size), sampling)


def recipes_here() -> list[str]:
    """Those of `RECIPES` that megarlhf does not refuse on this machine."""
    return [f"{recipe} {form}" for recipe, form in RECIPES if not refusals(recipe)]


def refusals(recipe: str) -> list[str]:
    """What megarlhf says of `actor.fp8.recipe` on this machine; in a dry run, on the one that it pretends to be."""
    import torch

    from megarlhf.config.precision import FP8
    from megarlhf.device.transformer_engine import Machine, missing_for_te

    machine = Machine.here()
    if machine.capability is None:
        machine = Machine(machine.transformer_engine, torch.cuda.get_device_capability(), (13, 0))
    return missing_for_te(machine, "actor", {"actor.fp8": FP8(recipe)})


@contextmanager
def fresh_memory() -> Iterator[None]:
    """What was built before and inside is gone from the device when nothing refers to it."""
    from megarlhf import device

    gc.collect()
    device.empty_cache()
    try:
        yield
    finally:
        gc.collect()
        device.empty_cache()
