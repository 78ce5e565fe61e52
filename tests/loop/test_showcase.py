"""What a person reads when a run has ended."""

from megarlhf.loop.showcase import ending


def test_everything_that_a_run_left_is_told_and_nothing_else(tmp_path):
    for name in ("config.yaml", "metrics.jsonl", "before_after.jsonl", "status.json"):
        (tmp_path / name).touch()
    for name in ("tensorboard", "checkpoints", "hf", "hf_lora"):
        (tmp_path / name).mkdir()
    told = ending([], [], tmp_path, [], is_policy=True).splitlines()
    files = "config.yaml, metrics.jsonl, before_after.jsonl, status.json, tensorboard/, checkpoints/"
    assert told == [
        "",
        f"run folder:      {tmp_path}  ({files})",
        f"exported model:  {tmp_path}/hf  (a Hugging Face folder)",
        f"its adapters:    {tmp_path}/hf_lora  (PEFT's format)",
        f"chat with it:    megarlhf chat {tmp_path}/hf",
    ]
