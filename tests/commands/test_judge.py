"""`megarlhf judge`: preferences are the judge's own, asked for in both orders, and can be learnt from."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarlhf.commands.judge import JudgeRun, main, require_valid, run_judge
from megarlhf.config.corpus import Corpus
from megarlhf.data.corpus import read_preferences
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import ConfigError, DataError
from megarlhf.loop.inference import Summary
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama

TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How are you?"}]
ROWS = [{"id": "first", "prompt": "Hello", "text": "metadata"}, {"messages": TURNS}]
QUESTION = """Below are a prompt and two answers to it. Decide which answer keeps better to this principle:
Be kind.

[Prompt]
{}

[Answer A]
{}

[Answer B]
{}

[End of the answers]
Which answer keeps better to the principle? Reply with one letter, A or B, and nothing else."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A policy, a judge, and a judge that does not look at the answers: its layers add nothing to the last token."""
    root = tmp_path_factory.mktemp("judge")
    policy = write_llama(root / "policy")
    judge = write_llama(root / "judge", seed=1, max_position_embeddings=2048)
    blind = write_llama(root / "blind", seed=2, max_position_embeddings=2048)
    weights = load_file(blind / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(weights[name])
    save_file(weights, blind / "model.safetensors", metadata={"format": "pt"})
    return {"policy": str(policy), "judge": str(judge), "blind": str(blind)}


@pytest.fixture
def settings(folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "principles.txt").write_text("# one\n\nBe kind.\n")
    return JudgeRun(
        prompts=str(tmp_path / "prompts.jsonl"),
        out=str(tmp_path / "out.jsonl"),
        judge=folders["judge"],
        principles=str(tmp_path / "principles.txt"),
        samples_per_prompt=3,
        max_new_tokens=6,
        min_gap=0,
        keep_cut=True,
    )


def judge(settings: JudgeRun, folders) -> tuple[Summary, list[dict]]:
    require_valid(folders["policy"], settings, 1)
    summary = run_judge(folders["policy"], settings, 0, 1)
    return summary, read(settings.out)


def read(path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def gap_by_transformers(folder: str, prompt: str, first: str, second: str) -> float:
    """P(first is better) - P(second is better) by one forward of transformers per order."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    better = []
    for a, b in ((first, second), (second, first)):
        ids = tokenizer("u>" + QUESTION.format(prompt, a, b) + "\na>Answer: ", return_tensors="pt").input_ids
        with torch.no_grad():
            letters = model(ids).logits[0, -1, tokenizer.convert_tokens_to_ids(["A", "B"])]
        better.append(letters.double().softmax(0)[0].item())
    return (better[0] + 1 - better[1]) / 2 - (1 - better[0] + better[1]) / 2


def test_preferences_are_the_letters_of_the_judge_in_both_orders(settings, folders, single_rank):
    summary, rows = judge(settings, folders)
    assert summary.numbers["num_preferences"] == len(rows) == 6
    transcripts = {"first": "Hello", 1: "System: Be brief.\n\nUser: How are you?"}
    for row in rows:
        expected = gap_by_transformers(folders["judge"], transcripts[row["id"]], row["chosen"], row["rejected"])
        assert row["margin"] == pytest.approx(expected, abs=1e-5) and row["margin"] > 0
        assert row["principles"] == ["Be kind."]


def test_a_judge_that_always_says_the_same_letter_prefers_nothing(settings, folders, single_rank, tmp_path):
    told = "no preference is left: 0 preferences from 6 pairs.*6 unclear pairs; orders agree 0.00"
    with pytest.raises(DataError, match=told):
        judge(replace(settings, judge=folders["blind"]), folders)
    assert not (tmp_path / "out.jsonl").exists()


def test_pairs_that_are_not_clear_enough_are_left_out(settings, folders, single_rank):
    _, everything = judge(settings, folders)
    limit = sorted(row["margin"] for row in everything)[2]
    summary, rows = judge(replace(settings, min_gap=limit), folders)
    assert rows == [row for row in everything if row["margin"] >= limit] and len(rows) == 4
    assert summary.numbers["num_unclear_pairs"] == 2


def test_the_file_is_read_as_preferences(settings, folders, single_rank):
    _, rows = judge(settings, folders)
    tokenizer = Tokenizer(folders["policy"])
    examples = read_preferences(Corpus(path=settings.out), tokenizer)
    assert len(examples) == len(rows)
    for example, row in zip(examples, rows, strict=True):
        chosen, rejected = example.answers
        assert (chosen.text, rejected.text, chosen.margin) == (row["chosen"], row["rejected"], row["margin"])
        prompt = "Hello" if row["id"] == "first" else TURNS
        assert list(example.prompt_ids) == tokenizer.encode_prompt(prompt)


def test_cut_answers_are_left_out_unless_asked_for(settings, folders, single_rank):
    with pytest.raises(DataError, match=r"from 0 pairs of 6 answers; left out: \d cut answers"):
        judge(replace(settings, keep_cut=False, max_new_tokens=1, min_new_tokens=1, samples_per_prompt=3), folders)


def test_equal_answers_are_not_compared(settings, folders, single_rank):
    with pytest.raises(DataError, match="from 0 pairs of 6 answers; left out: 4 equal answers"):
        judge(replace(settings, top_k=1), folders)


def test_pairs_that_the_judge_cannot_read_are_left_out(settings, folders, single_rank):
    with pytest.raises(DataError, match="left out: 6 too long pairs"):
        judge(replace(settings, judge=""), folders)  # the policy reads 128 tokens


def test_several_principles_are_averaged_and_the_seed_draws_them(settings, folders, single_rank):
    several = replace(settings, principles="", principles_per_pair=2)
    summary, rows = judge(several, folders)
    assert all(len(set(row["principles"])) == 2 for row in rows)
    assert len({row["principles"][0] for row in rows}) > 1
    assert judge(several, folders) == (summary, rows)


def test_a_judge_that_would_rather_say_something_else_is_warned_of(settings, folders, single_rank, caplog):
    summary, _ = judge(settings, folders)
    assert summary.numbers["letter_mass"] < 0.5 and "would rather say something else" in caplog.text


def test_the_summary_can_be_json(settings, folders, single_rank):
    summary, _ = judge(settings, folders)
    numbers = json.loads(summary.text(as_json=True))
    assert numbers["num_pairs"] == 6 and numbers["num_answers"] == 6 and numbers["out"] == settings.out
    assert 0 <= numbers["agreement"] <= 1 and 0 < numbers["first_letter"] < 1 and 0 < numbers["letter_mass"] < 1


def test_everything_wrong_is_told_at_once(folders, tmp_path):
    flags = f"--judge {tmp_path} --samples_per_prompt 1 --temperature 0 --min_gap 1 --principles no.txt".split()
    with pytest.raises(ConfigError) as error:
        main([folders["policy"], *flags, "--micro_batch_tokens", "0", "--tp", "2"])
    for words in (
        *(
            "--prompts",
            "--out",
            "--judge: ",
            "--samples_per_prompt 1",
            "--temperature 0.0",
            "--min_gap 1.0",
            "no.txt cannot be read",
        ),
        *("--micro_batch_tokens 0", "torchrun --nproc-per-node 2 -m megarlhf judge"),
    ):
        assert words in str(error.value)


def test_a_reward_model_is_no_judge_nor_one_without_a_tokenizer(folders, settings, tmp_path):
    reward = write_llama(tmp_path / "reward", num_labels=1)
    with pytest.raises(ConfigError, match="--judge: .* has a score head, which writes nothing"):
        require_valid(folders["policy"], replace(settings, judge=str(reward)), 1)
    judge = write_llama(tmp_path / "judge")
    (judge / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="^--judge: .* holds no tokenizer"):
        require_valid(folders["policy"], replace(settings, judge=str(judge)), 1)


def judge_on_rank(rank: int, world_size: int, folder: str, settings: JudgeRun) -> Summary:
    require_valid(folder, settings, world_size)
    return run_judge(folder, settings, rank, world_size)


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}, {}], ids=["tp2", "pp2", "dp2"])
def test_every_layout_writes_the_same_preferences(settings, folders, single_rank, tmp_path, layout):
    _, alone = judge(settings, folders)
    shared = replace(settings, out=str(tmp_path / "shared.jsonl"), **layout)
    summaries = run_on_ranks(2, judge_on_rank, folders["policy"], shared)
    assert summaries[0].numbers == summaries[1].numbers
    for one, other in zip(alone, read(shared.out), strict=True):
        assert other == one | {"margin": pytest.approx(one["margin"], abs=1e-4)}
