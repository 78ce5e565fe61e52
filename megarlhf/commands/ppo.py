"""`megarlhf ppo`: proximal policy optimisation with a critic, a reference and a reward model or reward functions."""

from collections.abc import Sequence
from pathlib import Path

from megarlhf.config.load import load_command, to_yaml
from megarlhf.config.settings import PPORun
from megarlhf.errors import ConfigError
from megarlhf.telemetry.status import BAD_INPUT, recorded, write_status

SUMMARY = "train a policy with PPO: megarlhf ppo FILE.yaml [--dotted.flags]"


def main(argv: Sequence[str]) -> int:
    """Runs the command on every rank of the launch; returns the exit code."""
    settings = load_command(PPORun, argv, prog="megarlhf ppo")
    from megarlhf import device

    world_size = device.launched_world_size()
    device.prepare()
    from megarlhf.loop.preflight import preflight

    violations = preflight(settings, world_size, " ".join(["ppo", *argv]))
    if violations:
        _record_refusal(Path(settings.run.dir), violations)
        raise ConfigError(violations)
    rank, world_size = device.join_world()
    run_ppo(settings, rank, world_size)
    device.leave_world()
    return 0


def _record_refusal(folder: Path, violations: list[str]) -> None:
    """status.json tells a launcher of several ranks why; a folder that holds a run keeps the status of that run."""
    if not (folder / "metrics.jsonl").exists() and not folder.is_file():
        write_status(folder, BAD_INPUT, "\n".join(violations))


def run_ppo(settings: PPORun, rank: int, world_size: int) -> None:
    """Trains, reports and exports. Collective over the world, which is joined; `settings` passed `preflight`."""
    from megarlhf.loop.build import build_run
    from megarlhf.loop.loop import train
    from megarlhf.loop.reporting import reporter
    from megarlhf.loop.showcase import compare, show

    folder = Path(settings.run.dir)
    with recorded(folder, rank), reporter(settings, rank) as report:
        if rank == 0:
            (folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
        run = build_run(settings, world_size, report)
        before = show(run)
        train(run)
        after = show(run)
        run.export()
    if rank == 0:
        print(compare(before, after, folder))
