"""`megarlhf eval`: its figures against a slow count over the texts, and a reward model's scores by transformers."""

import json
import statistics
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import product
from threading import Thread

import pytest
import torch

from megarlhf import device
from megarlhf.commands.eval import EvalRun, main, require_valid, run_eval
from megarlhf.errors import ConfigError
from megarlhf.loop.evaluation import duel, mean_interval, share_interval
from tests.learning.toy import judged
from tests.tiny import write_llama

PROMPTS = ("Hello", "x", "How are", "abc")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, single_rank):
    root = tmp_path_factory.mktemp("eval")
    write_llama(root / "one", seed=1)
    write_llama(root / "other", seed=2)
    write_llama(root / "rm", num_labels=1, seed=3)
    (root / "prompts.jsonl").write_text("".join(json.dumps({"id": text, "prompt": text}) + "\n" for text in PROMPTS))
    return root


def settings(folder, tmp_path, **changes) -> EvalRun:
    return EvalRun(
        **{"prompts": str(folder / "prompts.jsonl"), "out": str(tmp_path / "out.jsonl"), "max_new_tokens": 8} | changes
    )


def run(folder, wanted: EvalRun) -> tuple[dict, list[dict]]:
    rank, world_size = device.join_world()
    require_valid(str(folder / "one"), wanted, world_size)
    numbers = dict(run_eval(str(folder / "one"), wanted, rank, world_size).numbers)
    with open(wanted.out, encoding="utf-8") as file:
        return numbers, [json.loads(line) for line in file]


def test_means_and_win_rate_are_those_of_a_slow_count(folder, tmp_path):
    wanted = settings(
        folder, tmp_path, other=str(folder / "other"), functions=("tests.loop.plugin:capitals",), samples_per_prompt=3
    )
    numbers, rows = run(folder, wanted)
    assert [(row["id"], row["sample"]) for row in rows] == [(text, sample) for text in PROMPTS for sample in range(3)]
    for row, side in product(rows, ("", "other_")):
        text = row[f"{side}response"]
        expected = sum(character.isupper() for character in text) / max(1, len(text))
        assert row[f"{side}score"] == pytest.approx(expected, abs=1e-6)
    wins = ties = 0
    for text in PROMPTS:
        mine = [row["score"] for row in rows if row["id"] == text]
        theirs = [row["other_score"] for row in rows if row["id"] == text]
        wins += sum(one > other for one, other in product(mine, theirs))
        ties += sum(one == other for one, other in product(mine, theirs))
    assert 0 < ties < 36 and 0 < wins < 36  # or this says nothing
    assert numbers["wins"] == pytest.approx(wins / 36) and numbers["ties"] == pytest.approx(ties / 36)
    assert numbers["win_rate"] == pytest.approx((wins + ties / 2) / 36)
    gaps = [
        statistics.fmean(row["score"] - row["other_score"] for row in rows if row["id"] == text) for text in PROMPTS
    ]
    error = 1.96 * statistics.stdev(gaps) / len(gaps) ** 0.5
    assert numbers["difference"] == pytest.approx(statistics.fmean(gaps))
    assert numbers["difference_high"] - numbers["difference"] == pytest.approx(error, rel=1e-4)


def test_a_model_ties_with_itself(folder, tmp_path):
    result = tmp_path / "result.json"
    wanted = settings(folder, tmp_path, other=str(folder / "one"), functions=("length",), result=str(result))
    numbers, rows = run(folder, wanted)
    assert all(row["response"] == row["other_response"] for row in rows)
    assert (numbers["ties"], numbers["win_rate"], numbers["difference"]) == (1.0, 0.5, 0.0)
    assert json.loads(result.read_text())["win_rate"] == 0.5


def test_a_reward_models_scores_are_those_of_transformers(folder, tmp_path):
    numbers, rows = run(folder, settings(folder, tmp_path, rm=str(folder / "rm"), max_new_tokens=60, normalise=False))
    # A character is a token; what has fewer characters was sampled with special tokens, which no text shows.
    ended = [row for row in rows if row["finished"] and len(row["response"]) + 1 == row["tokens"]]
    assert ended and len(rows) == len(PROMPTS)
    expected = torch.cat([judged(folder / "rm", [row["prompt"]], [row["response"]]) for row in ended])
    torch.testing.assert_close(torch.tensor([row["score"] for row in ended]), expected, rtol=0, atol=1e-4)
    assert numbers["score"] == pytest.approx(statistics.fmean(row["score"] for row in rows))
    assert "win_rate" not in numbers


class _Judge(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": [float(len(text)) for text in body["responses"]]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_):
        pass


def test_a_served_judge_is_asked(folder, tmp_path):
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Judge)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/score"
        _, rows = run(folder, settings(folder, tmp_path, functions=(url,)))
    finally:
        server.shutdown()
    assert [row["score"] for row in rows] == [len(row["response"]) for row in rows]


def test_intervals_of_known_figures():
    # 8 of 10: Wilson's interval in any table of it; 10 of 10 keeps a width.
    found = share_interval(0.8, 10)
    assert (found.low, found.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert share_interval(1.0, 10).low == pytest.approx(0.7225, abs=1e-4)
    found = mean_interval(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert (found.mean, found.high) == (2.5, pytest.approx(2.5 + 1.96 * 1.2910 / 2, abs=1e-3))
    alone = mean_interval(torch.tensor([2.0])).numbers("score")
    assert alone == {"score": 2.0, "score_low": None, "score_high": None}, "JSON has no NaN"
    close = duel(torch.tensor([[1.0], [2.0]]), torch.tensor([[1.1], [0.0]]), tie_margin=0.2)
    assert (close.wins, close.ties, close.losses, close.win_rate.mean) == (0.5, 0.5, 0.0, 0.75)


def test_what_is_wrong_is_told_at_once(folder, tmp_path):
    with pytest.raises(ConfigError) as error:
        main([str(folder / "one"), str(folder / "rm"), "--rm", str(folder / "other"), "--functions", "nothing"])
    told = "\n".join(error.value.violations)
    for words in ("--prompts: not given", "OTHER_DIR: ", "--rm: ", "has no score head", "--functions: "):
        assert words in told, told
    for result, words in ((tmp_path, "is a folder"), (tmp_path / "out.jsonl", "is --out too")):
        with pytest.raises(ConfigError, match=f"--result: .* {words}"):
            require_valid(str(folder / "one"), settings(folder, tmp_path, functions=("f:g",), result=str(result)), 1)
    with pytest.raises(ConfigError, match="neither --rm nor --functions is given"):
        require_valid(str(folder / "one"), settings(folder, tmp_path), 1)
