"""The table of the recipes for GPUs in examples/README.md: what each one's plan says, from config.json numbers alone.

    python examples/recipes/table.py            prints it
    python examples/recipes/table.py --write    puts it into examples/README.md

A recipe's own comment says how it is launched: that is where command and number of GPUs come from.
"""

import re
import sys
from pathlib import Path

from megarlhf.config.load import load
from megarlhf.config.runs import COMMANDS
from megarlhf.loop.planner.gpus import gpu_named
from megarlhf.loop.planner.plan import GIB, Plan, Question, make_plan, total_seconds

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
MARKS = "<!-- recipes: made by recipes/table.py -->", "<!-- end of recipes -->"
MEMORY_GIB = 79.6
"""What vendors call 80 GB, which all recipes fit."""
HEAD = ("recipe", "GPUs", "training", "sampling", "sample", "score", "learn", "host", "step")


def recipes() -> list[Path]:
    """Every recipe, models in the order of their names."""
    return sorted(HERE.glob("*/*.yaml"))


def launch(recipe: Path) -> tuple[str, int]:
    """(command, ranks) of a recipe's own launch line."""
    text = recipe.read_text().replace("\\\n#", "")
    place = re.escape(recipe.relative_to(HERE.parents[1]).as_posix())
    ((nodes, ranks, command),) = re.findall(
        rf"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+) .*-m megarlhf (\S+) {place}$", text, re.MULTILINE
    )
    return command, int(nodes or 1) * int(ranks)


def planned(recipe: Path) -> Plan:
    """The plan of a recipe on its GPUs: H100s, where its comment does not name B200s."""
    command, ranks = launch(recipe)
    kind = "b200" if "(B200" in recipe.read_text() else "h100"
    return make_plan(
        Question(
            command=command,
            settings=load(COMMANDS[command], recipe, []),
            world_size=ranks,
            gpu=gpu_named(kind),
            memory_gib=MEMORY_GIB,
            architectures=HERE.parent / "architectures",
            follow_reshard=False,
        )
    )


def row(recipe: Path, plan: Plan) -> tuple[str, ...]:
    """A recipe's line; memory in GiB of the fullest GPU, or on the host of the fullest node."""
    fullest = {"generate": 0.0, "score": 0.0, "learn": 0.0}
    for stage in plan.stages:
        kind = stage.name if stage.name in fullest else "learn" if stage.name.startswith("learn_") else "score"
        kind = "generate" if stage.name == "reshard" else kind
        fullest[kind] = max(fullest[kind], stage.device / GIB)
    models, world = plan.cast.models, plan.question.world_size
    layouts = {name: f"{model.layout} dp{model.layout.dp(world)}" for name, model in models.items()}
    trained = list(dict.fromkeys(layouts[name] for name, model in models.items() if model.is_trained))
    place = recipe.relative_to(HERE)
    return (
        f"[{place.with_suffix('')}](recipes/{place})",
        str(world),
        "; critic ".join(trained),
        layouts.get("generator", ""),
        *(f"{size:.0f}" if size else "" for size in fullest.values()),
        f"{plan.host_node_bytes / GIB:.0f}",
        str(total_seconds(plan.seconds)).partition(" (")[0],
    )


def table() -> str:
    """The whole table, in Markdown."""
    rows = [HEAD, ("---",) * len(HEAD), *(row(recipe, planned(recipe)) for recipe in recipes())]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def main() -> None:
    """Prints the table, or writes it between its marks."""
    found = table()
    if sys.argv[1:] != ["--write"]:
        print(found)
        return
    first, last = MARKS
    before, _, rest = README.read_text().partition(first)
    README.write_text(f"{before}{first}\n{found}\n{last}{rest.partition(last)[2]}")


if __name__ == "__main__":
    main()
