"""`megarlhf serve`: a reward model or reference that answers over HTTP, so that it can live outside the run.

HTTP threads check requests and queue them; the main thread of every rank works them off, one at a time.
"""

import signal
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from threading import Lock
from typing import Any, Literal

from megarlhf.config.layout import Layout
from megarlhf.config.settings import Precision
from megarlhf.errors import ConfigError
from megarlhf.loop.inference import agreed, launch_violations, load_model, tokenizer_violations

SUMMARY = "answer scores or log-probs over HTTP: megarlhf serve MODEL_DIR --role reward|reference [--flags]"

MAX_WAITING = 256
"""Requests that may wait for the model; a further one is told to come back later (503)."""
NEVER_S = timedelta(days=365).total_seconds()
"""Ranks other than the first wait in a broadcast until somebody asks something."""


@dataclass(frozen=True)
class ServeRun:
    """Settings of `megarlhf serve`."""

    role: Literal["reward", "reference"] = "reward"
    """reward: POST /score answers a score for each response. reference: POST /logprobs answers the log-prob of each
    response token."""
    attribute_weights: tuple[float, ...] = ()
    """For a reward model with several labels: the weight of each, in their order, in the sum that is the score."""
    normalise: bool = True
    """Shift and scale a reward model's scores by the mean and deviation in its config.json, where it has them; the
    answer's raw_scores are without."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for other machines too."""
    port: int = 0
    """Port to listen at; 0: a free one, which is printed."""
    token_file: str = ""
    """File with a token that requests must bring (Authorization: Bearer); empty: none. A file, because command lines
    are seen by every user of the machine."""
    max_request_bytes: int = 64 * 2**20
    """A longer request is refused."""
    max_request_rows: int = 1024
    """A request with more responses is refused."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one micro-batch."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages. What is left of the launched ranks after tp * pp shares the rows (dp)."""
    dtype: Precision = "float32"
    """Precision of weights and activations."""


def main(argv: Sequence[str]) -> int:
    """Serves until interrupted or terminated; returns the exit code. Runs on every rank of the launch."""
    model, settings, store = agreed("serve", ServeRun, require_valid, argv)
    from megarlhf import device

    rank, world_size = device.join_world(timeout_s=NEVER_S, store=store)
    desk = Desk()
    # Rank 0 stops at a signal and takes the others along; the handler may run in the middle of anything, which
    # SimpleQueue allows for.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, (lambda *_: desk.close()) if rank == 0 else signal.SIG_IGN)
    served = build(model, settings, world_size)
    if rank == 0:
        with listen(served, settings, desk) as server:
            print(f"{settings.role} {model} at {server.url}: POST {served.path}, GET /health", flush=True)
            desk.work(served)
    else:
        desk.work(served)
    device.leave_world()
    return 0


def require_valid(model: str, settings: ServeRun, world_size: int) -> None:
    """Raises ConfigError with everything that can be known to be wrong before a rank is joined or weights are read."""
    from megarlhf.models.architecture import Architecture, layout_violations
    from megarlhf.models.score_config import score_rule, weight_violations
    from megarlhf.rewards.remote import read_token

    violations = [] if model else ["MODEL_DIR: not given; name the model's folder: megarlhf serve MODEL_DIR ..."]
    for name in ("max_request_bytes", "max_request_rows", "micro_batch_tokens", "tp", "pp"):
        if vars(settings)[name] < 1:
            violations.append(f"--{name} {vars(settings)[name]}: use 1 or more")
    if not 0 <= settings.port < 2**16:
        violations.append(f"--port {settings.port}: use 0 to 65535")
    try:
        read_token("--token_file", settings.token_file)
    except ConfigError as error:
        violations += error.violations
    if violations:
        raise ConfigError(violations)
    violations += launch_violations("serve", settings.tp, settings.pp, world_size)
    architecture = Architecture.from_folder(model)
    violations += layout_violations(architecture, Layout(tp=settings.tp, pp=settings.pp), "serve")
    if bool(architecture.num_labels) != (settings.role == "reward"):
        kind = "a model with a score head" if architecture.num_labels else "a language model without a score head"
        other = "reference" if settings.role == "reward" else "reward"
        violations.append(f"--role {settings.role}: {model} is {kind}; use --role {other}, or another model")
    elif settings.role == "reward":
        violations += weight_violations(architecture, settings.attribute_weights, "--attribute_weights", model)
    violations += tokenizer_violations("MODEL_DIR", model)
    if violations:
        raise ConfigError(violations)
    if settings.role == "reward":
        score_rule(model, settings.attribute_weights, normalise=settings.normalise)


def build(model_folder: str, settings: ServeRun, world_size: int):
    """The `Served` model with its weights. Collective over the world."""
    from megarlhf.data.tokenizer import Tokenizer
    from megarlhf.loop.serving import Served
    from megarlhf.models.names import Head
    from megarlhf.models.score_config import ScoreRule, score_rule

    head: Head = "value" if settings.role == "reward" else "vocabulary"
    model = load_model(model_folder, settings.tp, settings.pp, settings.dtype, world_size, head)
    rule = ScoreRule()
    if settings.role == "reward":
        rule = score_rule(model_folder, settings.attribute_weights, normalise=settings.normalise)
    tokenizer = Tokenizer(model_folder)
    return Served(settings.role, model, tokenizer, settings.micro_batch_tokens, settings.max_request_rows, rule)


def listen(served, settings: ServeRun, desk: "Desk"):
    """The HTTP server (a context manager) that puts what it is asked on the desk."""
    from megarlhf.rewards.remote import read_token
    from megarlhf.rewards.server import JsonServer

    routes = {
        ("GET", "/health"): lambda body: served.health(),
        ("POST", served.path): lambda body: desk.ask(served, body),
    }
    token = read_token("--token_file", settings.token_file)
    return JsonServer(settings.host, settings.port, routes, token=token, max_request_bytes=settings.max_request_bytes)


class Desk:
    """Where HTTP threads leave questions for the main threads of all ranks, and wait for the answers."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue = SimpleQueue()
        self._reading = Lock()

    def ask(self, served, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request's body; called in any thread of rank 0. Raises Refusal."""
        from megarlhf.rewards.server import Refusal

        with self._reading:  # tokenizers do not like to be shared by threads
            question = served.question(body)
        if self._waiting.qsize() >= MAX_WAITING:
            raise Refusal(503, f"{MAX_WAITING} requests are waiting; come back later")
        answer: Future = Future()
        self._waiting.put((question, answer))
        return answer.result()

    def close(self) -> None:
        """Ends `work`, on all ranks, once what was asked before is answered."""
        self._waiting.put(None)

    def work(self, served) -> None:
        """Answers until closed. Collective over the world: rank 0's questions are broadcast to all."""
        import torch.distributed as dist

        while True:
            job = self._waiting.get() if dist.get_rank() == 0 else None
            questions = [job and job[0]]
            dist.broadcast_object_list(questions, src=0)
            if questions[0] is None:
                dist.barrier()  # nobody leaves before the others have heard it
                return
            try:
                result = served.answer(questions[0])
            except Exception as error:
                if job:
                    job[1].set_exception(error)
                if dist.get_world_size() > 1:  # the ranks are out of step
                    raise
                continue
            if job:
                job[1].set_result(result)
