"""The guides' code runs: rows are read, rewards are called, a family and an algorithm are added as they say."""

import importlib
import json
import re
import sys
import threading
from dataclasses import replace
from http.server import HTTPServer
from pathlib import Path

import pytest
import torch
import yaml

from megarlhf import device
from megarlhf.config.corpus import Corpus
from megarlhf.config.layout import Layout
from megarlhf.config.runs import COMMANDS, GRPORun
from megarlhf.config.settings import Actor, Data, Optimizer, Reward, Rollout, Run
from megarlhf.data import corpus
from megarlhf.data.prompts import read_prompts
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.rewards.functions import call_reward, resolve
from megarlhf.rewards.remote import Endpoint
from tests.distributed.pool import run_on_ranks
from tests.learning.toy import ANSWER_TOKENS, metrics, train, write_actor, write_prompts
from tests.tiny import tiny_config, write_tokenizer

ROOT = Path(__file__).parents[2]


def blocks(guide: str, language: str) -> dict[str, str]:
    """The guide's blocks in a language, by what stands beside its name."""
    text = (ROOT / "docs" / guide).read_text()
    return dict(re.findall(rf"^```{language} ?([^\n]*)\n(.*?)```", text, re.MULTILINE | re.DOTALL))


ROWS = blocks("data.md", "json")
READERS = {
    "sft": corpus.read_demonstrations,
    "dpo": corpus.read_preferences,
    "kto": corpus.read_labelled,
    "rm": corpus.read_scored,
}


@pytest.mark.parametrize("head", ROWS)
def test_the_rows_of_the_data_guide_are_read(head, tmp_path, tmp_path_factory):
    tokenizer_folder, file = tmp_path_factory.mktemp("tokenizer"), tmp_path / "rows.jsonl"
    write_tokenizer(tokenizer_folder)
    tokenizer = Tokenizer(tokenizer_folder)
    file.write_text(ROWS[head])
    rows = [json.loads(line) for line in ROWS[head].splitlines()]
    command, _, extra = head.partition(":")
    assert command in COMMANDS
    if command == "ppo":
        prompts = read_prompts(file, tokenizer, Data(prompts=str(file)))
        assert [prompt.metadata.get("answer") for prompt in prompts] == [row.get("answer") for row in rows]
        return
    names = yaml.safe_load(extra)["algorithm"]["attributes"] if extra else ()
    read = corpus.attributes_reader(names) if names else READERS[command]
    examples = read(Corpus(path=str(file)), tokenizer)
    assert len(examples) == len(rows) and all(example.answers for example in examples)


def test_the_reward_functions_of_the_guide_work(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(blocks("rewards.md", "python")["my_rewards"])
    monkeypatch.syspath_prepend(tmp_path)
    (settings,) = blocks("rewards.md", "yaml").values()
    scores = []
    for spec in yaml.safe_load(settings)["reward"]["functions"]:
        rows = [{"keyword": "no"}, {"keyword": "thanks"}]
        scores.append(call_reward(resolve(spec), ["p", "p"], ["yes please", "no thanks"], rows, 10.0).tolist())
    assert scores == [[1.0, 0.0], [0.0, 1.0]]
    sys.modules.pop("my_rewards")


def test_the_server_of_the_guide_answers(tmp_path, monkeypatch):
    (tmp_path / "my_server.py").write_text(blocks("rewards.md", "python")["my_server"])
    monkeypatch.syspath_prepend(tmp_path)
    server = HTTPServer(("127.0.0.1", 0), importlib.import_module("my_server").Scores)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    found = Endpoint(f"http://127.0.0.1:{server.server_port}/score", 10.0).post({"responses": ["a", "abc"]})
    server.shutdown()
    server.server_close()
    sys.modules.pop("my_server")
    assert found == {"scores": [1.0, 3.0]}


def greedy_on_rank(_rank: int, world_size: int, code: str, folder: Path, layouts: list[Layout]):
    from megarlhf.engines.generator import Generator
    from megarlhf.models.families import FAMILIES
    from megarlhf.models.model_types import MODEL_TYPES
    from tests.engines.test_generator import GREEDY, REQUESTS, build, tokens_of

    exec(code, {})
    try:
        models = [build(folder, layout, world_size) for layout in layouts]
    finally:
        del FAMILIES["seed_oss"], MODEL_TYPES["seed_oss"]  # the process is used again
    return [tokens_of(Generator(model, 4).generate(REQUESTS, GREEDY)) for model in models]


def test_the_family_of_the_guide_says_what_transformers_says(tmp_path):
    device.prepare()
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests.engines.test_generator import PROMPTS, greedy_by_transformers, load_transformers

    fields = tiny_config(family="seed_oss", attention_bias=True)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for name, weight in model.named_parameters():
        torch.nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    model.save_pretrained(tmp_path)
    expected = [greedy_by_transformers(load_transformers(tmp_path), prompt, 12) for prompt in PROMPTS]
    (code,) = blocks("adding_a_family.md", "python").values()
    for texts in run_on_ranks(2, greedy_on_rank, code, tmp_path, [Layout(), Layout(tp=2), Layout(pp=2)]):
        assert texts == [expected] * 3


def train_as_the_guide_says(rank: int, world_size: int, folder: Path, settings: GRPORun) -> None:
    from megarlhf.algorithms.catalogue import ALGORITHMS

    sys.path.append(str(folder))  # a module with a file: the help of settings is read from their source
    try:
        guide = importlib.import_module("guide_raft")
        train(rank, world_size, "raft", replace(settings, algorithm=guide.RAFT()))
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop("guide_raft", None)
        ALGORITHMS.pop("raft", None)


def test_the_algorithm_of_the_guide_learns_the_toy_task(tmp_path):
    (code,) = blocks("adding_an_algorithm.md", "python").values()
    (tmp_path / "guide_raft.py").write_text(code)
    write_actor(tmp_path / "actor")
    write_prompts(tmp_path / "prompts.jsonl")
    optimizer = Optimizer(learning_rate=3e-3)
    settings = GRPORun(
        actor=Actor(model=str(tmp_path / "actor"), optimizer=optimizer, micro_batch_tokens=256),
        reward=Reward(functions=("tests.learning.toy:favoured_share",)),
        rollout=Rollout(
            batch_size=16,
            samples_per_prompt=4,
            max_new_tokens=ANSWER_TOKENS,
            min_new_tokens=ANSWER_TOKENS,
            max_slots=32,
        ),
        data=Data(prompts=str(tmp_path / "prompts.jsonl"), max_prompt_tokens=8),
        run=Run(dir=str(tmp_path / "run"), steps=30, tensorboard=False),
    )
    run_on_ranks(2, train_as_the_guide_says, tmp_path, settings)
    scores = [row["objective/scores"] for row in metrics(tmp_path / "run")]
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.3
