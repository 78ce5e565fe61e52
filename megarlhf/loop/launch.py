"""What every training command does: settings, preflight, joining the world, building, training, exporting."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from megarlhf import launcher
from megarlhf.checkpoints.lock import is_held, locked
from megarlhf.config.check import warnings
from megarlhf.config.command import OWN_FLAGS, how_to_call, load_for, no_recipe
from megarlhf.config.filled import filled
from megarlhf.config.flags import spelled
from megarlhf.config.load import to_yaml
from megarlhf.config.runs import AnyRun, OnlineRun
from megarlhf.errors import ConfigError, Requeue
from megarlhf.loop.first_look import first_look
from megarlhf.telemetry.status import BAD_INPUT, recorded, try_write_status

if TYPE_CHECKING:
    import torch.distributed as dist

    from megarlhf.loop.stopping import Stopping

Follow = Callable[[Callable[[], tuple[str, float]]], None]

_log = logging.getLogger(__name__)


def launch(command: str, argv: Sequence[str]) -> int:
    """Runs a training command on every rank of the launch; returns the exit code. Raises ConfigError.

    With --dry-run nothing is loaded, joined or written: the plan of the run is printed instead (see `planner`). --json
    prints metrics as JSON lines; --profile profiles the second step.
    """
    argv = spelled(argv, OWN_FLAGS)
    if "--dry-run" in argv:
        return _dry_run(command, [word for word in argv if word != "--dry-run"])
    as_json, argv = "--json" in argv, [word for word in argv if word != "--json"]
    if "--profile" in argv:
        argv = [word for word in argv if word != "--profile"] + ["--run.profile", "2"]
    settings, store = _agreed(command, argv)
    folder = Path(settings.run.dir)
    from megarlhf import device
    from megarlhf.loop.stopping import Stopping
    from megarlhf.loop.watch import Watch

    stopping = Stopping()
    stopping.listen()
    rank, world_size = device.join_world(store=store)
    limit_s = 60 * settings.run.stage_timeout_minutes
    has_lock = Event()

    def told(code: int, why: str) -> None:
        if has_lock.is_set() or not is_held(folder):
            try_write_status(folder, code, why)

    watch = Watch(device.side_store(), rank, world_size, limit_s, told)
    watch.start()
    try:
        run_training(
            command,
            settings,
            rank,
            world_size,
            as_json=as_json,
            stopping=stopping,
            follow=watch.follow,
            locked_in=has_lock.set,
        )
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
    if not argv:
        raise ConfigError(no_recipe(command))
    if "-h" in argv or "--help" in argv:
        print(how_to_call(command))
    settings, found = _looked_at(command, argv)
    folder, world_size = Path(settings.run.dir) if settings is not None else None, launcher.place()[1]
    if world_size == 1:
        _refuse(folder, found)
    from megarlhf.loop.agreement import start_together

    if not found and settings is not None:
        found = _prepared(settings, world_size, " ".join([command, *argv]))
    if world_size == 1:
        _refuse(folder, found)
    try:
        store = start_together(found)
    except ConfigError as problem:
        _refuse(folder, problem.violations)
        raise
    assert settings is not None, "settings that cannot be read are refused"
    return settings, store


def _looked_at(command: str, argv: Sequence[str]) -> tuple[AnyRun | None, list[str]]:
    """The settings (None when they cannot be read), and what they and config.json files say against a start.

    Needs no torch, so that a mistyped setting is told within a second.
    """
    try:
        settings, found = load_for(command, argv, f"megarlhf {command}", OWN_FLAGS)
    except ConfigError as problem:
        return None, list(problem.violations)
    return settings, found or first_look(settings, launcher.place()[1], " ".join([command, *argv]))


def _prepared(settings: AnyRun, world_size: int, command: str) -> list[str]:
    """Prepares this process; what is wrong with it, with tokenizers, folders, disks and reward functions."""
    from megarlhf import device

    try:
        device.prepare()
    except ConfigError as problem:
        return list(problem.violations)
    from megarlhf.loop.preflight import machine_violations, preflight

    return preflight(settings, world_size, command) + machine_violations(settings)


def _dry_run(command: str, argv: Sequence[str]) -> int:
    """Prints the plan on the first rank; `--ranks N` plans for another number than was launched."""
    from megarlhf.loop.planner.command import dry_run, take_options

    options, words = take_options(argv)
    rank, world_size = launcher.place()
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
    locked_in: Callable[[], None] = lambda: None,
) -> None:
    """Trains, reports and exports. Collective over the world, which is joined; `settings` passed `preflight`.

    `as_json`: nothing but the metrics of each step as a JSON line is printed. `stopping` knows of signals, when the
    process is all the run's; `follow` takes a function that says which stage the run is in; `locked_in` is called once
    the run folder is this run's.
    """
    import torch.distributed as dist

    from megarlhf.algorithms.catalogue import ALGORITHMS
    from megarlhf.loop.agreement import require_agreement
    from megarlhf.loop.keeper import Keeper
    from megarlhf.loop.loop import train
    from megarlhf.loop.offline import build_offline
    from megarlhf.loop.online import build_online
    from megarlhf.loop.reporting import reporter
    from megarlhf.loop.resuming import find_start
    from megarlhf.loop.showcase import ending, show, write_shown
    from megarlhf.loop.stopping import Stopping

    settings = filled(settings)
    folder, algorithm, world = Path(settings.run.dir), ALGORITHMS[command], dist.group.WORLD
    is_online = isinstance(settings, OnlineRun)
    stopping = stopping or Stopping()
    stopping.limit_s = 60 * settings.run.save_before_minutes
    with locked(folder, world), recorded(folder, rank):
        locked_in()
        require_agreement(settings, world)
        start = find_start(settings, world)
        if rank == 0:
            (folder / "config.yaml").write_text(to_yaml(settings), encoding="utf-8")
            for warning in warnings(settings):
                _log.warning(warning)
        with reporter(settings, rank, as_json=as_json, keep_steps=start.step if start else 0) as report:
            if isinstance(settings, OnlineRun):
                run = build_online(settings, algorithm, world_size, report)
            else:
                run = build_offline(settings, algorithm, world_size, report)
            follow(run.spans.current)
            keeper = Keeper(run, stopping)
            first_step = keeper.restore(start) if start else 0
            if is_online and not keeper.before:
                keeper.before = show(run)
            keeper.expect_capsule(start.folder if start else None)
            train(run, first_step, keeper.after_step)
            after = show(run) if is_online else []
            if rank == 0 and after:
                write_shown(folder, run.num_steps, keeper.before, after)
            run.export()
            run.residency.close()
    if rank == 0 and not as_json:
        print(ending(keeper.before, after, folder, run.memory, is_policy=algorithm.actor_loss is not None))


def _refuse(folder: Path | None, violations: Sequence[str]) -> None:
    """Raises ConfigError when something is wrong.

    status.json tells a launcher of several ranks why; a folder that holds a run, or is held by one, keeps the status of
    that run. `folder` is None where the settings could not be read.
    """
    if not violations:
        return
    if folder is not None and not (folder / "metrics.jsonl").exists() and not is_held(folder):
        try_write_status(folder, BAD_INPUT, "\n".join(violations))
    raise ConfigError(violations)
