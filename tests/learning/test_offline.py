"""What data sets teach: demonstrations, preferences, rankings, scores and labels; judged by transformers alone."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarlhf.config.algorithms import DPO, KTO, RewardModelling
from megarlhf.config.corpus import Corpus, Statistics
from megarlhf.config.layout import Layout
from megarlhf.config.runs import DPORun, KTORun, RewardModelRun, SFTRun
from megarlhf.config.settings import CorpusRun, Optimizer, RewardTrainee, Trainee
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import (
    ANSWER_TOKENS,
    answer,
    judged,
    metrics,
    random_prompt,
    sampled_share,
    train,
    write_actor,
    write_rows,
)


@pytest.fixture(scope="module")
def actor(tmp_path_factory) -> Path:
    return write_actor(tmp_path_factory.mktemp("offline") / "actor")


def trainee(actor: Path, layout: Layout, learning_rate: float, kind: type = Trainee) -> Trainee:
    optimizer = Optimizer(learning_rate=learning_rate, schedule="linear")
    return kind(model=str(actor), train=layout, optimizer=optimizer, micro_batch_tokens=512)


def place(folder: Path) -> CorpusRun:
    return CorpusRun(dir=str(folder), tensorboard=False)


def test_sft_learns_its_corpus(actor, tmp_path):
    """The answer is the prompt's last letter in capitals, twice; prompts are random and not learned."""
    rng = random.Random(0)
    prompts = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(512)]
    rows = [{"prompt": prompt, "response": 2 * prompt[-1].upper()} for prompt in prompts]
    settings = SFTRun(
        actor=trainee(actor, Layout(), 1e-2),
        data=Corpus(write_rows(tmp_path / "corpus.jsonl", rows[:448]), batch_size=16, epochs=4, max_tokens=16),
        run=place(tmp_path / "run"),
    )
    run_on_ranks(2, train, "sft", settings)
    assert metrics(tmp_path / "run")[-1]["loss/sft_avg"] < 0.05
    found = continued(tmp_path / "run/hf", prompts[448:])
    right = [text.startswith(row["response"] + "<|end|>") for text, row in zip(found, rows[448:], strict=True)]
    assert sum(right) / len(right) > 0.95


def continued(folder: Path, prompts: list[str]) -> list[str]:
    """Greedy continuations by transformers, end tokens included."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = torch.tensor(tokenizer(prompts)["input_ids"])
    found = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=3)
    return tokenizer.batch_decode(found[:, ids.shape[1] :])


def compared(rng: random.Random, num_rows: int) -> list[dict]:
    """Pairs of which the chosen answer has at least four favoured tokens more."""
    rows = []
    for _ in range(num_rows):
        many = rng.randint(4, ANSWER_TOKENS)
        chosen, rejected = answer(rng, many), answer(rng, rng.randint(0, many - 4))
        rows.append({"prompt": random_prompt(rng), "chosen": chosen, "rejected": rejected})
    return rows


def reward_run(
    actor: Path, root: Path, layout: Layout, rows: list[dict], algorithm: RewardModelling, epochs: int = 2
) -> RewardModelRun:
    return RewardModelRun(
        reward=trainee(actor, layout, 1e-2, RewardTrainee),
        algorithm=algorithm,
        data=Corpus(write_rows(root / "corpus.jsonl", rows), batch_size=16, epochs=epochs, max_tokens=16),
        run=place(root / "run"),
    )


@pytest.mark.parametrize("read_at", ["last", "divergence"])
def test_a_reward_model_learns_which_answer_is_better(read_at, actor, tmp_path):
    rng = random.Random(1)
    settings = reward_run(actor, tmp_path, Layout(tp=2, sp=True), compared(rng, 512), RewardModelling(read_at=read_at))
    run_on_ranks(2, train, "rm", settings)
    fresh = compared(rng, 256)
    prompts = [row["prompt"] for row in fresh]
    chosen = judged(tmp_path / "run/hf", prompts, [row["chosen"] for row in fresh])
    rejected = judged(tmp_path / "run/hf", prompts, [row["rejected"] for row in fresh])
    assert (chosen > rejected).float().mean() > 0.95
    assert metrics(tmp_path / "run")[-1]["rewards/accuracy"] > 0.9


def test_rankings_of_four_answers_are_recovered(actor, tmp_path):
    rng = random.Random(2)
    counts = [8, 5, 2, 0]

    def ranked() -> dict:
        order = rng.sample(range(4), 4)
        answers = [answer(rng, counts[place]) for place in order]
        return {"prompt": random_prompt(rng), "responses": answers, "ranks": [place + 1 for place in order]}

    rows = [ranked() for _ in range(320)]
    run_on_ranks(2, train, "rm", reward_run(actor, tmp_path, Layout(pp=2), rows[:256], RewardModelling(), epochs=6))
    right = 0
    for row in rows[256:]:
        scores = judged(tmp_path / "run/hf", 4 * [row["prompt"]], row["responses"])
        order = scores.argsort(descending=True)
        right += torch.tensor(row["ranks"])[order].tolist() == [1, 2, 3, 4]
    assert right / 64 > 0.9


def test_scores_given_by_hand_are_predicted(actor, tmp_path):
    rng = random.Random(3)
    counts = [rng.randint(0, ANSWER_TOKENS) for _ in range(1408)]
    rows = [{"prompt": random_prompt(rng), "response": answer(rng, n), "score": n / ANSWER_TOKENS} for n in counts]
    settings = reward_run(actor, tmp_path, Layout(), rows[:1280], RewardModelling(loss="regression"), epochs=3)
    run_on_ranks(2, train, "rm", settings)
    found = judged(
        tmp_path / "run/hf", [row["prompt"] for row in rows[1280:]], [row["response"] for row in rows[1280:]]
    )
    wanted = torch.tensor([row["score"] for row in rows[1280:]])
    assert torch.corrcoef(torch.stack([found, wanted]))[0, 1] > 0.9


def test_several_scores_are_predicted_and_their_statistics_exported(actor, tmp_path):
    """How much is favoured, and how little; a third of the scores is missing. transformers judges the export."""
    from transformers import AutoConfig

    rng = random.Random(6)
    counts = [rng.randint(0, ANSWER_TOKENS) for _ in range(1088)]
    rows = [{"prompt": random_prompt(rng), "response": answer(rng, n)} for n in counts]
    for row, n in zip(rows, counts, strict=True):
        scores = {"favoured": n / ANSWER_TOKENS, "other": 3 - 3 * n / ANSWER_TOKENS}
        row["scores"] = {name: value for name, value in scores.items() if rng.random() < 0.67 or name == "favoured"}
    wanted = RewardModelling(loss="regression", attributes=("favoured", "other"))
    settings = reward_run(actor, tmp_path, Layout(pp=2), rows[:960], wanted, epochs=3)
    settings = replace(settings, statistics=Statistics(max_examples=300))
    run_on_ranks(2, train, "rm", settings)
    config = AutoConfig.from_pretrained(tmp_path / "run/hf")
    assert config.id2label == {0: "favoured", 1: "other"} and config.problem_type == "regression"
    assert {"rewards/error/favoured", "rewards/error/other"} <= metrics(tmp_path / "run")[-1].keys()

    def found(part: list[dict]) -> torch.Tensor:
        return judged(tmp_path / "run/hf", [row["prompt"] for row in part], [row["response"] for row in part])

    share = torch.tensor(counts[960:]) / ANSWER_TOKENS
    for place, sign in enumerate((1, -1)):
        assert torch.corrcoef(torch.stack([found(rows[960:])[:, place], sign * share]))[0, 1] > 0.9
    scored = found(rows[:300]).double()
    assert config.megarlhf_score_mean == pytest.approx(scored.mean(0).tolist(), abs=1e-5)
    assert config.megarlhf_score_std == pytest.approx(scored.std(0).tolist(), abs=1e-5)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_dpo_learns_the_toy_task(loss, actor, tmp_path):
    rng = random.Random(4)
    rows = [
        {"prompt": random_prompt(rng), "chosen": answer(rng, ANSWER_TOKENS), "rejected": answer(rng, 0)}
        for _ in range(384)
    ]
    settings = DPORun(
        actor=trainee(actor, Layout(pp=2), 3e-3),
        algorithm=DPO(loss=loss),
        data=Corpus(write_rows(tmp_path / "corpus.jsonl", rows), batch_size=16, epochs=2, max_tokens=16),
        run=place(tmp_path / "run"),
    )
    run_on_ranks(2, train, "dpo", settings)
    found = metrics(tmp_path / "run")
    assert found[0]["rewards/margin"] == pytest.approx(0, abs=1e-4), "the reference is the starting policy"
    assert found[-1]["rewards/accuracy"] > 0.95
    assert sampled_share(tmp_path / "run/hf") > sampled_share(actor) + 0.3


def test_kto_learns_the_toy_task(actor, tmp_path):
    rng = random.Random(5)
    labels = [bool(row % 2) for row in range(512)]
    rows = [
        {"prompt": random_prompt(rng), "response": answer(rng, ANSWER_TOKENS * label), "label": label}
        for label in labels
    ]
    settings = KTORun(
        actor=trainee(actor, Layout(tp=2), 3e-3),
        algorithm=KTO(),
        data=Corpus(write_rows(tmp_path / "corpus.jsonl", rows), batch_size=16, epochs=2, max_tokens=16),
        run=place(tmp_path / "run"),
    )
    run_on_ranks(2, train, "kto", settings)
    assert metrics(tmp_path / "run")[-1]["rewards/chosen"] > metrics(tmp_path / "run")[-1]["rewards/rejected"]
    assert sampled_share(tmp_path / "run/hf") > sampled_share(actor) + 0.3
