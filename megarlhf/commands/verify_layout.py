"""`megarlhf verify-layout`: proves that layouts, micro-batch sizes and packing train a recipe's models alike."""

import json
from collections.abc import Sequence
from dataclasses import fields

from megarlhf.config.check import violations as setting_violations
from megarlhf.config.command import command_of, load_for
from megarlhf.config.flags import divided
from megarlhf.config.load import load
from megarlhf.config.runs import COMMANDS
from megarlhf.config.verification import Verification
from megarlhf.errors import ConfigError
from megarlhf.telemetry.status import DONE, FAILED

SUMMARY = "compare layouts with one process: megarlhf verify-layout [COMMAND] FILE.yaml [--layouts tp2,pp2,tp2+sp,dp2]"


def main(argv: Sequence[str]) -> int:
    """Prints the table; returns 1 when a layout differs. Starts the ranks that it needs when no launcher did.

    Raises ConfigError for what can be known to be wrong beforehand.
    """
    as_json, words = "--json" in argv, [word for word in argv if word != "--json"]
    command = words.pop(0) if words and words[0] in COMMANDS else ""
    files, own, others = divided(words, Verification)
    if not command:
        command = command_of(files + others, "verify-layout") if files else "ppo"
    prog = f"megarlhf verify-layout {command} FILE.yaml"
    options = load(Verification, None, own, prog)
    settings, violations = load_for(command, files + others, prog, [f"--{one.name}" for one in fields(Verification)])
    violations += setting_violations(settings)
    from megarlhf import device

    device.prepare()
    from megarlhf.loop.layouts_agree import agreements, heading, line, planned_cases

    planned, wrong = planned_cases(settings, options)
    num_ranks = max(case.num_ranks for case in planned)
    if device.is_launched() and device.launched_world_size() < num_ranks:
        wrong += [f"--layouts: {num_ranks} ranks are needed, and {device.launched_world_size()} were launched"]
    if violations or wrong:
        raise ConfigError(violations + wrong)
    if num_ranks > 1 and not device.is_launched():
        return device.run_local_ranks(num_ranks, ["verify-layout", *argv])
    is_table = device.is_first_rank() and not as_json
    if is_table:
        print(heading(), flush=True)
    found = agreements(
        command,
        settings,
        options,
        planned,
        lambda one: print(json.dumps(one.numbers) if as_json else line(one), flush=True),
    )
    num_failed = sum(not one.passed for one in found)
    if is_table:
        print(f"{len(found)} compared, {num_failed} differ" if num_failed else f"{len(found)} compared, all agree")
    return FAILED if num_failed else DONE
