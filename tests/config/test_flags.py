"""Flags, however their words are joined."""

import pytest

from checkpoints_tools import command
from megarlhf.config.flags import Parser, divided, parse_flags, spelled
from megarlhf.config.replay import Replay
from megarlhf.config.settings import PPORun
from megarlhf.loop.planner.command import take_options


def test_hyphens_and_underscores_are_the_same_in_a_flag_and_not_in_its_value():
    words = ["a_b.yaml", "--max-new-tokens", "a-b", "--dry_run=x_y", "--run.min-gap", "1", "__dry_run"]
    expected = ["a_b.yaml", "--max_new_tokens", "a-b", "--dry-run=x_y", "--run.min-gap", "1", "__dry_run"]
    assert spelled(words, ("--max_new_tokens", "--dry-run")) == expected


@pytest.mark.parametrize("join", "-_")
def test_every_kind_of_command_takes_either_spelling(join):
    parser = Parser()
    parser.add_argument("--max_new_tokens")
    command.add_conversion(parser)
    found = parser.parse_args(["a", "b", f"--max{join}new{join}tokens=3", f"--without{join}tokenizer"])
    assert found.max_new_tokens == "3" and found.without_tokenizer
    options, settings = take_options([f"--reserve{join}gib", "4", f"--rollout.max{join}new{join}tokens", "3"])
    assert options.values == {"--reserve-gib": "4"}
    given, unknown = parse_flags(PPORun(), settings, "megarlhf")
    assert given["rollout"]["max_new_tokens"].words == ("3",) and not unknown
    assert divided([f"--score{join}tolerance", "1", "--x", "2"], Replay) == (
        [],
        ["--score_tolerance", "1"],
        ["--x", "2"],
    )
