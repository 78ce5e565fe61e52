"""What the commands that put model folders to work share: checks, launch, model, sampling, the file of results."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from megarlhf import launcher
from megarlhf.config.answers import Answers
from megarlhf.config.layout import Layout
from megarlhf.config.load import load
from megarlhf.config.settings import Data, Precision
from megarlhf.data.files import HUB
from megarlhf.errors import CheckpointError, ConfigError, DataError, MegarlhfError
from megarlhf.telemetry.progress import CountProgress

if TYPE_CHECKING:  # megatron-core may be imported only once the device is prepared
    import torch.distributed as dist

    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.engines.generator import Request, Sampling
    from megarlhf.models.build import Model
    from megarlhf.models.names import Head
    from megarlhf.records.prompts import Prompt

Settings = TypeVar("Settings", bound=Answers)
Given = TypeVar("Given")


@dataclass(frozen=True)
class Summary:
    """What a command did, for people and for programs."""

    sentence: str
    numbers: Mapping[str, Any]
    """Plain values; None for what is no number."""

    def text(self, as_json: bool) -> str:
        """One line."""
        return json.dumps(dict(self.numbers)) if as_json else self.sentence


def told(left_out: Mapping[str, int]) -> tuple[str, dict[str, int]]:
    """What was left out (counts by reason, such as `cut_answers`), in words and as numbers of a summary."""
    words = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in left_out.items() if count)
    return f"left out: {words or 'nothing'}", {f"num_{reason}": count for reason, count in left_out.items()}


def launch(
    command: str,
    cls: type[Settings],
    check: Callable[[str, Settings, int], None],
    work: Callable[[str, Settings, int, int], Summary],
    argv: Sequence[str],
) -> int:
    """Runs `megarlhf COMMAND MODEL_DIR [--flags]` on every rank of the launch; returns the exit code.

    `check(model, settings, world_size)` raises ConfigError before a rank is joined; `work(model, settings, rank,
    world_size)` is collective over the world.
    """
    model, settings, store = agreed(command, cls, check, argv)
    from megarlhf import device

    rank, world_size = device.join_world(store=store)
    progress(settings, rank, world_size).say(f"{command}: loading {model}")
    summary = work(model, settings, rank, world_size)
    if rank == 0:
        print(summary.text(settings.json))
    device.leave_world()
    return 0


def agreed(
    command: str, cls: type[Given], check: Callable[[str, Given, int], None], argv: Sequence[str]
) -> tuple[str, Given, "dist.Store"]:
    """The model folder and settings of a command, which no rank finds wrong, and the store where the ranks met.

    Collective. Raises ConfigError; a single process raises what was raised.
    """
    words = list(argv)
    model = words.pop(0) if words and not words[0].startswith("-") else ""
    world_size = launcher.place()[1]
    try:
        settings = load(cls, None, words, prog=f"megarlhf {command} MODEL_DIR")
        from megarlhf import device

        device.prepare()
        check(model, settings, world_size)
    except MegarlhfError as problem:
        if world_size > 1:
            from megarlhf.loop.agreement import start_together

            start_together(str(problem).splitlines())
        raise
    from megarlhf.loop.agreement import start_together

    return model, settings, start_together([])


def answers_violations(command: str, model: str, settings: Answers, world_size: int) -> list[str]:
    """Everything about the model folder and the shared settings that can be known to be wrong from here."""
    violations = [] if model else [f"MODEL_DIR: not given; name the model's folder: megarlhf {command} MODEL_DIR ..."]
    violations += [f"--{name}: not given; name a JSONL file" for name in ("prompts", "out") if not vars(settings)[name]]
    violations += _file_violations(settings)
    for name in ("samples_per_prompt", "max_slots", "tp", "pp"):
        if vars(settings)[name] < 1:
            violations.append(f"--{name} {vars(settings)[name]}: use 1 or more")
    try:
        sampling(settings, ())
    except ConfigError as error:
        violations += [f"--{violation}" for violation in error.violations]
    if settings.tp > 0 and settings.pp > 0:
        violations += launch_violations(command, settings.tp, settings.pp, world_size)
        if model:
            violations += policy_violations("MODEL_DIR", model, settings, settings.base)
    return violations


def policy_violations(setting: str, folder: str, settings: Answers, base: str = "") -> list[str]:
    """Why the folder given as `setting` cannot be sampled from as the settings say: its model, or its tokenizer."""
    found = model_violations(setting, folder, settings.tp, settings.pp, base)
    return found or tokenizer_violations(setting, folder, base, settings.stop_tokens)


def tokenizer_violations(setting: str, folder: str, base: str = "", stop_tokens: Sequence[str] = ()) -> list[str]:
    """Why the folder given as `setting` holds no tokenizer that knows --stop_tokens, or none on this machine."""
    try:
        load_tokenizer(folder, base, stop_tokens)
    except ConfigError as error:
        return list(error.violations)
    except CheckpointError as error:
        return [f"{setting}: {error}"]
    return []


def _file_violations(settings: Answers) -> list[str]:
    """What would be found out only once the weights are read, or all answers sampled."""
    found, prompts, out = [], settings.prompts, Path(settings.out).absolute()
    if prompts and not prompts.startswith(HUB) and not Path(prompts).exists():
        found.append(f"--prompts: {Path(prompts).absolute()} does not exist; name a JSONL file")
    if settings.out and not out.parent.is_dir():
        found.append(f"--out: folder {out.parent} does not exist; make it first")
    if settings.out and out.is_dir():
        found.append(f"--out: {out} is a folder; name a file")
    return found


def launch_violations(command: str, tp: int, pp: int, world_size: int) -> list[str]:
    """A sentence when copies of tp * pp ranks do not fill the launched world."""
    ranks = tp * pp
    if world_size % ranks == 0:
        return []
    return [
        f"--tp {tp} --pp {pp}: needs {ranks} ranks or a multiple, and there are {world_size}; "
        f"launch with torchrun --nproc-per-node {ranks} -m megarlhf {command} ..."
    ]


def model_violations(setting: str, folder: str, tp: int, pp: int, base: str = "") -> list[str]:
    """Why the folder given as `setting` does not hold a language model that can be cut into tp and pp.

    It may hold LoRA adapters of a model, which `base` names where their own config does not.
    """
    from megarlhf.models.architecture import Architecture, layout_violations
    from megarlhf.weights.adapters import peft_folder

    try:
        adapted = peft_folder(folder, base)
        if base and not adapted:
            return [f"--base: {folder} holds no LoRA adapters (adapter_config.json) that would need one; leave it out"]
        architecture = Architecture.from_folder(adapted.base if adapted else folder)
    except (ConfigError, CheckpointError) as error:
        return [f"{setting}: {error}"]
    if architecture.num_labels:
        return [f"{setting}: {folder} has a score head, which writes nothing; give a language model"]
    return layout_violations(architecture, Layout(tp=tp, pp=pp), setting)


def principles_violations(path: str, count_name: str, count: int) -> list[str]:
    """What is wrong with --principles `path`, and with drawing `count` (given as --`count_name`) of them."""
    from megarlhf.data.principles import read_principles

    try:
        num_principles = len(read_principles(path, "--principles"))
    except DataError as error:
        return [str(error)]
    if 1 <= count <= num_principles:
        return []
    return [f"--{count_name} {count}: use 1 to {num_principles}, the number of principles"]


def load_tokenizer(folder: str, base: str = "", stop_tokens: Sequence[str] = ()) -> "Tokenizer":
    """The folder's tokenizer; of a folder of LoRA adapters, that of the model they are for (`base`, or as they say)."""
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.weights.adapters import peft_folder

    adapted = peft_folder(folder, base)
    return Tokenizer(adapted.base if adapted else folder, stop_tokens, setting="--stop_tokens")


def load_model(
    folder: str, tp: int, pp: int, dtype: Precision, world_size: int, head: "Head" = "vocabulary", base: str = ""
) -> "Model":
    """The model with its weights, tp * pp ranks a copy. Collective over the world.

    LoRA adapters in `folder` are merged into the weights of their model (`base`, or the one that they name).
    """
    import torch

    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora, merge_adapters
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.adapters import load_peft, peft_folder
    from megarlhf.weights.load import load_weights

    adapted = peft_folder(folder, base)
    whole = adapted.base if adapted else folder

    groups = build_groups(Layout(tp=tp, pp=pp), world_size)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    model = build_model(Architecture.from_folder(whole), groups, head=head, dtype=kind, seed=None)
    load_weights(model, whole)
    if adapted:
        add_lora(model, adapted.lora)
        load_peft(model, adapted.path, adapted.lora)
        merge_adapters(model)
    return model


def progress(settings: Answers, rank: int, world_size: int) -> CountProgress:
    """Tells on the first rank, on standard error, how many responses are sampled: its own where several share them."""
    copies = world_size // (settings.tp * settings.pp)
    shared = f" of this rank, one of {copies} that sample" if copies > 1 else ""
    return CountProgress("responses" + shared, sys.stderr if rank == 0 else None)


def prompts_of(settings: Answers, tokenizer: "Tokenizer") -> list["Prompt"]:
    """The prompts of the file. How long they may be is left to the generator, which knows the model's limit.

    Collective over the world. Raises DataError on all ranks when one of them cannot read its file.
    """
    import torch.distributed as dist

    from megarlhf.data.prompts import read_prompts
    from megarlhf.weights.agree import raise_together

    found, problem = [], None
    try:
        found = read_prompts(settings.prompts, tokenizer, Data(prompts=settings.prompts, max_prompt_tokens=2**31))
    except DataError as error:
        problem = str(error)
    raise_together(problem, dist.group.WORLD, DataError)
    return found


def requests_for(prompts: Sequence["Prompt"], num_samples: int) -> list["Request"]:
    """`num_samples` requests for each prompt, siblings next to each other."""
    from megarlhf.engines.generator import Request

    return [Request(prompt.token_ids, prompt.row_id, sample) for prompt in prompts for sample in range(num_samples)]


def sampling(settings: Answers, stop_ids: tuple[int, ...], step: int = 0) -> "Sampling":
    """How answers are sampled; each `step` of a command has noise of its own. Raises ConfigError."""
    from megarlhf.engines.generator.requests import Sampling

    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        top_p=settings.top_p,
        max_new_tokens=settings.max_new_tokens,
        min_new_tokens=settings.min_new_tokens,
        stop_ids=stop_ids,
        seed=settings.seed,
        step=step,
    )


def write_rows(path: str | Path, rows: Sequence[Mapping]) -> None:
    """JSON lines, which appear under their name only when they are whole."""
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    part.replace(path)
