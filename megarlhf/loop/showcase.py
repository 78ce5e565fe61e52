"""The same few prompts before and after training, with the same sampling noise: what changed, in texts and scores."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarlhf.loop.run import Run, sample_rows
from megarlhf.records.prompts import siblings
from megarlhf.residency.accounting import Record, table
from megarlhf.residency.stages import WEIGHTS
from megarlhf.telemetry.jsonl import SHOWN_NAME

SHOWN_STEP = -1
"""Step whose noise the shown texts are sampled with; training steps count from 0."""
_FILES = (
    *("config.yaml", "metrics.jsonl", "samples.jsonl", "memory.jsonl", SHOWN_NAME, "status.json", "tensorboard/"),
    *("wandb/", "profile/", "checkpoints/", "capsules/", "exports/"),
)
_EXPORTS = {
    "hf": ("exported model:", "a Hugging Face folder"),
    "hf_lora": ("its adapters:", "PEFT's format"),
    "hf_average": ("running average:", "of its weights; a Hugging Face folder"),
    "hf_average_lora": ("its adapters:", "PEFT's format"),
}
"""What a run may leave, in the order in which it is told."""


def show(run: Run) -> list[dict]:
    """`run.sample_texts` responses of the policy as it is now, with scores. Collective over the world."""
    source: Any = run.source  # of an online run: it has prompts, and samples
    prompts = source.prompts[: run.settings.run.sample_texts]
    if not prompts:
        return []
    run.reporter.say(f"sampling {len(prompts)} texts, to show what training changes")
    sampled = source.sample(siblings(prompts, 1), SHOWN_STEP)
    kept = len(run.reported)
    with run.resident("reward", WEIGHTS):
        batch = run.judge.annotate(sampled)
    del run.reported[kept:]  # these scores are not part of any step
    run.residency.take()
    run.spans.drop("generate")  # resharding counts: the next step finds the weights in place
    return sample_rows(batch, batch.num_rows)


def write_shown(folder: Path, step: int, before: list[dict], after: list[dict]) -> None:
    """before_after.jsonl: a line per prompt, for reports. `step`: after which the second text was sampled."""
    lines = [
        json.dumps(
            {
                "step": step,
                "prompt": old["prompt"],
                "before": old["response"],
                "before_score": old["score"],
                "after": new["response"],
                "after_score": new["score"],
            },
            ensure_ascii=False,
        )
        for old, new in zip(before, after, strict=True)
    ]
    (folder / SHOWN_NAME).write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def ending(before: list[dict], after: list[dict], folder: Path, memory: Sequence[Record], *, is_policy: bool) -> str:
    """What to read when a run has ended, as text: samples, the memory of the last step, where everything is.

    `is_policy`: the exported model generates.
    """
    lines: list[str] = []
    files = ", ".join(name for name in _FILES if (folder / name).exists())
    for old, new in zip(before, after, strict=True):
        lines += ["", f"  {_line(old['prompt'])}"]
        lines += [f"    before {old['score']:+.3f}  {_line(old['response'])}"]
        lines += [f"    after  {new['score']:+.3f}  {_line(new['response'])}"]
    lines += ["", "memory of the last step, over all ranks:", table(memory)] if memory else []
    lines += ["", f"{'run folder:':16} {folder}  ({files})"]
    for name, (what, kind) in _EXPORTS.items():
        lines += [f"{what:16} {folder / name}  ({kind})"] if (folder / name).is_dir() else []
    lines += [f"{'chat with it:':16} megarlhf chat {folder / 'hf'}"] if is_policy else []
    return "\n".join(lines)


def _line(text: str) -> str:
    return " ".join(text.split())
