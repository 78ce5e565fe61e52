"""`megarlhf serve`: answers over HTTP equal the local scorers', and everything that cannot be answered is refused."""

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from megarlhf.commands.serve import Desk, ServeRun, build, listen, main, require_valid
from megarlhf.config.corpus import Corpus
from megarlhf.config.runs import DPORun, KTORun
from megarlhf.config.settings import (
    Actor,
    CorpusRun,
    Critic,
    Data,
    Optimizer,
    PPORun,
    Reference,
    Reward,
    Rollout,
    Run,
    Trainee,
)
from megarlhf.data.corpus import read_scored
from megarlhf.data.tokenizer import Tokenizer
from megarlhf.engines.scorer import LogprobScorer, RewardModelScorer
from megarlhf.errors import ConfigError, RemoteError
from megarlhf.loop.launch import run_training
from megarlhf.loop.preflight import preflight
from megarlhf.loop.remote import remote_reference
from megarlhf.loop.scoring import reward_scores
from megarlhf.models.score_config import score_rule
from megarlhf.records.metrics import merge_metrics, metric_results
from tests.distributed.pool import free_port
from tests.engines.layouts import frozen_batch
from tests.tiny import write_llama, write_tokenizer

TEXTS = ["Hello", "x", "What is 2+2?"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("serve")
    return {"reward": write_llama(root / "reward", num_labels=1), "reference": write_llama(root / "reference", seed=4)}


@contextmanager
def serving(folder, settings: ServeRun):
    """The command's server and desk in this process, the model worked by a thread; yields (served, url)."""
    served, desk = build(str(folder), settings, 1), Desk()
    worker = threading.Thread(target=desk.work, args=(served,), daemon=True)
    worker.start()
    with listen(served, settings, desk) as server:
        yield served, server.url
    desk.close()
    worker.join(10)


@pytest.fixture(scope="module")
def reward(folders, single_rank):
    with serving(folders["reward"], ServeRun(role="reward")) as found:
        yield found


@pytest.fixture(scope="module")
def reference(folders, single_rank):
    with serving(folders["reference"], ServeRun(role="reference", max_request_rows=50)) as found:
        yield found


@pytest.fixture(scope="module")
def batch():
    return frozen_batch(num_rows=5, seed=11).replace(prompts=("p",) * 5, responses=("r",) * 5, metadata=({},) * 5)


def post(url: str, body: dict) -> dict:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


def refused(url: str, body: dict) -> str:
    with pytest.raises(urllib.error.HTTPError) as error:
        post(url, body)
    return f"{error.value.code} {json.loads(error.value.read())['error']}"


def test_a_served_reward_model_scores_a_run_as_a_local_one(reward, batch):
    served, url = reward
    settings = Reward(functions=(f"{url}/score",), request_rows=2)
    scores = reward_scores(settings, None, served.tokenizer.fingerprint, lambda metrics: None)
    expected = RewardModelScorer(served.model, 4096).scores(batch)
    torch.testing.assert_close(scores.annotate(batch).score, expected, rtol=0, atol=1e-6)


def test_a_served_reference_gives_the_log_probs_of_a_local_one(reference, batch):
    served, url = reference
    asked = remote_reference(Reference(url=url, request_rows=2), served.tokenizer.fingerprint, temperature=0.7)
    expected = LogprobScorer(served.model, "logp_reference", 0.7, 4096).annotate(batch).logp_reference
    torch.testing.assert_close(asked.annotate(batch).logp_reference, expected, rtol=0, atol=1e-6)
    holes = batch.replace(mask=batch.mask & (torch.arange(batch.mask.shape[1]) % 2 == 0))
    assert torch.equal(asked.annotate(holes).logp_reference, asked.annotate(batch).logp_reference * holes.mask)


def test_texts_are_scored_as_their_tokens(reward):
    served, url = reward
    tokenizer = served.tokenizer
    chat = [{"role": "user", "content": "Hi"}]
    texts = post(f"{url}/score", {"prompts": [*TEXTS, chat], "responses": ["one", "", "four", "Yes"]})["scores"]
    ids = {
        "prompt_ids": [tokenizer.encode_prompt(prompt) for prompt in [*TEXTS, chat]],
        "response_ids": [tokenizer.encode_plain(text) for text in ["one", "", "four", "Yes"]],
    }
    assert texts == post(f"{url}/score", ids)["scores"] and len(set(texts)) == 4
    ended = post(f"{url}/score", {"prompts": ["x"], "responses": ["y"], "finished": [True]})["scores"]
    whole = {"prompt_ids": [tokenizer.encode_prompt("x")], "response_ids": [tokenizer.encode_plain("y") + [0]]}
    assert ended == post(f"{url}/score", whole)["scores"]


def test_texts_are_read_as_rm_reads_them(reward, tmp_path):
    """A Llama tokenizer begins every text that it is given with a blank; an answer behind its prompt has none."""
    folder = write_tokenizer(tmp_path)
    tokenizer_json = json.loads((folder / "tokenizer.json").read_text())
    tokenizer_json["normalizer"] = {"type": "Prepend", "prepend": "_"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    served = replace(reward[0], tokenizer=Tokenizer(folder))
    chat = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": prompt, "response": text, "score": 1} for prompt, text in (("x", "y z"), (chat, "yo"), ("a", ""))
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    learnt = read_scored(Corpus(str(tmp_path / "rows.jsonl")), served.tokenizer)
    body = {"prompts": ["x", chat, "a"], "responses": ["y z", "yo", ""], "finished": [True] * 3}
    asked = served.question(body).rows
    for row, example in enumerate(learnt):
        assert (
            tuple(asked.tokens[row, : asked.lengths[row]].tolist()) == example.prompt_ids + example.answers[0].token_ids
        )
    characters = ["_", "x", "y", " ", "z"]
    assert asked.tokens[0, :6].tolist() == [*(ord(character) - 28 for character in characters), 0]
    unfinished = served.question(body | {"finished": [False] * 3}).rows
    assert unfinished.lengths.tolist()[::2] == [5, 2]


def test_ids_of_another_tokenizer_are_passed_over_for_the_texts(reward):
    _, url = reward
    body = {"prompts": ["x"], "responses": ["y"]}
    foreign = body | {"prompt_ids": [[50_000]], "response_ids": [[1, 2, 3]], "tokenizer": "another"}
    assert post(f"{url}/score", foreign) == post(f"{url}/score", body)
    del foreign["prompts"]
    assert "of another tokenizer" in refused(f"{url}/score", foreign)


def test_many_clients_at_once_each_get_their_own_answer(reference):
    _, url = reference
    bodies = [{"prompt_ids": [[5, 6]], "response_ids": [[7, 8 + i]]} for i in range(8)]
    alone = [post(f"{url}/logprobs", body) for body in bodies]
    together: dict[int, dict] = {}
    threads = [
        threading.Thread(target=lambda i=i: together.update({i: post(f"{url}/logprobs", bodies[i])})) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert [together[i] for i in range(8)] == alone
    assert post(f"{url}/logprobs", {"prompt_ids": [], "response_ids": []}) == {"logprobs": []}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "send prompt_ids and response_ids; the keys sent are []"),
        ({"prompts": ["a"], "responses": ["b"]}, "send prompt_ids"),
        ({"prompt_ids": [[1]]}, "response_ids: a NoneType; send a list"),
        ({"prompt_ids": [[1]], "response_ids": []}, "1 prompts and 0 responses"),
        ({"prompt_ids": [[1]], "response_ids": [[True]]}, "response_ids[0]: send a list of token ids"),
        ({"prompt_ids": [[1], [-1]], "response_ids": [[1], [1]]}, "prompt_ids[1]: send a list of token ids"),
        ({"prompt_ids": [[1]], "response_ids": [[1.0]]}, "response_ids[0]: send a list of token ids"),
        ({"prompt_ids": [[]], "response_ids": [[1]]}, "row 0: the prompt has no token"),
        ({"prompt_ids": [[1]], "response_ids": [[101]]}, "row 0: id 101; the model's ids end at 100"),
        ({"prompt_ids": [[1] * 100], "response_ids": [[1] * 29]}, "row 0: 129 tokens; the model reads 128"),
        ({"prompt_ids": [[1]], "response_ids": [[1]], "temperature": 0}, "temperature: 0"),
        ({"prompt_ids": [[1]], "response_ids": [[1]], "tokenizer": "x"}, "of another tokenizer"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_words(reference, body, words):
    found = refused(f"{reference[1]}/logprobs", body)
    assert found.startswith("400 ") and words in found


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompts": ["a"], "responses": [3]}, "responses[0]: a int; send a text"),
        ({"prompts": [None], "responses": ["b"]}, "prompts[0]: a NoneType"),
        ({"prompts": [[]], "responses": ["b"]}, "prompts[0]: messages is empty"),
        ({"prompts": [""], "responses": ["b"]}, "row 0: the prompt has no token"),
        ({"prompts": ["\ud800"], "responses": ["b"]}, "prompts[0]: it holds half of a surrogate pair"),
        ({"prompts": ["a"], "responses": ["b\udfff"]}, "responses[0]: it holds half of a surrogate pair"),
        ({"prompts": ["a", "b"], "responses": ["b"]}, "prompts: 2 entries for 1 responses"),
        ({"prompts": ["a"], "responses": ["b"], "finished": []}, "finished: 0 entries for 1 responses"),
    ],
)
def test_texts_that_cannot_be_scored_are_refused_in_words(reward, body, words):
    found = refused(f"{reward[1]}/score", body)
    assert found.startswith("400 ") and words in found


def test_a_request_of_too_many_rows_is_refused(reference):
    rows = {"prompt_ids": [[1]] * 51, "response_ids": [[1]] * 51}
    assert (
        refused(f"{reference[1]}/logprobs", rows) == "413 51 rows are more than the 50 that this server takes at once"
    )


def test_each_role_answers_its_own_path_only(reward, reference):
    assert "404 /logprobs: nothing is here; this server answers GET /health, POST /score" in refused(
        f"{reward[1]}/logprobs", {}
    )
    with urllib.request.urlopen(f"{reference[1]}/health", timeout=5) as answer:
        health = json.loads(answer.read())
    assert (health["role"], health["path"], health["model"]) == ("reference", "/logprobs", "reference")


def test_a_server_that_cannot_be_the_reference_is_found_out_before_the_run(reward, reference):
    for url, fingerprint, words in [
        (reward[1], reward[0].tokenizer.fingerprint, "its role is 'reward'; serve the model with --role reference"),
        (reference[1], "another", "differs from the actor's"),
        (f"http://127.0.0.1:{free_port()}", "any", "cannot be reached"),
    ]:
        with pytest.raises(ConfigError, match=f"reference.url: rank 0: {url}/health.*{words}"):
            remote_reference(Reference(url=url, retries=0), fingerprint, 1.0)


def test_a_reference_that_goes_away_stops_the_run(folders, single_rank, batch):
    with serving(folders["reference"], ServeRun(role="reference")) as (served, url):
        asked = remote_reference(Reference(url=url, retries=0), served.tokenizer.fingerprint, 1.0)
    with pytest.raises(RemoteError, match="reference.url: rank 0: .*cannot be reached"):
        asked.annotate(batch)


def test_a_run_that_asks_for_scores_and_reference_is_the_run_that_keeps_them(reward, reference, folders, tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS * 2))
    actor = Actor(model=str(write_llama(tmp_path / "actor", seed=2)), optimizer=Optimizer(learning_rate=1e-3))
    here = PPORun(
        actor=actor,
        critic=Critic(model=actor.model),
        reference=Reference(model=str(folders["reference"])),
        reward=Reward(model=str(folders["reward"])),
        rollout=Rollout(batch_size=4, max_new_tokens=6),
        data=Data(prompts=str(tmp_path / "prompts.jsonl"), max_prompt_tokens=16),
        run=Run(dir=str(tmp_path / "here"), steps=2, sample_texts=0, tensorboard=False),
    )
    elsewhere = replace(
        here,
        reference=Reference(url=reference[1]),
        reward=Reward(functions=(f"{reward[1]}/score",), request_rows=3),
        run=replace(here.run, dir=str(tmp_path / "elsewhere")),
    )
    kept, asked = metrics_of(here), metrics_of(elsewhere)
    for name in ("objective/scores", "objective/kl", "loss/policy_avg", "loss/value_avg", "gradient_norm/actor"):
        assert [row[name] for row in asked] == pytest.approx([row[name] for row in kept], abs=1e-5), name
    source = f"reward/{reward[1].removeprefix('http://')}/score"
    assert [row[source] for row in asked] == pytest.approx([row["reward/model"] for row in kept], abs=1e-5)
    assert kept[0]["objective/kl"] != 0


@pytest.mark.parametrize("command", ["dpo", "kto"])
def test_preferences_are_learnt_with_a_reference_that_is_asked_as_with_one_that_is_kept(
    command, reference, folders, tmp_path
):
    rows = [
        {"prompt": text, "response": text[::-1], "label": bool(number % 2), "chosen": "yes", "rejected": text}
        for number, text in enumerate(TEXTS * 3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    actor = Trainee(model=str(write_llama(tmp_path / "actor", seed=2)), optimizer=Optimizer(learning_rate=1e-3))
    here = {"dpo": DPORun, "kto": KTORun}[command](
        actor=actor,
        reference=Reference(model=str(folders["reference"])),
        data=Corpus(path=str(tmp_path / "rows.jsonl"), batch_size=4, max_tokens=64),
        run=CorpusRun(dir=str(tmp_path / "here"), sample_texts=0, tensorboard=False),
    )
    elsewhere = replace(
        here,
        reference=Reference(url=reference[1], request_rows=3),
        run=replace(here.run, dir=str(tmp_path / "elsewhere")),
    )
    kept, asked = metrics_of(here, command), metrics_of(elsewhere, command)
    for here_row, there_row in zip(kept, asked, strict=True):
        names = [name for name in here_row if name.startswith(("loss/", "rewards/", "gradient_norm/"))]
        assert {f"loss/{command}_avg", "gradient_norm/actor"} <= set(names)
        found = {name: there_row[name] for name in names}
        assert found == pytest.approx({name: here_row[name] for name in names}, abs=1e-5, rel=1e-5)
    assert abs(kept[0]["rewards/chosen"]) > 1e-3, "the reference is another model"


def test_scores_are_normalised_and_combined_and_raw_ones_told(single_rank, batch, tmp_path):
    """Two labels, by hand; the run that keeps the reward model has the same scores, and tells what each label said."""
    statistics = {"megarlhf_score_mean": [1.0, -2.0], "megarlhf_score_std": [0.5, 4.0]}
    names = {"id2label": {"0": "kind", "1": "short"}}
    folder = write_llama(tmp_path / "labels", num_labels=2, **names, **statistics)
    with pytest.raises(ConfigError, match="--attribute_weights: 0 weights, but .* has 2 labels"):
        require_valid(str(folder), ServeRun(), 1)
    settings = ServeRun(attribute_weights=(2.0, -1.0))
    require_valid(str(folder), settings, 1)
    with serving(folder, settings) as (served, url):
        answer = post(f"{url}/score", {"prompts": TEXTS, "responses": TEXTS})
        remote = Reward(functions=(f"{url}/score",))
        asked = reward_scores(remote, None, served.tokenizer.fingerprint, lambda metrics: None).annotate(batch)
        with urllib.request.urlopen(f"{url}/health", timeout=5) as health:
            told = json.loads(health.read())
    assert told["labels"] == ["kind", "short"] and told["is_normalised"] is True
    expected = [2 * (kind - 1) / 0.5 - (short + 2) / 4 for kind, short in answer["raw_scores"]]
    assert answer["scores"] == pytest.approx(expected, abs=1e-5)
    reported: list = []
    rule = score_rule(folder, (2.0, -1.0), normalise=True)
    judge = RewardModelScorer(served.model, 4096, rule)
    kept = reward_scores(Reward(model=str(folder)), judge, "", reported.append).annotate(batch)
    torch.testing.assert_close(kept.score, asked.score, rtol=0, atol=1e-5)
    raw, metrics = judge.raw_scores(batch), metric_results(merge_metrics(reported))
    assert metrics["reward/model/short"] == pytest.approx(float(raw[:, 1].mean()), abs=1e-5)
    assert metrics["reward/model"] == pytest.approx(float(kept.score.mean()), abs=1e-5)
    with serving(folder, replace(settings, normalise=False)) as (_, url):
        plain = post(f"{url}/score", {"prompts": TEXTS, "responses": TEXTS})
    assert plain["scores"] == pytest.approx([2 * kind - short for kind, short in plain["raw_scores"]], abs=1e-5)


def metrics_of(settings, command: str = "ppo") -> list[dict]:
    assert preflight(settings, 1) == []
    run_training(command, settings, 0, 1)
    with open(f"{settings.run.dir}/metrics.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def test_everything_wrong_is_told_before_anything_is_loaded(folders, tmp_path):
    with pytest.raises(ConfigError) as error:
        main(["--tp", "0", "--port", "70000", "--token_file", str(tmp_path / "none"), "--max_request_bytes", "0"])
    for words in ("MODEL_DIR", "--tp 0", "--port 70000", "--token_file: ", "--max_request_bytes 0"):
        assert words in str(error.value)
    for role, other in (("reward", "reference"), ("reference", "reward")):
        with pytest.raises(ConfigError, match=f"--role {role}: .*; use --role {other}"):
            require_valid(str(folders[other]), ServeRun(role=role), 1)
    with pytest.raises(ConfigError, match="tp 3(.|\n)*torchrun --nproc-per-node 3"):
        require_valid(str(folders["reward"]), ServeRun(tp=3), 1)
    mute = write_llama(tmp_path / "mute", num_labels=1)
    (mute / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="^MODEL_DIR: .* holds no tokenizer"):
        require_valid(str(mute), ServeRun(), 1)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_command_serves_until_it_is_told_to_stop(folders, single_rank, tmp_path, ranks):
    (tmp_path / "token").write_text("s3cret")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if ranks == 2 else []
    words = ["serve", str(folders["reward"]), "--token_file", str(tmp_path / "token"), "--tp", str(ranks)]
    process = subprocess.Popen(
        [sys.executable, *launcher, "-m", "megarlhf", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()},
    )
    try:
        line = process.stdout.readline()
        assert line.startswith(f"reward {folders['reward']} at http://127.0.0.1:"), line
        url = line.split()[3].rstrip(":")
        assert refused(f"{url}/score", {}).startswith("401 ")
        settings = Reward(functions=(f"{url}/score",), token_file=str(tmp_path / "token"), request_rows=2)
        batch = frozen_batch(num_rows=5, seed=11).replace(prompts=("p",) * 5, responses=("r",) * 5, metadata=({},) * 5)
        fingerprint, expected = local_scores(folders["reward"], batch)
        found = reward_scores(settings, None, fingerprint, lambda metrics: None).annotate(batch).score
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=40)
    # torchrun itself ends by the signal; its ranks do so in peace
    assert "serve.py" not in complaints and (ranks == 2 or process.returncode == 0), complaints


def local_scores(folder, batch) -> tuple[str, torch.Tensor]:
    served = build(str(folder), ServeRun(), 1)
    return served.tokenizer.fingerprint, RewardModelScorer(served.model, 4096).scores(batch)
