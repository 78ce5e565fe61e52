"""`megarlhf revise`: what each text was sampled from, and that the file can be learnt from."""

import json
from collections import Counter
from dataclasses import replace

import pytest
import torch

from megarlhf.commands.generate import GenerateRun, run_generate
from megarlhf.commands.revise import ReviseRun, main, require_valid, run_revise
from megarlhf.config.corpus import Corpus
from megarlhf.data.corpus import read_demonstrations
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.errors import ConfigError, DataError
from megarlhf.loop.inference import Summary
from tests.distributed.pool import run_on_ranks
from tests.tiny import write_llama

TURNS = [{"role": "user", "content": "How are you?"}]
ROWS = [{"id": "first", "prompt": "Hello", "text": "metadata"}, {"messages": TURNS}]
PRINCIPLES = ("Be kind.", "Be brief.", "Be right.")
CRITIQUE = """Below are a prompt and an answer to it. Say specifically where the answer falls short of this principle:
{principle}

[Prompt]
{prompt}

[Answer]
{answer}

[End of the answer]
Where does the answer fall short of the principle? Reply with the critique only."""
REVISION = """Below are a prompt, an answer to it, and a critique of the answer by this principle:
{principle}

[Prompt]
{prompt}

[Answer]
{answer}

[Critique]
{critique}

[End of the critique]
Rewrite the answer so that it keeps to the principle and the critique no longer holds. Reply with the answer only."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_llama(tmp_path_factory.mktemp("revise") / "tiny", max_position_embeddings=2048))


@pytest.fixture
def settings(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "principles.txt").write_text("\n".join(PRINCIPLES))
    return ReviseRun(
        prompts=str(tmp_path / "prompts.jsonl"),
        out=str(tmp_path / "out.jsonl"),
        principles=str(tmp_path / "principles.txt"),
        samples_per_prompt=2,
        rounds=2,
        max_new_tokens=12,
        keep_cut=True,
    )


def revise(settings: ReviseRun, folder: str) -> tuple[Summary, list[dict]]:
    require_valid(folder, settings, 1)
    return run_revise(folder, settings, 0, 1), read(settings.out)


def read(path) -> list[dict]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_greedy_texts_are_those_of_transformers_asked_the_same(settings, folder, single_rank):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()

    def reply(text: str) -> str:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=1
        )[0, ids.shape[1] :]
        return tokenizer.decode(out, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    _, rows = revise(replace(settings, temperature=0, samples_per_prompt=1), folder)
    for row, start, prompt in zip(rows, ("Hello", "u>How are you?\na>"), ("Hello", "User: How are you?"), strict=True):
        answer = reply(start)
        assert row["answer"] == answer
        for step in row["steps"]:
            words = {"principle": step["principle"], "prompt": prompt, "answer": answer}
            assert step["critique"] == reply("u>" + CRITIQUE.format(**words) + "\na>").strip()
            revision = reply("u>" + REVISION.format(**words, critique=step["critique"]) + "\na>")
            assert step["revision"].strip() == revision.strip()
            answer = step["revision"]
        assert row["response"] == answer


def test_every_round_has_a_principle_of_its_own_and_the_seed_draws_them(settings, folder, single_rank):
    _, rows = revise(replace(settings, samples_per_prompt=6), folder)
    drawn = [tuple(step["principle"] for step in row["steps"]) for row in rows]
    assert all(len(set(one)) == 2 and set(one) <= set(PRINCIPLES) for one in drawn)
    assert len(set(drawn)) > 2
    assert revise(replace(settings, samples_per_prompt=6), folder)[1] == rows
    other = revise(replace(settings, samples_per_prompt=6, seed=1), folder)[1]
    assert [tuple(step["principle"] for step in row["steps"]) for row in other] != drawn


def test_first_answers_are_those_of_generate(settings, folder, single_rank, tmp_path):
    _, rows = revise(settings, folder)
    out = str(tmp_path / "generated.jsonl")
    run_generate(folder, GenerateRun(prompts=settings.prompts, out=out, samples_per_prompt=2, max_new_tokens=12), 0, 1)
    assert [(row["id"], row["sample"], row["answer"]) for row in rows] == [
        (row["id"], row["sample"], row["response"]) for row in read(out)
    ]


def test_the_file_is_read_as_demonstrations(settings, folder, single_rank):
    _, rows = revise(settings, folder)
    tokenizer = Tokenizer(folder)
    examples = read_demonstrations(Corpus(path=settings.out), tokenizer)
    assert [example.answers[0].text for example in examples] == [row["response"] for row in rows]
    for example, row in zip(examples, rows, strict=True):
        prompt = "Hello" if row["id"] == "first" else TURNS
        assert list(example.prompt_ids) == tokenizer.encode_prompt(prompt)
        assert example.metadata["steps"] == row["steps"]


def test_a_revision_follows_a_plain_prompt_with_the_blank_that_its_answer_had(settings, folder, single_rank):
    from megarlhf.engines.generator import Generator
    from megarlhf.loop.inference import load_model
    from megarlhf.loop.revising import Draft, Writer
    from megarlhf.records.prompts import Prompt

    writer = Writer(Generator(load_model(folder, 1, 1, "float32", 1), 4), Tokenizer(folder), settings, Counter())
    draft = Draft(Prompt(0, (5,), "Once upon"), 0, answer="  a time", principles=PRINCIPLES[:1])
    (after,) = writer.after_round([draft], 0)
    assert after.text.startswith("  ") and after.text[2] != " " and after.text == after.text.rstrip()


def test_revisions_that_were_cut_are_left_out_unless_asked_for(settings, folder, single_rank, tmp_path):
    with pytest.raises(DataError, match="0 revised answers of 4; left out: 4 cut revisions"):
        revise(replace(settings, keep_cut=False, max_new_tokens=1, min_new_tokens=1), folder)
    assert not (tmp_path / "out.jsonl").exists()


def test_answers_whose_questions_do_not_fit_the_model_are_left_out(settings, single_rank, tmp_path):
    small = str(write_llama(tmp_path / "small"))
    with pytest.raises(DataError, match="0 revised answers of 4; left out: 4 too long answers"):
        revise(settings, small)


def test_everything_wrong_is_told_at_once(folder, settings):
    with pytest.raises(ConfigError, match="--out(.|\n)*--samples_per_prompt 0(.|\n)*--rounds 9: use 1 to 8"):
        main([folder, "--samples_per_prompt", "0", "--rounds", "9"])


def revise_on_rank(rank: int, world_size: int, folder: str, settings: ReviseRun) -> Summary:
    require_valid(folder, settings, world_size)
    return run_revise(folder, settings, rank, world_size)


@pytest.mark.parametrize("layout", [{"tp": 2}, {}], ids=["tp2", "dp2"])
def test_every_layout_writes_the_same_texts(settings, folder, single_rank, tmp_path, layout):
    _, alone = revise(settings, folder)
    shared = replace(settings, out=str(tmp_path / "shared.jsonl"), **layout)
    summaries = run_on_ranks(2, revise_on_rank, folder, shared)
    assert summaries[0].numbers == summaries[1].numbers
    assert read(shared.out) == alone
