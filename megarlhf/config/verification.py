"""What `megarlhf verify-layout` is asked: which layouts, how long the micro-batches, and how much may differ."""

import re
from dataclasses import dataclass

from megarlhf.config.layout import Layout

_PART = re.compile(r"(tp|pp|cp|ep|vp|dp|first|last)(\d+)|(sp)")


@dataclass(frozen=True)
class Verification:
    """Flags of `megarlhf verify-layout`; all others are settings of the recipe."""

    layouts: str = ""
    """Layouts by comma, sizes joined by +: tp2,tp2+sp,pp2+vp2,pp2+first1,dp2; empty: the recipe's own, and dp2."""
    micro_batch_tokens: str = ""
    """Sizes of micro-batches by comma, each tried with every layout; empty: the recipe's actor.micro_batch_tokens."""
    prompts: int = 4
    """Prompts (or rows of the data set) that the batch is made of."""
    new_tokens: int = 24
    """A sampled response is cut here, or at rollout.max_new_tokens if that is less."""
    score_tolerance: float = 1e-4
    """Largest difference of a log-prob, in nats, or of a value."""
    loss_tolerance: float = 1e-5
    """Largest difference of the loss, relative to the larger of 1 and the loss."""
    gradient_tolerance: float = 1e-5
    """Largest difference of the gradient norm, and norm of the difference of each gradient, relative to the norm."""
    weight_tolerance: float = 0.02
    """Largest root mean square difference of an updated weight, in learning rates (Adam's first step is about one)."""


@dataclass(frozen=True)
class Case:
    """One way to compute the batch: a layout on `num_ranks` ranks, with micro-batches of this many tokens."""

    name: str
    layout: Layout
    num_ranks: int
    micro_batch_tokens: int


def one_process() -> Case:
    """What all others are compared with: a single rank, a row at a time, so that nothing is packed either."""
    return Case("one process, row by row", Layout(), 1, 1)


def cases(options: Verification, own: dict[str, Layout], micro_batch_tokens: int) -> tuple[list[Case], list[str]]:
    """What is to be compared, fewest ranks first, and what is wrong with the flags. `own`: the recipe's layouts."""
    violations = _range_violations(options)
    layouts: dict[str, tuple[Layout, int]] = {"one process": (Layout(), 1)}
    if options.layouts:
        for word in options.layouts.replace(" ", "").split(","):
            parsed = parse_layout(word)
            if parsed is None:
                violations.append(
                    f"--layouts: {word!r} is no layout; join sizes by +, as in tp2, tp2+sp, pp2+vp2, pp2+dp2, cp2"
                )
            else:
                layouts[word] = parsed
    else:
        layouts |= {f"{layout}": (layout, layout.model_ranks) for layout in own.values()} | {"dp2": (Layout(), 2)}
    sizes = options.micro_batch_tokens.replace(" ", "").split(",") if options.micro_batch_tokens else []
    wrong = [size for size in sizes if not size.isdigit() or int(size) < 1]
    violations += [f"--micro_batch_tokens: {size!r} is not a whole number above 0; as in 64,4096" for size in wrong]
    tokens = [int(size) for size in sizes if size not in wrong] or [micro_batch_tokens]
    found = [Case(name, layout, ranks, size) for name, (layout, ranks) in layouts.items() for size in tokens]
    return sorted(dict.fromkeys(found), key=lambda case: case.num_ranks), violations


def parse_layout(word: str) -> tuple[Layout, int] | None:
    """`tp2+pp2+sp+dp2` as a layout and its number of ranks; None when it is not one."""
    sizes: dict[str, int] = {}
    for part in word.split("+"):
        # Also as a layout prints itself, tp2pp2.
        if not part or _PART.sub("", part):
            return None
        sizes |= {name or "sp": int(size or 1) for name, size, _ in _PART.findall(part)}
    if min(sizes.values(), default=1) < 1:
        return None
    dp, sp = sizes.pop("dp", 1), bool(sizes.pop("sp", 0))
    first, last = sizes.pop("first", 0), sizes.pop("last", 0)
    layout = Layout(sp=sp, first_stage_layers=first, last_stage_layers=last, **sizes)
    return layout, layout.model_ranks * max(dp, layout.ep)


def _range_violations(options: Verification) -> list[str]:
    counts = {name: vars(options)[name] for name in ("prompts", "new_tokens")}
    found = [f"--{name}: {value} is out of range; choose 1 or more" for name, value in counts.items() if value < 1]
    tolerances = {name: value for name, value in vars(options).items() if name.endswith("_tolerance")}
    return found + [
        f"--{name}: {value} is out of range; choose 0 or more" for name, value in tolerances.items() if value < 0
    ]
