"""Rewards from a server: what is sent, what is accepted back, and what happens when it does not answer well."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest

from megarlhf.config.settings import Reward
from megarlhf.errors import ConfigError, RemoteError, RewardError
from megarlhf.records.experience import Experience
from megarlhf.rewards import remote
from megarlhf.rewards.remote import Endpoint, check_url, is_finite_number, read_token
from megarlhf.rewards.server import JsonServer, Refusal
from megarlhf.rewards.sources import names, sources

RESPONSES = ["a", "bb", "", "dddd", "é\n"]


def batch() -> Experience:
    return Experience.from_completions(
        [[5, 6], [7], [5], [5], [5]],
        [[1], [2, 2], [], [3, 4], [9]],
        None,
        row_id=range(5),
        group=range(5),
        finished=[True, False, True, True, True],
        prompts=["p", "q", "r", "s", "t"],
        responses=RESPONSES,
        metadata=[{"id": f"row{i}", "answer": i} for i in range(5)],
    )


def serve(route, token: str = "", max_request_bytes: int = 10_000) -> JsonServer:
    return JsonServer("127.0.0.1", 0, {("POST", "/score"): route}, token=token, max_request_bytes=max_request_bytes)


def source(url: str, **settings):
    return sources(Reward(functions=(url + "/score",), **settings), "fingerprint")[0]


@pytest.fixture
def no_pause(monkeypatch):
    monkeypatch.setattr(remote, "FIRST_PAUSE_S", 0.01)


def test_rows_are_sent_in_requests_of_the_chosen_size_and_scored_in_order():
    bodies = []

    def lengths(body):
        bodies.append(body)
        return {"scores": [len(text) for text in body["responses"]]}

    with serve(lengths) as server:
        scores = source(server.url, request_rows=2).scores(batch())
    assert scores.tolist() == [1.0, 2.0, 0.0, 4.0, 2.0]
    assert [len(body["prompts"]) for body in bodies] == [2, 2, 1]
    assert bodies[0] == {
        "prompts": ["p", "q"],
        "responses": ["a", "bb"],
        "metadata": [{"id": "row0", "answer": 0}, {"id": "row1", "answer": 1}],
        "finished": [True, False],
        "tokenizer": "fingerprint",
        "prompt_ids": [[5, 6], [7]],
        "response_ids": [[1], [2, 2]],
    }
    assert bodies[1]["response_ids"] == [[], [3, 4]] and bodies[2]["responses"] == ["é\n"]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"score": [1] * 5}, r"has no 'scores'; its keys are \['score'\] \(samples 'row0'"),
        ({"scores": [1, 2]}, "'scores' holds 2 values; 5 were asked for"),
        ({"scores": 3}, "'scores' holds a int"),
        ({"scores": [1, 2, 3, 4, "5"]}, "returned a str for sample 'row4'"),
        ({"scores": [1, 2, 3, 4, float("nan")]}, "returned nan for sample 'row4'"),
        ({"scores": [1, 2, 3, 4, None]}, "returned None for sample 'row4'"),
        ({"scores": [1, 2, 3, 4, 10**400]}, "returned inf for sample 'row4'"),
    ],
)
def test_anything_but_one_number_per_response_is_refused(answer, complaint):
    with serve(lambda body: answer) as server, pytest.raises(RewardError, match=complaint):
        source(server.url).scores(batch())


def test_an_overloaded_server_is_asked_again_after_growing_pauses(no_pause):
    times = []

    def third_time(body):
        times.append(time.monotonic())
        if len(times) < 4:
            raise Refusal(503, "busy")
        return {"scores": [0.5] * 5}

    with serve(third_time) as server:
        assert source(server.url, retries=3).scores(batch()).tolist() == [0.5] * 5
        times.clear()
        with pytest.raises(RewardError, match=r"HTTP 503 Service Unavailable: busy \(3 tries\)"):
            source(server.url, retries=2).scores(batch())
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert len(gaps) == 2 and gaps[0] >= 0.01 and gaps[1] >= 0.02


def test_a_request_that_can_never_succeed_is_made_once(no_pause):
    calls = []

    def refuse(body):
        calls.append(body)
        raise Refusal(400, "row 3: too long")

    with serve(refuse) as server, pytest.raises(RewardError, match="HTTP 400 Bad Request: row 3: too long"):
        source(server.url, retries=5).scores(batch())
    assert len(calls) == 1


def test_a_server_that_fails_says_why(no_pause, caplog):
    with serve(lambda body: {"scores": [1 / 0]}) as server, pytest.raises(RewardError, match="ZeroDivisionError"):
        source(server.url).scores(batch())


def test_nobody_there_and_no_answer_in_time_are_told_apart(no_pause):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RewardError, match=r"cannot be reached: .*refused"):
            source(url).scores(batch())
        silent.listen()
        with pytest.raises(RewardError, match=r"no answer within 0.1 s \(2 tries\)"):
            source(url, timeout_s=0.1, retries=1).scores(batch())


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\n\r\n<html>", b"HTTP/1.1 200 OK\r\n\r\n[1]", b"nonsense\r\n\r\n"]
)
def test_what_is_not_a_json_object_is_not_believed(answer, no_pause):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()

        def reply():
            connection, _ = listener.accept()
            with connection:
                connection.recv(10_000)
                connection.sendall(answer)

        thread = threading.Thread(target=reply, daemon=True)
        thread.start()
        with pytest.raises(RemoteError, match="not JSON|instead of an object|cannot be reached"):
            Endpoint(f"http://127.0.0.1:{listener.getsockname()[1]}/score", 5.0).post({})
        thread.join(5)


def test_a_request_that_cannot_be_made_is_an_error_of_its_own(no_pause):
    with pytest.raises(RemoteError, match="cannot be written as JSON"):
        Endpoint("http://127.0.0.1:1/score", 5.0).post({"metadata": [float("nan")]})
    with pytest.raises(RemoteError, match="cannot be (asked|reached)"):
        Endpoint(f"http://{'a' * 80}.b/score", 5.0).post({})
    with serve(lambda body: {"scores": [1] * 5}) as server:
        assert source(server.url, timeout_s=1e18).scores(batch()).tolist() == [1.0] * 5


def test_a_token_is_asked_for_and_sent(tmp_path):
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    with serve(lambda body: {"scores": [1] * 5}, token="s3cret") as server:
        assert source(server.url, token_file=str(path)).scores(batch()).tolist() == [1.0] * 5
        with pytest.raises(RewardError, match="HTTP 401 Unauthorized: send the server's token"):
            source(server.url).scores(batch())
        path.write_text("s3cre")
        with pytest.raises(RewardError, match="HTTP 401"):
            source(server.url, token_file=str(path)).scores(batch())


def status(url: str, data: bytes | None, **headers: str) -> tuple[int, dict]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, headers=headers), timeout=5) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_every_refusal_has_a_status_and_a_sentence():
    with serve(lambda body: body, max_request_bytes=100) as server:
        score = server.url + "/score"
        assert status(score, b'{"a": [1]}') == (200, {"a": [1]})
        for code, words, data, url in [
            (404, "this server answers POST /score", b"{}", server.url + "/logprobs"),
            (405, "/score is asked by POST", None, score),
            (400, "not JSON", b"{", score),
            (400, "not JSON", b"\xff", score),
            (400, "is a list; send an object", b"[]", score),
            (413, "more than the 100", b" " * 101, score),
        ]:
            found = status(url, data)
            assert found[0] == code and words in found[1]["error"], found
        assert status(score, b"[" * 100)[0] == 400


def raw(server: JsonServer, request: bytes) -> bytes:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(4096), b""))


@pytest.mark.parametrize("length", [b"", b"Content-Length: -1\r\n", b"Content-Length: 1e3\r\n"])
def test_a_body_without_a_length_is_refused(length):
    with serve(lambda body: body) as server:
        assert b" 411 " in raw(server, b"POST /score HTTP/1.1\r\n" + length + b"\r\n{}").splitlines()[0]
        assert b" 400 " in raw(server, b"POST /score HTTP/1.1\r\nContent-Length: 9\r\n\r\n{}").splitlines()[0]


def test_an_address_or_token_that_cannot_be_used_is_a_settings_error(tmp_path):
    for url in (
        "http://",
        "ftp://host/score",
        "http://host:port/score",
        "http://a b/score",
        "http://hé/score",
        "http://[::1/score",
    ):
        with pytest.raises(ConfigError, match="reward.functions: .* is not an address"):
            check_url("reward.functions", url)
    (tmp_path / "two").write_text("two words")
    for name, complaint in (("none", "cannot be read as a token"), ("two", "must hold one token")):
        with pytest.raises(ConfigError, match=f"reward.token_file: .*{complaint}"):
            read_token("reward.token_file", str(tmp_path / name))


def test_a_port_that_is_taken_is_a_settings_error():
    with serve(lambda body: body) as server, pytest.raises(ConfigError, match="cannot listen there"):
        JsonServer("127.0.0.1", int(server.url.rpartition(":")[2]), {}, token="", max_request_bytes=1)


def test_sources_are_named_by_what_they_are():
    specs = ["length", "my.rewards:polite", "format(a:b)", "http://me@127.0.0.1:80/score", "length", "other:polite"]
    assert names(specs) == ["length", "polite", "format", "127.0.0.1:80/score", "length_2", "polite_2"]


def test_numbers_beyond_float32_are_no_numbers():
    """JSON spells whole numbers of any size, of which floats know nothing."""
    assert all(map(is_finite_number, (0, -1.5, 3e38, -(10**38))))
    assert not any(map(is_finite_number, (10**400, -(10**400), 1e39, float("nan"), float("inf"), True, "1", None)))
