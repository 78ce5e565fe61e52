"""From words on a command line to a plan on the terminal: `megarlhf plan`, and `--dry-run` of training commands."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megarlhf.config.check import ranks_needed
from megarlhf.config.check import violations as setting_violations
from megarlhf.config.command import command_of, load_for
from megarlhf.config.flags import spelled
from megarlhf.config.load import files_and_flags
from megarlhf.config.runs import COMMANDS, AnyRun
from megarlhf.errors import ConfigError
from megarlhf.loop.planner import report
from megarlhf.loop.planner.gpus import GPUS, gpu_named
from megarlhf.loop.planner.plan import RESERVE_GIB, Plan, Question, make_plan
from megarlhf.loop.planner.scale import as_dicts, scale, scale_text
from megarlhf.loop.planner.search import search, search_text
from megarlhf.telemetry.status import BAD_INPUT, DONE, FAILED

FLAGS = {
    "--ranks": "ranks to plan for (default: the fewest that hold whole copies of all models)",
    "--gpu": f"kind of GPU, one of {', '.join(GPUS)} (default h100)",
    "--memory-gib": "memory of a rank (default: the GPU's)",
    "--reserve-gib": f"what is kept free of it (default {RESERVE_GIB:g}; 0 for cpu)",
    "--scale": "numbers of ranks, as 8,64,512: the times of a step on each, whose recipe is for --ranks",
    "--architectures": "folder of NAME.json files for models that are not here (default: the nearest architectures/)",
}
SWITCHES = {
    "--search": "rank other layouts that fit",
    "--reshard": "all about moving the actor's weights to the generation layout, rank by rank, validated",
    "--links": "with --reshard: bytes of every pair of ranks",
    "--json": "plain values instead of text",
}


@dataclass(frozen=True)
class Options:
    """What was asked of the planner, beside the settings."""

    values: dict[str, str]
    switches: frozenset[str]

    def number(self, flag: str, default: float, least: float) -> float:
        """A flag's number. Raises ConfigError."""
        text = self.values.get(flag, str(default))
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not least <= value < float("inf"):
            raise ConfigError(f"{flag} {text}: give a number of at least {least:g}")
        return value

    def numbers(self, flag: str) -> list[int]:
        """A flag's whole numbers. Raises ConfigError."""
        parts = self.values[flag].split(",")
        if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
            raise ConfigError(
                f"{flag} {self.values[flag]}: give whole numbers of ranks with commas between, as 8,64,512"
            )
        return [int(part) for part in parts]


def take_options(argv: Sequence[str]) -> tuple[Options, list[str]]:
    """The planner's flags, and the other words, which are settings. Raises ConfigError for a flag without its value."""
    values, switches, others, words = {}, set(), [], spelled(argv, FLAGS | SWITCHES)
    while words:
        flag, _, value = words.pop(0).partition("=")
        if flag in SWITCHES and not value:
            switches.add(flag)
        elif flag in FLAGS:
            if not value and (not words or words[0].startswith("--")):
                raise ConfigError(f"{flag}: expected a value: {FLAGS[flag]}")
            values[flag] = value or words.pop(0)
        else:
            others.append(f"{flag}={value}" if value else flag)
    return Options(values, frozenset(switches)), others


def usage() -> str:
    """The help of `megarlhf plan`."""
    width = max(map(len, (*FLAGS, *SWITCHES)))
    lines = [f"  {flag:{width}}  {words}" for flag, words in (FLAGS | SWITCHES).items()]
    return "\n".join(
        [
            "usage: megarlhf plan [COMMAND] FILE.yaml [--flags] [--dotted.settings]",
            "",
            *lines,
            "",
            "COMMAND is the training command that FILE.yaml is for; needed where several would take the file.",
            "Exit codes: 0 fits, 1 does not fit, 2 the settings break a rule.",
        ]
    )


def plan_command(argv: Sequence[str]) -> int:
    """`megarlhf plan ...`: prints the plan and returns the exit code. Raises ConfigError."""
    options, words = take_options(argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return DONE if words else BAD_INPUT
    command = words.pop(0) if words[0] in COMMANDS else command_of(words, "plan")
    return dry_run(command, words, options)


def dry_run(command: str, words: Sequence[str], options: Options, world_size: int = 1) -> int:
    """Prints the plan of a training command; `world_size` is that of the launch. Raises ConfigError."""
    files, _ = files_and_flags(words)
    settings, wrong = load_for(command, words, f"megarlhf {command}", FLAGS | SWITCHES)
    if wrong:
        raise ConfigError(wrong)
    question = question_of(command, settings, options, next(iter(files), None), world_size)
    if "--search" in options.switches:
        found = search(question)
        print(json.dumps(found.as_dict(), indent=1) if "--json" in options.switches else search_text(found))
        return DONE if found.choices else FAILED
    if "--scale" in options.values:
        points = scale(question, options.numbers("--scale"))
        print(json.dumps(as_dicts(points), indent=1) if "--json" in options.switches else scale_text(points))
        return DONE if any(point.parts for point in points) else FAILED
    plan = make_plan(question)
    print(_shown(plan, options))
    if plan.violations:
        return BAD_INPUT
    return DONE if plan.fits else FAILED


def question_of(command: str, settings: AnyRun, options: Options, file: str | None, world_size: int = 1) -> Question:
    """What is asked, with the defaults filled in. Raises ConfigError."""
    gpu = gpu_named(options.values.get("--gpu", "h100"))
    ranks = options.number("--ranks", world_size, least=1)
    if "--ranks" not in options.values and world_size == 1 and not setting_violations(settings):
        ranks = ranks_needed(settings)
    if ranks != int(ranks):
        raise ConfigError(f"--ranks {ranks}: give a whole number")
    return Question(
        command=command,
        settings=settings,
        world_size=int(ranks),
        gpu=gpu,
        memory_gib=options.number("--memory-gib", gpu.memory_gib, least=0.001),
        architectures=Path(options.values.get("--architectures", architectures_of(file))),
        reserve_gib=options.number("--reserve-gib", 0 if gpu.name == "cpu" else RESERVE_GIB, least=0),
        validate="--reshard" in options.switches,
    )


def architectures_of(file: str | None) -> Path:
    """The folder `architectures` that is nearest to a recipe: beside it, or beside a folder above it."""
    beside = (Path(file).parent if file else Path()) / "architectures"
    above = (folder / "architectures" for folder in beside.absolute().parent.parents)
    return beside if beside.is_dir() else next((folder for folder in above if folder.is_dir()), beside)


def _shown(plan: Plan, options: Options) -> str:
    as_json, is_reshard = "--json" in options.switches, "--reshard" in options.switches
    if not is_reshard or plan.violations:
        return json.dumps(report.as_dict(plan), indent=1) if as_json else report.text(plan)
    if plan.reshard is None:
        raise ConfigError(
            f"--reshard: megarlhf {plan.question.command} moves no weights between layouts with these settings"
        )
    if as_json:
        return json.dumps(report.reshard_dict(plan.reshard), indent=1)
    parts = [report.reshard_text(plan.reshard, plan.question.gpu.gpus_per_node)]
    return "\n\n".join([*parts, report.links_text(plan.reshard)] if "--links" in options.switches else parts)
