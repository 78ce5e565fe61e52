"""What every training command does: settings, preflight, joining the world, building, training, exporting."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megarlhf.config.algorithm_check import algorithm_warnings
from megarlhf.config.filled import filled
from megarlhf.config.load import file_and_flags, load_leniently, to_yaml
from megarlhf.config.runs import COMMANDS, AnyRun, OnlineRun
from megarlhf.errors import ConfigError, PeerError, Requeue
from megarlhf.telemetry.status import BAD_INPUT, recorded, try_write_status

if TYPE_CHECKING:
    import torch.distributed as dist

    from megarlhf.loop.stopping import Stopping

Follow = Callable[[Callable[[], tuple[str, float]]], None]

_MEET_S, _WRONG_MEET_S = 600, 60
"""How long ranks wait for each other before the start; one that cannot start anyway waits less."""

_log = logging.getLogger(__name__)


def launch(command: str, argv: Sequence[str]) -> int:
    """Runs a training command on every rank of the launch; returns the exit code. Raises ConfigError.

    With --dry-run nothing is loaded, joined or written: the plan of the run is printed instead (see `planner`).
    """
    if "--dry-run" in argv or "--dry_run" in argv:
        return _dry_run(command, [word for word in argv if word not in ("--dry-run", "--dry_run")])
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    settings, store = _agreed(command, argv)
    folder = Path(settings.run.dir)
    from megarlhf import device
    from megarlhf.loop.stopping import Stopping
    from megarlhf.loop.watch import Watch

    stopping = Stopping()
    stopping.listen()
    rank, world_size = device.join_world(store=store)
    limit_s = 60 * settings.run.stage_timeout_minutes
    watch = Watch(device.side_store(), rank, world_size, limit_s, lambda code, why: try_write_status(folder, code, why))
    watch.start()
    try:
        run_training(command, settings, rank, world_size, as_json=as_json, stopping=stopping, follow=watch.follow)
    except Requeue:
        watch.stop()
        raise
    except Exception as error:
        cause = watch.failed(error)
        if cause is error:
            raise
        raise cause from error
    watch.stop()
    device.leave_world()
    return 0


def _agreed(command: str, argv: Sequence[str]) -> tuple[AnyRun, "dist.Store"]:
    """The settings, which no rank finds wrong, and the store where the ranks met. Collective. Raises ConfigError.

    What only one rank finds, because a file is missing on its machine, ends all of them with the same report.
    """
    settings, found = None, []
    try:
        settings, found = load_leniently(COMMANDS[command], *file_and_flags(argv), prog=f"megarlhf {command}")
    except ConfigError as problem:
        found = list(problem.violations)
    from megarlhf import device
    from megarlhf.loop.agreement import found_anywhere

    world_size = device.launched_world_size()
    if not found:
        device.prepare()
        from megarlhf.loop.preflight import machine_violations, preflight

        found = preflight(settings, world_size, " ".join([command, *argv])) + machine_violations(settings)
    folder = Path(settings.run.dir) if settings is not None else None
    if found and world_size == 1:
        _refuse(folder, found)
    try:
        rank, world_size, store = device.meet(_WRONG_MEET_S if found else _MEET_S)
        anywhere = found_anywhere(found, store, rank, world_size)
    except (ConfigError, PeerError):
        _refuse(folder, found)  # this rank's own, when the others cannot be asked
        raise
    _refuse(folder, anywhere)
    return settings, store


def _dry_run(command: str, argv: Sequence[str]) -> int:
    """Prints the plan on the first rank; `--ranks N` plans for another number than was launched."""
    from megarlhf.device.world import place_in_world
    from megarlhf.loop.planner.command import dry_run, take_options

    options, words = take_options(argv)
    rank, world_size, _ = place_in_world()
    return dry_run(command, words, options, world_size) if rank == 0 else 0


def run_training(
    command: str,
    settings: AnyRun,
    rank: int,
    world_size: int,
    *,
    as_json: bool = False,
    stopping: "Stopping | None" = None,
    follow: Follow = lambda stage: None,
) -> None:
    """Trains, reports and exports. Collective over the world, which is joined; `settings` passed `preflight`.

    `as_json`: nothing but the metrics of each step as a JSON line is printed. `stopping` knows of signals, when the
    process is all the run's; `follow` takes a function that says which stage the run is in.
    """
    import torch.distributed as dist

    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.checkpoints.lock import locked
    from megarlhf.loop.agreement import require_agreement
    from megarlhf.loop.keeper import Keeper
    from megarlhf.loop.loop import train
    from megarlhf.loop.offline import build_offline
    from megarlhf.loop.online import build_online
    from megarlhf.loop.reporting import reporter
    from megarlhf.loop.resuming import find_start
    from megarlhf.loop.showcase import ending, show
    from megarlhf.loop.stopping import Stopping

    settings = filled(settings)
    folder, algorithm, world = Path(settings.run.dir), ALGORITHMS[command], dist.group.WORLD
    is_online = isinstance(settings, OnlineRun)
    stopping = stopping or Stopping()
    stopping.limit_s = 60 * settings.run.save_before_minutes
    with locked(folder, world), recorded(folder, rank):
        require_agreement(settings, world)
        start = find_start(settings, world)
        if rank == 0:
            (folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
            for warning in algorithm_warnings(settings.algorithm):
                _log.warning(warning)
        with reporter(settings, rank, as_json=as_json, keep_steps=start.step if start else 0) as report:
            build = build_online if is_online else build_offline
            run = build(settings, algorithm, world_size, report)
            follow(run.spans.current)
            keeper = Keeper(run, stopping)
            first_step = keeper.restore(start) if start else 0
            if is_online and not keeper.before:
                keeper.before = show(run)
            keeper.expect_capsule(start.folder if start else None)
            train(run, first_step, keeper.after_step)
            after = show(run) if is_online else []
            run.export()
            run.residency.close()
    if rank == 0 and not as_json:
        print(ending(keeper.before, after, folder, run.memory, is_policy=algorithm.actor_loss is not None))


def _refuse(folder: Path | None, violations: list[str]) -> None:
    """Raises ConfigError when something is wrong.

    status.json tells a launcher of several ranks why; a folder that holds a run keeps the status of that run. `folder`
    is None where the settings could not be read.
    """
    if not violations:
        return
    if folder is not None and not (folder / "metrics.jsonl").exists():
        try_write_status(folder, BAD_INPUT, "\n".join(violations))
    raise ConfigError(violations)
