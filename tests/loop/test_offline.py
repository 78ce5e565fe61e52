"""What a run over a data set is made of: its rows, its batches, who scores them, and where it ends."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megarlhf.algorithms.catalogue import ALGORITHMS
from megarlhf.config.algorithms import DPO, KTO, RewardModelling
from megarlhf.config.corpus import Corpus, Negatives
from megarlhf.config.runs import DPORun, KTORun, RewardModelRun, SFTRun
from megarlhf.config.settings import CorpusRun, Optimizer, Reference, RewardTrainee, Trainee
from megarlhf.data import corpus
from megarlhf.errors import ConfigError
from megarlhf.loop.offline import build_offline
from megarlhf.loop.reading import reading
from megarlhf.telemetry.report import Reporter
from tests.learning.toy import ANSWER_TOKENS, answer, metrics, random_prompt, train, write_rows
from tests.tiny import write_llama

ROWS = 12


@pytest.fixture(scope="module")
def root(single_rank, tmp_path_factory) -> Path:
    """Two models and a file of each kind."""
    root, rng = tmp_path_factory.mktemp("offline"), random.Random(0)
    write_llama(root / "model", tied=True, num_hidden_layers=2)
    write_llama(root / "other", tied=True, num_hidden_layers=2, seed=1)
    answers = [(random_prompt(rng), answer(rng, ANSWER_TOKENS), answer(rng, 0)) for _ in range(ROWS)]
    write_rows(root / "shown.jsonl", [{"prompt": prompt, "response": good} for prompt, good, _ in answers])
    pairs = [{"prompt": prompt, "chosen": good, "rejected": bad} for prompt, good, bad in answers]
    write_rows(root / "pairs.jsonl", pairs)
    labels = [{"prompt": prompt, "response": good, "label": True} for prompt, good, _ in answers]
    write_rows(root / "labels.jsonl", labels)
    return root


def built(settings, command: str):
    return build_offline(settings, ALGORITHMS[command], 1, Reporter(()))


def of(root: Path, name: str) -> dict:
    """Data, place and, for what trains an actor, the actor of a run."""
    data = Corpus(str(root / f"{name}.jsonl"), batch_size=4, epochs=2, max_tokens=32)
    return {"data": data, "run": CorpusRun(dir=str(root / "run"), tensorboard=False)}


def model(root: Path) -> Trainee:
    return Trainee(model=str(root / "model"))


def test_each_command_reads_its_kind_of_rows_at_its_tokens():
    ranked, scored = RewardModelRun(), RewardModelRun(algorithm=RewardModelling(loss="regression"))
    per_token = RewardModelRun(algorithm=RewardModelling(read_at="divergence"))
    found = [reading(settings) for settings in (SFTRun(), DPORun(), KTORun(), ranked, per_token, scored)]
    assert [how.mask for how in found] == ["response", "response", "response", "last", "divergence", "last"]
    readers = ["demonstrations", "preferences", "labelled", "preferences", "preferences", "scored"]
    assert [how.read for how in found] == [vars(corpus)[f"read_{name}"] for name in readers]
    assert reading(RewardModelRun(algorithm=RewardModelling(margins=True))).read == corpus.read_margins


def test_sft_reads_answers_alone_and_ends_with_its_epochs(root):
    run = built(SFTRun(actor=model(root), **of(root, "shown")), "sft")
    assert run.num_steps == 2 * ROWS // 4 and not run.scorers and list(run.learners) == ["actor"]
    batch = run.next_batch(0)
    assert batch.num_rows == 4 and batch.mask.sum(1).tolist() == 4 * [ANSWER_TOKENS + 1], "the end token is learned too"


def test_a_limit_on_steps_ends_a_run_earlier_and_its_schedule_with_it(root):
    given = of(root, "shown")
    optimizer = Optimizer(learning_rate=1.0, schedule="linear")

    def at_most(steps: int):
        run = replace(given["run"], steps=steps)
        return built(SFTRun(replace(model(root), optimizer=optimizer), data=given["data"], run=run), "sft")

    assert [at_most(steps).num_steps for steps in (0, 4, 99)] == [2 * ROWS // 4, 4, 2 * ROWS // 4]
    learner = at_most(4).learners["actor"]
    learner.num_updates = 3
    assert learner.learning_rate == 0.0, "the last update's"


def test_the_peak_of_a_stage_holds_what_lies_on_the_device(root, tmp_path):
    """Of a model whose weights are far more than the work of a step."""
    write_llama(tmp_path / "wide", tied=True, num_hidden_layers=2, hidden_size=256, intermediate_size=1024)
    run = CorpusRun(dir=str(tmp_path / "run"), tensorboard=False, steps=1)
    train(0, 1, "sft", SFTRun(actor=Trainee(model=str(tmp_path / "wide")), data=of(root, "shown")["data"], run=run))
    rows = [json.loads(line) for line in (tmp_path / "run/memory.jsonl").read_text().splitlines()]
    assert rows[0]["stage"] == "learn_actor" and rows[0]["device_bytes"] > 2**24
    assert all(row["peak_bytes"] > row["device_bytes"] for row in rows)


def test_a_limited_run_goes_on_when_it_is_allowed_more_steps(root, tmp_path, capsys):
    def to(folder: str, steps: int) -> list[float]:
        run = CorpusRun(dir=str(tmp_path / folder), checkpoint_every=2, tensorboard=False, steps=steps)
        train(0, 1, "sft", SFTRun(actor=model(root), data=of(root, "shown")["data"], run=run))
        return [row["loss/sft_avg"] for row in metrics(tmp_path / folder)]

    assert len(to("parts", 2)) == 2
    assert to("parts", 4) == to("whole", 4)
    assert "step 3 of 4 begins" in capsys.readouterr().out


def test_a_step_to_profile_beyond_the_rows_is_refused(root):
    given = of(root, "shown")
    settings = SFTRun(actor=model(root), data=given["data"], run=replace(given["run"], profile=(2, 99)))
    last = 2 * ROWS // 4
    with pytest.raises(ConfigError, match=f"run.profile: step 99 is beyond the {last} .*choose steps from 1 to {last}"):
        built(settings, "sft")


def test_only_what_the_loss_reads_is_scored(root):
    def scorers(settings, command: str) -> list[str]:
        return list(built(settings, command).scorers)

    given = {"actor": model(root)}
    assert scorers(DPORun(**given, **of(root, "pairs")), "dpo") == ["reference"]
    assert scorers(KTORun(**given, **of(root, "labels")), "kto") == ["logp", "reference"]
    zero = KTO(reference_point="zero")
    assert scorers(KTORun(algorithm=zero, **given, **of(root, "labels")), "kto") == ["reference"]


def test_kto_measures_its_reference_point_on_mismatched_answers(root):
    settings = KTORun(actor=model(root), reference=Reference(model=str(root / "other")), **of(root, "labels"))
    run = built(settings, "kto")
    batch = run.next_batch(0)
    assert batch.num_rows == 8 and batch.preference.isnan().sum() == 4
    for scorer in run.scorers.values():
        batch = scorer.annotate(batch)
    log_ratio = torch.where(batch.mask, batch.logp_start - batch.logp_reference, 0.0).sum(1)[4:]
    credited = run.credit(batch)
    assert credited.num_rows == 4 and len(credited.prompts) == 4
    assert credited.margin.tolist() == pytest.approx(4 * [max(0.0, float(log_ratio.mean()))])


def test_a_new_head_knows_nothing_and_is_trained_with_the_model(root, caplog):
    settings = RewardModelRun(reward=RewardTrainee(model=str(root / "model")), **of(root, "pairs"))
    train(0, 1, "rm", replace(settings, run=CorpusRun(dir=str(root / "rm"), save_every=6, tensorboard=False)))
    assert f"reward: {root / 'model'} has no score head; it starts with a new one" in caplog.text
    rows = metrics(root / "rm")
    assert rows[0]["loss/reward_avg"] == pytest.approx(0.693147, abs=1e-5) and rows[0]["rewards/accuracy"] == 0.5
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["episode"] == 6 * 8
    assert (root / "rm/exports/step_6/reward/model.safetensors").exists()
    config = json.loads((root / "rm/hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    again = built(RewardModelRun(reward=RewardTrainee(model=str(root / "rm/hf")), **of(root, "pairs")), "rm")
    head = next(v for (_, name), v in again.learners["reward"].model.named_parameters().items() if v.shape == (1, 32))
    assert head.abs().max() > 0, "a trained head is kept"


def test_spoilt_answers_take_the_place_of_the_rejected(root):
    settings = RewardModelRun(
        reward=RewardTrainee(model=str(root / "model")), negatives=Negatives(share=1.0), **of(root, "pairs")
    )
    batch = built(settings, "rm").next_batch(0)
    assert all(text in ("(shuffled)", "(truncated)", "(repeated)") for text in batch.responses[1::2])
    assert batch.preference.tolist() == [1.0, 0.0] * 4


def test_the_reference_may_have_a_folder_of_its_own(root):
    settings = DPORun(actor=model(root), algorithm=DPO(), **of(root, "pairs"))
    same = built(settings, "dpo")
    other = built(replace(settings, reference=Reference(model=str(root / "other"))), "dpo")
    batch = same.next_batch(0)
    own, foreign = (run.scorers["reference"].annotate(batch).logp_reference for run in (same, other))
    assert (own - foreign).abs()[batch.mask].max() > 0.1
    assert torch.equal(same.scorers["reference"].annotate(batch).logp_reference, own)
