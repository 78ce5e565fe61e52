"""Layouts are found to agree where they do, and a broken split is found and named."""

import json
from dataclasses import replace

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.load import load
from megarlhf.config.runs import PPORun
from megarlhf.config.verification import Case, Verification, one_process
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama

OPTIONS = Verification(new_tokens=6)


def recipe(folder) -> PPORun:
    return load(PPORun, folder / "ppo.yaml", [])


def write_recipe(folder):
    write_llama(folder / "actor", tied=True)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("Hi", "How?", "x")))
    (folder / "ppo.yaml").write_text(
        f"actor: {{model: {folder}/actor, micro_batch_tokens: 32}}\n"
        "reward: {functions: [length]}\n"
        f"data: {{prompts: {folder}/prompts.jsonl}}\n"
        f"run: {{dir: {folder}/run}}\n"
    )
    return folder


def trials(settings: PPORun, batch) -> dict:
    from megarlhf.algorithms.catalogue import PPO
    from megarlhf.loop.layouts_agree import trained_roles
    from megarlhf.loop.objectives import objective
    from megarlhf.loop.verification import Trial

    now = PPO.settings_now(settings.algorithm, PPO.initial_state(settings.algorithm))
    return {
        name: Trial(role, batch, objective(PPO, now, role.head), settings.actor.optimizer)
        for name, role in trained_roles(settings).items()
    }


def reference(rank: int, world_size: int, folder):
    """(batch, what one process computes, by model)."""
    from megarlhf.algorithms.catalogue import PPO
    from megarlhf.loop.frozen import frozen_batch
    from megarlhf.loop.layouts_agree import trained_roles
    from megarlhf.loop.verification import measure

    settings = recipe(folder)
    batch = frozen_batch(settings, PPO, trained_roles(settings)["actor"], OPTIONS)
    return batch, {name: measure(trial, one_process(), None) for name, trial in trials(settings, batch).items()}


def compared(rank: int, world_size: int, folder, batch, expected, layout: Layout, injure=None):
    """What the first rank finds, by model; `injure(rank)` is called before, and what it returns afterwards."""
    from megarlhf.loop.layouts_agree import Agreement
    from megarlhf.loop.verification import Gaps, measure

    settings, case = recipe(folder), Case(f"{layout}", layout, world_size, 32)
    heal = injure(rank) if injure else None
    try:
        found = {
            name: measure(trial, case, expected[name] if rank == 0 else None)
            for name, trial in trials(settings, batch).items()
        }
    finally:
        if heal:
            heal()
    return {name: Agreement(name, case, gaps, OPTIONS) for name, gaps in found.items() if isinstance(gaps, Gaps)}


@pytest.fixture(scope="module")
def frozen(tmp_path_factory):
    folder = write_recipe(tmp_path_factory.mktemp("verification"))
    return folder, *run_on_ranks(1, reference, folder)[0]


SOUND = [
    Layout(tp=2, sp=True),
    Layout(pp=2),
    Layout(),
    Layout(pp=2, vp=2),
    Layout(cp=2),
    Layout(pp=2, last_stage_layers=1),
]


@pytest.mark.parametrize("layout", SOUND, ids=str)
def test_sound_layouts_agree_with_one_process(layout, frozen):
    found = run_on_ranks(2, compared, *frozen, layout)
    assert found[0].keys() == {"actor", "critic"} and not found[1]
    for agreement in found[0].values():
        assert agreement.passed and not agreement.named, agreement.named
        assert agreement.gaps.first_block is None
        assert agreement.gaps.loss < 1e-6 and agreement.gaps.gradients


def swap_gate_and_up(rank: int):
    """On rank 1, where local maps say so, layer 2 has the halves of its first feed-forward matrix exchanged."""
    if rank != 1:
        return None
    from megarlhf.weights import load

    sound = load.local_map

    def broken(*arguments):
        held = dict(sound(*arguments))
        key = (0, "decoder.layers.2.mlp.linear_fc1.weight")
        gate, up = held[key].pieces
        swapped = (replace(gate, target=up.target), replace(up, target=gate.target))
        held[key] = replace(held[key], pieces=swapped)
        return held

    load.local_map = broken
    return lambda: setattr(load, "local_map", sound)


def test_weights_that_are_read_into_the_wrong_place_are_named(frozen):
    for agreement in run_on_ranks(2, compared, *frozen, Layout(tp=2), swap_gate_and_up)[0].values():
        assert not agreement.passed
        at = "model.layers.2.mlp"
        assert agreement.named == [f"{at}.{name}_proj.weight is read differently" for name in ("gate", "up")]


def exchange_halves_in_use(rank: int):
    """Rank 1 takes up for gate and gate for up in layer 2, whatever its weights say: their boxes cannot tell."""
    if rank != 1:
        return None
    from megatron.core.transformer.mlp import MLP

    sound = MLP.__init__

    def broken(self, *arguments, **options):
        sound(self, *arguments, **options)
        MLP.count = (MLP.count + 1) % 4
        if MLP.count == 3:
            inner = self.linear_fc1.forward
            self.linear_fc1.forward = lambda hidden: (torch.cat(inner(hidden)[0].chunk(2, dim=-1)[::-1], dim=-1), None)

    MLP.count, MLP.__init__ = 0, broken

    def heal():
        MLP.__init__ = sound
        del MLP.count

    return heal


def test_a_split_that_computes_something_else_is_named_by_where_the_forward_pass_parts(frozen):
    for agreement in run_on_ranks(2, compared, *frozen, Layout(tp=2), exchange_halves_in_use)[0].values():
        assert not agreement.passed and not agreement.gaps.misplaced
        assert agreement.gaps.loss > OPTIONS.loss_tolerance
        assert agreement.gaps.first_block == (2, "mlp")
        assert "model.layers.2.mlp.gate_proj.weight, model.layers.2.mlp.up_proj.weight" in agreement.named[0]


def forget_a_sum(rank: int):
    """The gradient of one norm, of which every tensor rank has a part under sequence parallelism, is not summed."""
    from megarlhf.models.gpt import GPT

    sound = GPT.__init__

    def broken(self, *arguments, **options):
        sound(self, *arguments, **options)
        self.decoder.layers[1].pre_mlp_layernorm.weight.sequence_parallel = False

    GPT.__init__ = broken
    return lambda: setattr(GPT, "__init__", sound)


def test_a_gradient_that_is_not_whole_is_named(frozen):
    for agreement in run_on_ranks(2, compared, *frozen, Layout(tp=2, sp=True), forget_a_sum)[0].values():
        assert not agreement.passed and agreement.gaps.first_block is None
        assert [words.split(":")[0] for words in agreement.named] == [
            "gradient of model.layers.1.post_attention_layernorm.weight"
        ]
