"""status.json keeps the exit code and the reason that torchrun would swallow."""

import pytest

from megarlhf.errors import CheckpointError, ConfigError, DataError, LayoutError, RewardError, TrainingError
from megarlhf.telemetry.status import exit_code, read_status, recorded, write_status


def fail(run_dir, rank: int, error: BaseException) -> None:
    with pytest.raises(type(error)), recorded(run_dir, rank):
        raise error


def test_while_running_the_code_is_null_and_at_the_end_zero(tmp_path):
    with recorded(tmp_path / "run", rank=0):
        assert read_status(tmp_path / "run") == (None, "running")
    assert read_status(tmp_path / "run") == (0, "done")


@pytest.mark.parametrize("kind", [ConfigError, LayoutError, DataError, CheckpointError])
def test_what_a_user_can_mend_is_code_two(tmp_path, kind):
    fail(tmp_path, 0, kind("actor.train.tp: 3 does not divide 8 heads"))
    code, reason = read_status(tmp_path)
    assert code == 2 and "actor.train.tp: 3 does not divide 8 heads" in reason


@pytest.mark.parametrize("error", [RewardError("x"), TrainingError("x"), ZeroDivisionError("x")])
def test_every_other_failure_is_code_one(tmp_path, error):
    fail(tmp_path, 0, error)
    assert read_status(tmp_path)[0] == exit_code(error) == 1


def test_an_interrupt_has_the_code_that_a_shell_gives_it(tmp_path):
    fail(tmp_path, 0, KeyboardInterrupt())
    assert read_status(tmp_path) == (130, "interrupted")


def test_all_violations_are_the_reason(tmp_path):
    fail(tmp_path, 0, ConfigError(["first", "second"]))
    assert read_status(tmp_path) == (2, "first\nsecond")


def test_the_first_failure_is_kept_and_its_rank_is_named(tmp_path):
    with pytest.raises(RuntimeError), recorded(tmp_path, rank=0):
        fail(tmp_path, 3, DataError("prompts.jsonl:7: no prompt"))
        raise RuntimeError("connection closed by peer")
    assert read_status(tmp_path) == (2, "rank 3: prompts.jsonl:7: no prompt")


def test_other_ranks_write_nothing_when_all_goes_well(tmp_path):
    with recorded(tmp_path, rank=1):
        pass
    assert list(tmp_path.iterdir()) == []


def test_no_part_of_a_file_is_left(tmp_path):
    for code in (None, 1, 0):
        write_status(tmp_path, code, "why")
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_an_unwritable_folder_does_not_hide_the_error(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    fail(tmp_path / "file", 0, TrainingError("diverged"))
    assert "cannot be written" in caplog.text
