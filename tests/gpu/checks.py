"""The checks: each a function of the lab whose docstring says what is so when it passes."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

from tests.gpu.models import (
    TINY,
    Lab,
    Outcome,
    Size,
    batch_of,
    build,
    fresh_memory,
    learner_of,
    log_probs,
    outcome,
    part_of,
    recipes_here,
    refusals,
    requests_of,
    sample,
    shown,
)

GIB = 2**30
Check = Callable[[Lab], None]


def environment(lab: Lab) -> None:
    """What is here, and that it is what the other checks take for granted."""
    import torch
    import torch.distributed as dist

    from megarlhf import device
    from megarlhf.device.versions import versions

    lab.say(", ".join(f"{name} {version}" for name, version in versions().items()))
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    lab.say(f"{where}, compute capability {torch.cuda.get_device_capability()}, {dist.get_backend()}")
    kinds = ", ".join(recipes_here()) or "none"
    lab.say(f"recipes: {kinds}; Adam beside te layers: {device.best_adam(has_te_layers=True)}, beside local ones: "
            f"{device.best_adam(has_te_layers=False)}")  # fmt: skip
    lab.require(device.best_adam(has_te_layers=True) == "te", "te layers get Transformer Engine's fused Adam")
    lab.require(dist.get_backend() == ("gloo" if lab.is_dry else "nccl"), "collectives go where they should")


def refusal(lab: Lab) -> None:
    """MXFP8 is refused on Hopper, in words, and not elsewhere."""
    import torch

    is_hopper = torch.cuda.get_device_capability() < (10, 0)
    found = refusals("mxfp8")
    lab.say(f"mxfp8: {found[0] if found else 'accepted'}")
    is_clear = bool(found) and "needs a GPU of compute capability 10.0 or more" in found[0] and "choose" in found[0]
    lab.require(is_clear if is_hopper else not found, "mxfp8 is refused exactly where it cannot run")


def parity(lab: Lab, size: Size, recipes: Sequence[str]) -> None:
    """te without FP8 is as far from float32 as local layers are; te in FP8 is nearer to the emulation than FP8 is to
    bfloat16. Forward and backward."""
    folder, batch = lab.model_folder(size), batch_of(size)

    def of(name: str, dtype: str = "bfloat16") -> Outcome:
        with fresh_memory():
            model = build(folder, name, dtype)
            # Transformer Engine moves delayed scaling's histories on with every micro-batch, the emulation with a step.
            run = replace(size, micro_batches=1) if "delayed" in name else size
            return outcome(model, learner_of(model, run), batch, run)

    local, plain = of("local"), of("te")
    exact = of("local", "float32")
    mine, theirs = plain.distance(exact), local.distance(exact)
    words = f"te in bfloat16, from float32: {shown(mine)}; local layers: {shown(theirs)}"
    lab.require(all(one <= 1.5 * other + 1e-6 for one, other in zip(mine, theirs, strict=True)), words)
    del exact, plain
    for recipe in recipes:
        te, emulated = of(f"te {recipe}"), of(f"emulated {recipe}")
        near, far = te.distance(emulated), emulated.distance(local)
        words = f"te {recipe}, from the emulation: {shown(near)}; the emulation from bfloat16: {shown(far)}"
        lab.require(all(one < 0.5 * other for one, other in zip(near, far, strict=True)), words)


def tiny_parity(lab: Lab) -> None:
    """Every recipe that this machine has, on the tiny model."""
    parity(lab, TINY, recipes_here())


def big_parity(lab: Lab) -> None:
    """Two recipes on the model of 1B."""
    parity(lab, lab.big, [recipe for recipe in recipes_here() if not recipe.startswith("delayed")])


def stale(lab: Lab) -> None:
    """Te keeps quantised weights; no path of megarlhf leaves old ones behind."""
    import torch

    from megarlhf.engines.pipeline import micro_batches
    from megarlhf.models.forward import packed_forward
    from megarlhf.residency.residency import Residency
    from megarlhf.residency.stages import WEIGHTS, Tenant
    from megarlhf.weights.exchange import Resharder
    from megarlhf.weights.load import load_weights

    one, other, batch = lab.model_folder(TINY), lab.model_folder(TINY, seed=1), batch_of(TINY)

    @torch.no_grad()
    def hidden(model):
        """A direct call of the layers, which no schedule of megatron-core tells that a step begins."""
        packed = micro_batches(batch, model, TINY.max_tokens)[0].packed
        return packed_forward(model.chunks[0].eval(), packed, 0, packed.num_padding).float()

    def copy_of(model):
        fresh = build(one, "te blockwise e4m3")
        for key, parameter in fresh.named_parameters().items():
            parameter.data.copy_(model.named_parameters()[key].data)
        return fresh

    def change(model) -> None:
        for (_, name), parameter in model.named_parameters().items():
            if "linear_fc" in name:
                parameter.data.mul_(0.5)

    def by_residency(model) -> None:
        residency = Residency({Tenant("actor", WEIGHTS): "host"}, lab.folder / "residency")
        residency.add(Tenant("actor", WEIGHTS), lambda: model.named_parameters().values(), model.weights_changed)
        residency.rest()
        with residency.stage("logp", [Tenant("actor", WEIGHTS)]):
            change(model)
            model.weights_changed()
        residency.rest()
        with residency.stage("logp", [Tenant("actor", WEIGHTS)]):
            pass
        residency.close()

    model = build(one, "te blockwise e4m3")
    before = hidden(model)
    change(model)
    kept = float((hidden(model) - before).abs().max())
    model.weights_changed()
    told = float((hidden(model) - before).abs().max())
    words = f"a direct call after a change that nobody is told of: moved {kept:.2e}, and {told:.2e} once told"
    lab.require(kept <= 1e-3 * told, words)
    paths: dict[str, Callable] = {
        "optimizer step": lambda model: learner_of(model, TINY).update([part_of(batch)]),
        "load": lambda model: load_weights(model, other),
        "reshard": lambda model: Resharder(build(other, "te blockwise e4m3"), model).run(),
        "offload and onload": by_residency,
    }
    for path, run in paths.items():
        model = build(one, "te blockwise e4m3")
        before = hidden(model)
        run(model)
        after, fresh = hidden(model), hidden(copy_of(model))
        moved, left = float((after - before).abs().max()), float((after - fresh).abs().max())
        lab.require(moved > 0 and left <= 1e-3 * moved, f"{path}: moved {moved:.2e}, from a fresh model {left:.2e}")


def generation(lab: Lab) -> None:
    """Sampling with a cache and scoring the samples in one pass agree, as far as each agrees with float32."""
    from megarlhf.records.experience import Experience

    folder, rows = lab.model_folder(TINY), range(TINY.sampled)
    for name in ("local", "te", *(f"te {recipe}" for recipe in recipes_here() if "delayed" not in recipe)):
        with fresh_memory():
            model = build(folder, name)
            completions = sample(model, TINY)
            batch = Experience.from_completions(
                [request.prompt_ids for request in requests_of(TINY)],
                [one.token_ids for one in completions],
                [one.logps for one in completions],
                row_id=rows,
                group=rows,
                finished=[False] * TINY.sampled,
            )
            sampled, scored = batch.logp_rollout[batch.mask], log_probs(model, batch, TINY)
            exact = log_probs(build(folder, "local", "float32"), batch, TINY)
            gap, error = (float((scored - values).abs().mean()) for values in (sampled, exact))
        words = f"{name}: sampler and scorer differ by {gap:.2e} nats, the scorer from float32 by {error:.2e}"
        lab.require(gap <= 3 * error + 1e-4, words)


def speed(lab: Lab) -> None:
    """Tokens a second in training, scoring and sampling, and the memory that training takes, on the model of 1B."""
    for name in ("local", "te", *(f"te {recipe}" for recipe in recipes_here())):
        with fresh_memory():
            lab.require(*paces(lab, name))


def paces(lab: Lab, name: str) -> tuple[bool, str]:
    """(whether the model learned, what was measured)."""
    from megarlhf import device

    size, batch = lab.big, batch_of(lab.big)
    model, words = build(lab.model_folder(size), name), []
    if "delayed" not in name:  # which megarlhf refuses to sample with
        completions, seconds = timed(lambda: sample(model, size), repeats=1)
        num_sampled = sum(len(one.token_ids) for one in completions)
        words.append(f"samples {num_sampled / seconds:,.0f} ({size.sampled} at once)")
    _, seconds = timed(lambda: log_probs(model, batch, size), repeats=2)
    words.append(f"scores {size.num_tokens / seconds:,.0f}")
    learner = learner_of(model, size)
    with device.PeakMeter() as meter:
        update, seconds = timed(lambda: learner.update([part_of(batch)]), repeats=3)
    words.append(f"learns {size.num_tokens / seconds:,.0f} tokens/s; {meter.peak_bytes / GIB:.2f} GiB at most")
    return update.applied, f"{name}: {', '.join(words)}"


def timed(work: Callable, *, repeats: int):
    """(what it gave, seconds of one run), after a run that is not counted."""
    from megarlhf import device

    found = work()
    device.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        found = work()
    device.synchronize()
    return found, (time.perf_counter() - start) / repeats


def offload(lab: Lab) -> None:
    """A trained model's memory leaves the device whole, quantised copies included, and comes back the same."""
    import torch

    from megarlhf import device
    from megarlhf.loop.housing import house_learner
    from megarlhf.residency.residency import Residency
    from megarlhf.residency.stages import GRADIENTS, OPTIMIZER, WEIGHTS, Tenant

    size, batch, tenants = (
        lab.big,
        batch_of(lab.big),
        [Tenant("actor", part) for part in (WEIGHTS, GRADIENTS, OPTIMIZER)],
    )
    base = device.memory_allocated_bytes()
    model = build(lab.model_folder(size), "te blockwise e4m3")
    learner = learner_of(model, size)
    learner.update([part_of(batch)])
    log_probs(model, batch, size)  # quantised copies are kept from here on
    before = [parameter.detach().clone().cpu() for parameter in model.named_parameters().values()]
    held = device.memory_allocated_bytes() - base
    places = dict(zip(tenants, ("host", "gone", "host"), strict=True))
    residency = Residency(places, lab.folder / "offload")
    _, out_s = timed_once(lambda: house_learner(residency, "actor", learner))
    left = device.memory_allocated_bytes() - base

    def back() -> None:
        with residency.stage("learn_actor", tenants):
            pass

    _, in_s = timed_once(back)
    after = [parameter.detach().cpu() for parameter in model.named_parameters().values()]
    lab.require(all(map(torch.equal, before, after)), "weights come back bit for bit")
    returned = device.memory_allocated_bytes() - base
    words = f"on the device {held / GIB:.2f} GiB, {left / GIB:.2f} while offloaded ({out_s:.2f} s), "
    words += f"{returned / GIB:.2f} when back"
    if device.is_host():
        lab.say(f"{words} ({in_s:.2f} s); without a GPU both are one memory")
    else:
        lab.require(left < 0.05 * held, f"{words} ({in_s:.2f} s)")
    assert learner.update([part_of(batch)]).applied, "it does not go on learning"
    residency.close()


def timed_once(work: Callable):
    """(what it gave, seconds)."""
    from megarlhf import device

    start = time.perf_counter()
    found = work()
    device.synchronize()
    return found, time.perf_counter() - start


def ppo(lab: Lab) -> None:
    """One step of PPO with actor, critic, reference and reward model of 1B, all in blockwise FP8."""
    import torch.distributed as dist

    from megarlhf.config.algorithms import PPO
    from megarlhf.config.precision import FP8
    from megarlhf.config.settings import Actor, Critic, Data, PPORun, Reward, Rollout, Run
    from megarlhf.loop.launch import run_training

    size, run, fp8 = lab.big, lab.folder / "ppo", {"layers": "te", "fp8": FP8("blockwise")}
    prompts = [{"prompt": "".join(chr(97 + (row + place) % 26) for place in range(8))} for row in range(size.rows)]
    (lab.folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    settings = PPORun(
        actor=Actor(model=str(lab.model_folder(size)), dtype="bfloat16", **fp8),
        critic=Critic(dtype="bfloat16", **fp8),
        reward=Reward(model=str(lab.model_folder(size, num_labels=1, seed=2)), dtype="bfloat16", **fp8),
        algorithm=PPO(num_epochs=1),
        rollout=Rollout(batch_size=size.rows, max_new_tokens=min(64, size.new_tokens), max_slots=size.rows),
        data=Data(prompts=str(lab.folder / "prompts.jsonl"), max_prompt_tokens=16),
        run=Run(dir=str(run), steps=1, tensorboard=False),
    )
    said = StringIO()
    with redirect_stdout(said):
        run_training("ppo", settings, dist.get_rank(), dist.get_world_size(), as_json=True)
    (found,) = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("time/total_s", "time/generate_s", "time/learn_actor_s", "time/learn_critic_s", "rollout/logp_gap_max")
    lab.say("one step: " + ", ".join(f"{name} {found[name]:.4g}" for name in names if name in found))
    norms = [found[f"gradient_norm/{name}"] for name in ("actor", "critic")]
    lab.require(all(norm is not None and norm > 0 for norm in norms), f"gradient norms of actor and critic: {norms}")
    lab.require(
        (run / "hf/model.safetensors").exists() or any((run / "hf").glob("*.safetensors")), "the model is exported"
    )


CHECKS: dict[str, tuple[Check, float]] = {
    "environment": (environment, 1),
    "refusal": (refusal, 1),
    "tiny_parity": (tiny_parity, 20),
    "stale": (stale, 8),
    "generation": (generation, 10),
    "ppo": (ppo, 45),
    "offload": (offload, 30),
    "big_parity": (big_parity, 45),
    "speed": (speed, 45),
}
"""In this order, with the seconds that one is not begun without."""
