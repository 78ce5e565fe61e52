"""A prompt that rows of a micro-batch begin with is computed once, and nothing that is read of any row changes."""

import pytest
import torch

from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.settings import Optimizer
from megarlhf.records.experience import Experience
from tests.distributed.pool import run_on_ranks
from tests.engines.layouts import assemble, every_row_whole, frozen_batch, tensors_by_name
from tests.tiny import write_llama

GROUPS = [0, 1, 0, 2, 1, 3, 0, 2, 3, 1]
MODELS = {
    "plain heads": {"num_key_value_heads": 4},
    "grouped heads": {"tied": True},
    "windows and soft caps": {"family": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 10},
    "norms of heads, two ropes": {"family": "gemma3_text", "sliding_window": 6},
    "values": {"num_labels": 1},
}
SPLIT = 24
"""Tokens of a micro-batch that no group of three fits in."""
LAYOUTS = {
    "tp2": (2, Layout(tp=2)),
    "tp2+sp": (2, Layout(tp=2, sp=True)),
    "pp2": (2, Layout(pp=2)),
    "cp2": (2, Layout(cp=2)),
    "dp2": (2, Layout()),
}


def siblings() -> Experience:
    """Groups that do not lie together. Of one, a prompt differs in its last token; of others, a response is empty, its
    tokens are masked, or all but the first are."""
    rows = frozen_batch(num_rows=len(GROUPS), seed=5, groups=GROUPS)
    tokens, lengths, mask = rows.tokens.clone(), rows.lengths.clone(), rows.mask.clone()
    assert (rows.prompt_lengths[[3, 7]] == 1).all(), "prompts of one token are among them"
    tokens[6, rows.prompt_lengths[6] - 1] += 1
    lengths[8], mask[8] = rows.prompt_lengths[8], False
    tokens[8, lengths[8] :] = 0
    mask[4] = False
    mask[9, int(rows.prompt_lengths[9]) :] = False
    fields = {name: getattr(rows, name) for name in ("prompt_lengths", "row_id", "group", "finished")}
    targets = torch.where(mask, rows.target, 0.0)
    return Experience(tokens=tokens, lengths=lengths, mask=mask, target=targets, **fields)


def loss(prediction, tokens, denominators):
    """Any that treats all tokens unlike."""
    entropy = 0.0 if prediction.entropy is None else (prediction.entropy * tokens.target.square()).sum()
    return (prediction.value * tokens.target).sum() + entropy, {}


def learner_of(world_size: int, layout: Layout, folder: str, head: str, max_tokens: int, lora: LoRA | None, **settings):
    from megarlhf.engines.learner import Learner
    from megarlhf.models.architecture import Architecture
    from megarlhf.models.build import build_model
    from megarlhf.models.lora import add_lora
    from megarlhf.parallel.groups import build_groups
    from megarlhf.weights.load import load_weights

    groups, settings = build_groups(layout, world_size), {"dtype": torch.float32} | settings
    model = build_model(Architecture.from_folder(folder), groups, head=head, seed=None, **settings)
    load_weights(model, folder)
    if lora is not None:
        add_lora(model, lora, seed=11)
    return Learner(model, Optimizer(), total_updates=1, max_tokens=max_tokens)


def answers(rank, world_size, layout, folder, head="vocabulary", max_tokens=4096, lora=None, rows=None):
    """(what scorers and a trace say of the rows, gradient pieces by case), all of one model."""
    from megarlhf.engines.learner import Objective, Part
    from megarlhf.engines.scorer import LogprobScorer, RewardModelScorer, ValueScorer
    from megarlhf.loop.trace import trace

    rows = siblings() if rows is None else rows
    learner = learner_of(world_size, layout, folder, head, max_tokens, lora)
    if head == "value":
        scored = {"value": ValueScorer(learner.model, max_tokens).annotate(rows).value}
        scored["score"] = RewardModelScorer(learner.model, max_tokens).scores(rows)
        objectives = {"before": Objective(loss), "token": Objective(loss, value_at="token", keeps_groups=True)}
    else:
        found = LogprobScorer(learner.model, "logp_start", 0.7, max_tokens).annotate(rows)
        scored = {"logp": found.logp_start, "entropy": found.entropy}
        objectives = {"groups": Objective(loss, 0.7, with_entropy=True, keeps_groups=True)}
        objectives["rows"] = Objective(loss, 0.7, with_entropy=True)
    scored["trace"] = torch.tensor(list(trace(learner.model, rows, max_tokens).values()))
    gradients = {}
    for name, objective in objectives.items():
        learner.accumulate([Part(rows, objective)], complete_gradients=True)
        pieces = tensors_by_name(learner.model, lambda parameter: parameter.main_grad) if lora is None else []
        gradients[name] = pieces or [parameter.main_grad.clone() for parameter in trained(learner.model)]
    return scored, gradients


def trained(model):
    return [parameter for parameter in model.named_parameters().values() if parameter.requires_grad]


def answers_of_whole_rows(rank, world_size, layout, folder, *options):
    with every_row_whole():
        return answers(rank, world_size, layout, folder, *options)


def assert_close(found: dict, expected: dict) -> None:
    """To 1e-5 of the largest number of each tensor."""
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        scale = float(values.abs().max())
        torch.testing.assert_close(found[name], values, rtol=0, atol=1e-5 * scale, msg=lambda text, at=name: at + text)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("shared")
    return {name: str(write_llama(root / name.replace(" ", "_"), **fields)) for name, fields in MODELS.items()}


def head_of(model: str) -> str:
    return "value" if model == "values" else "vocabulary"


@pytest.fixture(scope="module")
def whole(folders) -> dict[str, tuple]:
    """The answers where every row is computed by itself, by model."""
    return {name: run_on_ranks(1, answers_of_whole_rows, Layout(), folders[name], head_of(name))[0] for name in MODELS}


@pytest.mark.parametrize("max_tokens", [4096, SPLIT])
@pytest.mark.parametrize("model", MODELS)
def test_scores_and_gradients_are_those_of_rows_by_themselves(model, max_tokens, folders, whole):
    (found, gradients), (expected, wanted) = (
        run_on_ranks(1, answers, Layout(), folders[model], head_of(model), max_tokens)[0],
        whole[model],
    )
    assert_close(found, expected)
    for name in wanted:
        assert_close(assemble([gradients[name]]), assemble([wanted[name]]))


@pytest.mark.parametrize("model", ["grouped heads", "values"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_a_model_or_rows_agree_with_one_that_shares_nothing(layout, model, folders, whole):
    world_size, chosen = LAYOUTS[layout]
    ranks = run_on_ranks(world_size, answers, chosen, folders[model], head_of(model), SPLIT)
    for found, _ in ranks:
        assert_close(found, whole[model][0])
    for name, wanted in whole[model][1].items():
        assert_close(assemble([gradients[name] for _, gradients in ranks]), assemble([wanted]))


def test_windows_reach_back_into_a_prompt_on_another_context_rank(folders, whole):
    model = "windows and soft caps"
    for found, _ in run_on_ranks(2, answers, Layout(cp=2), folders[model]):
        assert_close(found, whole[model][0])


@pytest.mark.parametrize(("layout", "prompt"), [(Layout(cp=2), 1), (Layout(cp=4), 3)], ids=str)
def test_a_context_rank_that_holds_padding_only_takes_part(layout, prompt, folders):
    ids = list(range(3, 3 + prompt))
    options = {"row_id": [0, 1], "group": [0, 1], "finished": [True] * 2}
    rows = Experience.from_completions([ids, ids], [[7], [8]], [[-1.0]] * 2, **options)
    rows = rows.replace(target=rows.logp_rollout)
    case = folders["grouped heads"], "vocabulary", prompt, None, rows
    ((found, gradients),) = run_on_ranks(1, answers_of_whole_rows, Layout(), *case)
    ranks = run_on_ranks(layout.cp, answers, layout, *case)
    for scored, _ in ranks:
        assert_close(scored, found)
    for name, wanted in gradients.items():
        found, expected = assemble([pieces[name] for _, pieces in ranks]), assemble([wanted])
        # A token alone gives its query nothing but rounding, so that tensors have one scale.
        assert_close({"all": joined(found)}, {"all": joined(expected)})


def joined(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """All numbers, by name."""
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def test_adapters_get_the_same_gradients(folders):
    case = (Layout(), folders["grouped heads"], "vocabulary", 4096, LoRA(rank=3, alpha=7.0))
    (_, found), (_, wanted) = (run_on_ranks(1, run, *case)[0] for run in (answers, answers_of_whole_rows))
    for name in wanted:
        assert_close(dict(enumerate(found[name])), dict(enumerate(wanted[name])))


def with_threads(rank: int, world_size: int, folder: str):
    """The answers of a batch in which each prompt has many responses, twice, with two threads."""
    rows = frozen_batch(num_rows=48, groups=[row // 16 for row in range(48)])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        return [answers(rank, world_size, Layout(), folder, rows=rows) for _ in range(2)]
    finally:
        torch.set_num_threads(threads)


def test_two_runs_agree_to_the_bit(folders):
    (first, one), (second, other) = run_on_ranks(1, with_threads, folders["grouped heads"])[0]
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in one:
        pieces = zip(assemble([one[name]]).values(), assemble([other[name]]).values(), strict=True)
        assert all(torch.equal(*pair) for pair in pieces), name


def with_one_prompt_for_all(rank: int, world_size: int, folder: str):
    """As if the row whose prompt differs in its last token were a sibling like the others."""
    from megarlhf.records.spans import Spans

    real = Spans.of

    def wrong(experience, reads, *, shares_prompts):
        tokens = experience.tokens.clone()
        prompt = int(experience.prompt_lengths[6])
        tokens[6, :prompt] = tokens[0, :prompt]
        return real(experience.replace(tokens=tokens), reads, shares_prompts=shares_prompts)

    Spans.of = wrong
    try:
        return answers(rank, world_size, Layout(), folder)
    finally:
        Spans.of = real


def test_a_prompt_that_differs_in_one_token_would_be_noticed(folders, whole):
    found, _ = run_on_ranks(1, with_one_prompt_for_all, folders["grouped heads"])[0]
    far = (found["logp"] - whole["grouped heads"][0]["logp"]).abs().amax(1)
    assert far[6] > 1e-2
    assert far[[row for row in range(len(GROUPS)) if row != 6]].max() < 1e-5


def num_tokens(rank: int, world_size: int, folders: dict[str, str]) -> dict[str, int]:
    """Tokens of the only micro-batch of each kind of pass."""
    from megarlhf.engines.pipeline import micro_batches

    found = {}
    for name, (kind, settings) in {
        "scoring": ("grouped heads", {}),
        "dropout": ("grouped heads", {"dropout": 0.1}),
        "experts": ("experts", {}),
    }.items():
        model = learner_of(1, Layout(), folders[kind], "vocabulary", 4096, None, **settings).model
        for is_training in (True, False):
            model.chunks[0].train(is_training)
            (batch,) = micro_batches(siblings(), model, 4096, reads="before")
            found[f"{name}, {'training' if is_training else 'scoring'}"] = batch.packed.input_ids.shape[1]
    return found


def test_prompts_are_shared_where_that_changes_no_meaning(folders, tmp_path):
    """Not by experts, whose routers count tokens, nor by rows that draw their dropout."""
    experts = str(write_llama(tmp_path / "experts", family="mixtral"))
    rows = siblings()
    ends = [max(row.nonzero()[:, 0].tolist(), default=-1) + 1 for row in rows.mask]
    saved = sum(rows.prompt_lengths[row] for row in (2, 7, 9))  # rows 4 and 8 are not read; 6 has a prompt of its own
    found = run_on_ranks(1, num_tokens, folders | {"experts": experts})[0]
    assert found == {
        "scoring, training": sum(ends) - saved,
        "scoring, scoring": sum(ends) - saved,
        "dropout, training": sum(ends),
        "dropout, scoring": sum(ends) - saved,
        "experts, training": int(rows.lengths.sum()),
        "experts, scoring": int(rows.lengths.sum()),
    }
