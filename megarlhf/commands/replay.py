"""`megarlhf replay`: does one step of a run again, under another layout or on a CPU, and compares all of it."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megarlhf.config.flags import divided
from megarlhf.config.load import load, load_leniently
from megarlhf.config.replay import Replay, in_layout, replay_violations, tolerances
from megarlhf.config.runs import COMMANDS
from megarlhf.config.verification import parse_layout
from megarlhf.errors import ConfigError
from megarlhf.telemetry.status import DONE, FAILED

SUMMARY = "do a kept step again and compare it: megarlhf replay RUN_DIR --step N [--layout tp2+pp2] [--flags]"


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns 1 when something differs. Starts the ranks that it needs when no launcher did.

    Raises ConfigError and CheckpointError for what can be known to be wrong beforehand.
    """
    as_json, words = "--json" in argv, [word for word in argv if word != "--json"]
    folder = Path(words.pop(0)) if words and not words[0].startswith("-") else None
    stray, own, others = divided(words, Replay)
    options = load(Replay, None, stray + own, "megarlhf replay RUN_DIR")
    if folder is None:
        raise ConfigError("RUN_DIR: not given; name a run folder: megarlhf replay RUN_DIR --step N")
    if not folder.is_dir():
        raise ConfigError(f"RUN_DIR: {folder}: no such folder; name the folder that a run wrote (its run.dir)")
    from megarlhf import device

    device.prepare()
    from megarlhf.checkpoints.capsule import CONFIG, capsule_folder, read_capsule, what_there_is
    from megarlhf.loop.replay import (
        heading,
        is_everywhere,
        line,
        recorded_ranks,
        replay,
        replay_plan,
        require_whole,
        start_folder,
    )
    from megarlhf.loop.replay import verdict as last_line
    from megarlhf.loop.roles import roles

    if not options.step:
        raise ConfigError(f"--step: not given; {what_there_is(folder)}")
    capsule = read_capsule(folder, options.step)
    require_whole(capsule)
    start, command = start_folder(capsule, folder), capsule.about["command"]
    config = capsule_folder(folder, options.step) / CONFIG
    settings, violations = load_leniently(COMMANDS[command], config, others, "megarlhf replay RUN_DIR")
    if options.layout == "recorded":
        layout, num_ranks = None, recorded_ranks(capsule)
    else:
        layout, num_ranks = parse_layout(options.layout or "tp1") or (None, 0)
    violations += replay_violations(options, num_ranks)
    scratch = tempfile.TemporaryDirectory(prefix="megarlhf-replay-")
    settings = in_layout(settings, layout, scratch.name)
    if num_ranks:
        violations += replay_plan(settings, num_ranks, f"replay {' '.join(argv)}")
        if device.is_launched() and device.launched_world_size() != num_ranks:
            violations.append(f"--layout: needs {num_ranks} ranks, and {device.launched_world_size()} were launched")
    if violations:
        raise ConfigError(violations)
    if num_ranks > 1 and not device.is_launched():
        return device.run_local_ranks(num_ranks, ["replay", *argv])
    rank, world_size = device.join_world()
    if rank == 0 and not as_json:
        print(heading(), flush=True)
    found, allowed = [], tolerances(options, {role.dtype for role in roles(settings).values()})
    for one in replay(capsule, settings, start, world_size, options.skip, allowed):
        found.append(one)
        if rank == 0:
            print(json.dumps(one.numbers) if as_json else line(one), flush=True)
    passed = is_everywhere(found)
    if rank == 0 and not as_json:
        print(last_line(found))
    scratch.cleanup()
    device.leave_world()
    return DONE if passed else FAILED
