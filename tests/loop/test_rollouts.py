"""Rollouts come from the newest weights, keep the ids that were sampled, and never repeat their noise in a batch."""

import json
from functools import partial
from pathlib import Path

import torch

from megarlhf.config.layout import Layout
from megarlhf.config.settings import PPO, Actor, Data, Optimizer, PPORun, Reward, Rollout, Run
from megarlhf.telemetry.report import Reporter
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import write_actor, write_prompts
from tests.tiny import write_tokenizer


def settings(root: Path) -> PPORun:
    """A policy trained as two stages, sampled as two copies; 3 prompts for batches of 4, so that one comes twice."""
    return PPORun(
        actor=Actor(model=str(root / "actor"), train=Layout(pp=2), optimizer=Optimizer(learning_rate=1e-2)),
        reward=Reward(functions=("length",)),
        algorithm=PPO(num_epochs=1),
        rollout=Rollout(batch_size=4, samples_per_prompt=2, max_new_tokens=6),
        data=Data(prompts=str(root / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(root / "run"), steps=2),
    )


def one_step(rank: int, world_size: int, run_settings: PPORun):
    """What the step saw: its batch, whether weights agree before and after an update and the sampling that follows it,
    the largest gap of log-probs, ratio and KL of the first update."""
    from megarlhf.algorithms.catalogue import PPO as ALGORITHM
    from megarlhf.loop.online import build_online
    from megarlhf.weights.checksum import weight_checksums

    run = build_online(run_settings, ALGORITHM, world_size, Reporter(()))
    source, learner = run.source, run.learners["actor"]

    def agree() -> bool:
        checksums = partial(weight_checksums, dtype=torch.float32, group=learner.model.groups.world)
        return checksums(learner.model) == checksums(source.generator.model)

    first = batch = source.next_batch(0)
    sampled_from_loaded = agree()
    for scorer in run.scorers.values():
        batch = scorer.annotate(batch)
    batch = run.credit(batch)
    update = learner.update(run.parts("actor", next(iter(run.minibatches(batch, 0)))))
    ratio, kl = (update.metrics[name].result() for name in ("val/ratio", "policy/approxkl_avg"))
    is_stale = not agree()
    source.next_batch(1)
    gap = (batch.logp_start - batch.logp_rollout)[batch.mask].abs().max()
    return first, sampled_from_loaded, is_stale, agree(), float(gap), ratio, kl


def test_weights_are_brought_up_to_date_before_every_sampling(tmp_path):
    write_actor(tmp_path / "actor")
    write_prompts(tmp_path / "prompts.jsonl", count=3)
    ranks = run_on_ranks(2, one_step, settings(tmp_path))
    for batch, sampled_from_loaded, is_stale, is_fresh, gap, ratio, kl in ranks:
        assert sampled_from_loaded and is_stale and is_fresh
        assert gap < 1e-4
        assert abs(ratio - 1) < 1e-5 and kl < 1e-9, "the first minibatch is still on the policy that sampled"
        assert torch.equal(batch.tokens, ranks[0][0].tokens), "ranks hold different batches"
    batch = ranks[0][0]
    assert batch.row_id.tolist()[0::2] == batch.row_id.tolist()[1::2], "siblings are consecutive rows"
    assert batch.group.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    rows = [tuple(row[start:].tolist()) for row, start in zip(batch.tokens, batch.prompt_lengths, strict=True)]
    assert len(set(rows)) == len(rows), "a prompt that is used twice in a batch repeated its noise"


def test_sampled_ids_are_trained_even_where_their_text_has_other_ids(tmp_path):
    """The text of 5, 6 is that of 7: a detour over text would train on a token that was never sampled."""
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.engines.generator import Completions
    from megarlhf.loop.rollouts import experience_of
    from megarlhf.records.prompts import Prompt, siblings

    write_tokenizer(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = {"<|end|>": 0, "<|pad|>": 1, "<|unk|>": 2, "c": 3, "d": 4, "a": 5, "b": 6, "ab": 7}
    saved["model"] = {"type": "BPE", "vocab": vocabulary, "merges": ["a b"], "unk_token": "<|unk|>"}
    saved |= {"pre_tokenizer": None, "added_tokens": saved["added_tokens"][:3]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode_prompt("ab") == [7] and tokenizer.decode([5, 6]) == "ab"
    samples = siblings([Prompt(row_id=0, token_ids=(3, 4), text="cd", metadata={})], 1)
    sampled = torch.tensor([5, 6, 0]), torch.tensor([-1.0, -2.0, -3.0]), torch.zeros(3, dtype=torch.bool)
    batch = experience_of(samples, Completions.of(*sampled, torch.tensor([3]), stop_ids=[0]), tokenizer)
    assert tuple(batch.responses) == ("ab",) and batch.finished.tolist() == [True]
    assert batch.tokens[:, 1:][batch.mask].tolist() == [5, 6, 0], "the end token is trained too"
    assert batch.logp_rollout[batch.mask].tolist() == [-1.0, -2.0, -3.0]
