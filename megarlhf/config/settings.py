"""What a user may set: one frozen dataclass a section, one default in one place; `runs.py` has the other commands.

A YAML recipe and dotted flags (`--actor.optimizer.learning_rate 1e-6`) fill the same fields; see `load.py`.
"""

from dataclasses import dataclass, field
from typing import Literal

from megarlhf.config.algorithms import PPO
from megarlhf.config.corpus import BadRow, Texts
from megarlhf.config.layout import Layout
from megarlhf.config.lora import LoRA
from megarlhf.config.precision import FP8, Layers
from megarlhf.config.residency import CriticResidency

Precision = Literal["float32", "bfloat16"]
Recompute = Literal["none", "selective", "full"]
NewHead = Literal["if_missing", "never", "always"]
"""When a value model starts with a new head, which is zero."""


@dataclass(frozen=True)
class Optimizer:
    """AdamW of one trained model."""

    learning_rate: float = 1e-6
    """Peak learning rate."""
    min_learning_rate: float = 0.0
    """Learning rate at the last update (linear and cosine schedules)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate moves between the warm-up and the last update."""
    warmup_updates: int = 0
    """Optimizer updates over which the learning rate rises linearly from 0."""
    weight_decay: float = 0.0
    """Decoupled weight decay (not applied to norms and biases)."""
    beta1: float = 0.9
    """Decay of Adam's first moment."""
    beta2: float = 0.95
    """Decay of Adam's second moment."""
    epsilon: float = 1e-8
    """Adam's epsilon."""
    clip_grad: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 turns it off."""


@dataclass(frozen=True)
class Trainee:
    """A model that is trained."""

    model: str = ""
    """Hugging Face model folder (config.json, tokenizer, safetensors)."""
    train: Layout = Layout()
    """Layout for training, and for the reference model, which shares the module."""
    optimizer: Optimizer = Optimizer()
    """The model's optimizer."""
    dtype: Precision = "float32"
    """Precision of weights and activations; bfloat16 keeps float32 master weights in the optimizer."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one training or scoring micro-batch (a longer sequence is a micro-batch of its own)."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it: none; selective, the feed-forward of each layer;
    full, whole layers, of which only the inputs are kept (about a third more computation)."""
    lora: LoRA = LoRA()
    """Adapters that are trained in place of the model."""
    dropout: float = 0.0
    """Dropout of attention weights and residual branches while training; policies that sample are best left at 0."""
    layers: Layers = "local"
    """What the linears of the layers are: megatron-core's (local); Transformer Engine's (te), on a GPU, in FP8 where
    `fp8` says so; or an emulation of FP8 (emulated_fp8: numerics only, any device, slow)."""
    fp8: FP8 = FP8()
    """FP8 in training and scoring."""
    balance_coef: float = 0.0
    """Coefficient of the loss that has a mixture's router use all experts alike in each sequence; 0: none."""


@dataclass(frozen=True)
class RewardTrainee(Trainee):
    """A reward model that is trained."""

    new_head: NewHead = "if_missing"
    """When the score head starts anew, at zero: where the folder has none (with a warning); never, so that a folder
    without one is refused; or always."""


@dataclass(frozen=True)
class Actor(Trainee):
    """The policy that is trained on what it samples."""

    generate: Layout = Layout()
    """Layout for generating rollouts; weights are resharded into it after every step's updates."""
    generate_fp8: FP8 | None = None
    """FP8 while sampling; as `fp8` when not given."""
    average_decay: float = 0.0
    """Decay per step of a running average of the actor's weights, exported beside them as hf_average; 0: none."""


@dataclass(frozen=True)
class Critic:
    """The value model that is trained."""

    model: str = ""
    """Folder to start from: a language model or a SequenceClassification model, see `new_head`. Empty: the reward
    model's when there is one, else the actor's."""
    new_head: NewHead = "if_missing"
    """When the value head starts anew, at zero, over the folder's body: where the folder has none (with a warning), so
    that a critic can start from the policy; never, so that a folder without one is refused; or always. A reward model
    with several labels is no critic: it needs always."""
    train: Layout | None = None
    """Layout for training; the actor's when not given."""
    optimizer: Optimizer = Optimizer(learning_rate=5e-6)
    """The critic's optimizer."""
    dtype: Precision = "float32"
    """Precision of weights and activations; the value head is always float32."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one micro-batch."""
    recompute: Recompute = "none"
    """What the backward pass computes again instead of keeping it, as for the actor."""
    lora: LoRA = LoRA()
    """Adapters that are trained in place of the model; the value head is always trained."""
    layers: Layers = "local"
    """What the linears of the layers are, see actor.layers."""
    fp8: FP8 = FP8()
    """FP8 in training and scoring."""
    balance_coef: float = 0.0
    """Coefficient of the loss that has a mixture's router use all experts alike in each sequence; 0: none."""


@dataclass(frozen=True)
class Reference:
    """The frozen policy that the KL penalty is measured against. It shares the actor's training module, or is asked
    over HTTP."""

    model: str = ""
    """Folder of the reference weights, of the actor's architecture; empty: the actor's starting weights."""
    follow_rate: float = 0.0
    """After every step the reference moves this share of the way to the actor; 0: it stays."""
    url: str = ""
    """Address of `megarlhf serve MODEL_DIR --role reference`, such as http://127.0.0.1:8000, to ask instead of keeping
    the reference here; it may be of any architecture with the actor's tokenizer. Empty: it is kept here."""
    timeout_s: float = 120.0
    """Seconds that one request to the server may take."""
    retries: int = 2
    """Further tries of a request that failed, after pauses that double; then the run stops."""
    request_rows: int = 64
    """Sequences sent to the server in one request."""
    token_file: str = ""
    """File with the bearer token that the server asks for; empty: none is sent."""


@dataclass(frozen=True)
class Reward:
    """Where scores come from: a reward model, functions, servers, or the weighted sum of several."""

    model: str = ""
    """Folder of a SequenceClassification model (or of another one with a score head); empty: no reward model."""
    attribute_weights: tuple[float, ...] = ()
    """For a reward model with several labels: the weight of each, in their order, in the sum that is the score."""
    normalise: bool = True
    """Shift and scale the reward model's scores to mean 0 and deviation 1, by the numbers in its config.json
    (megarlhf_score_mean, megarlhf_score_std), where it has them."""
    train: Layout | None = None
    """Layout of the reward model; the critic's when not given."""
    dtype: Precision = "float32"
    """Precision of weights and activations."""
    micro_batch_tokens: int = 4096
    """Tokens packed into one micro-batch."""
    layers: Layers = "local"
    """What the linears of the layers are, see actor.layers."""
    fp8: FP8 = FP8()
    """FP8 while scoring."""
    functions: tuple[str, ...] = ()
    """Reward functions: names from megarlhf.rewards; `module:function`, which is called as
    f(prompts, responses, metadata) -> list[float]; or the address of a server, such as http://127.0.0.1:8000/score."""
    weights: tuple[float, ...] = ()
    """Weight of the reward model (when there is one), then of each function; empty: all 1."""
    timeout_s: float = 60.0
    """Seconds that one call of a reward function, or one request to a server, may take."""
    retries: int = 0
    """Further tries of a call that failed; those of a server come after pauses that double."""
    on_failure: Literal["stop", "mask"] = "stop"
    """What to do when a function or server still fails: stop the run, or leave the responses without a score out of
    the training (metric reward/failed)."""
    request_rows: int = 64
    """Responses sent to a server in one request."""
    token_file: str = ""
    """File with the bearer token that servers among the functions ask for; empty: none is sent."""


@dataclass(frozen=True)
class Rollout:
    """How responses are sampled."""

    batch_size: int = 64
    """Prompts per step."""
    samples_per_prompt: int = 1
    """Responses per prompt; they share one prefill."""
    max_new_tokens: int = 64
    """A response is cut here."""
    min_new_tokens: int = 1
    """Stop tokens cannot be sampled before this many tokens."""
    temperature: float = 1.0
    """Scales logits for sampling and for all log-probs and entropies of the policy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0: all."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this much probability."""
    stop_tokens: tuple[str, ...] = ()
    """Further tokens that end a response, besides the model's own end tokens."""
    max_slots: int = 64
    """Sequences decoded at once per data-parallel rank; a finished one's slot is refilled."""
    max_logp_gap: float = 0.0
    """Largest difference, in nats, that a sampled token's log-prob may have between sampler and trainer; 0: any."""
    on_logp_gap: Literal["warn", "stop"] = "warn"
    """What to do when a step exceeds it."""
    shards: int = 1
    """Parts of equal size that a step's batch is made of: as many as there are, and the copies of the models allow, are
    each kept by ranks of their own, which sample, score and credit its prompts and hold no other rows. What a rank does
    for rows then stays as it is when the batch grows with the ranks. Minibatches take as much from every part, so that
    results depend on the number of parts, not on who keeps them."""
    extra_rounds: int = 0
    """Dynamic sampling (DAPO): how many times more prompts are drawn in a step, in place of those whose responses all
    got the same score; 0: off."""


@dataclass(frozen=True)
class Data:
    """Where prompts come from."""

    prompts: str = ""
    """JSONL or Parquet file, folder of a data set saved by the `datasets` package, or hub:OWNER/NAME: rows
    `{"prompt": text}` or `{"messages": [...]}` (or such turns as prompt); other keys are metadata for rewards."""
    max_prompt_tokens: int = 512
    """Longest prompt."""
    too_long: Literal["error", "drop", "truncate_left", "truncate_right"] = "error"
    """What to do with a longer one."""
    shuffle: bool = True
    """Shuffle the prompts anew in every epoch."""
    split: str = "train"
    """Split that is read where a data set folder or hub data set has several."""
    on_bad_row: BadRow = "error"
    """What becomes of rows that cannot be used (not JSON, without a key, of a wrong type, too long). error: every one
    is reported and nothing starts. skip: they are left out, and their number and the first places are told."""
    max_bad_share: float = 0.01
    """With on_bad_row skip: the largest share of bad rows (one may always be) with which a run starts all the same."""


@dataclass(frozen=True)
class Pretraining(Texts):
    """Language modelling mixed into the actor's updates (PPO-ptx)."""

    coef: float = 0.0
    """Coefficient of its loss; 0: nothing is mixed in."""


@dataclass(frozen=True)
class CorpusRun:
    """A run over a data set: it ends when the data set has been gone through, or earlier."""

    dir: str = "runs/ppo"
    """Folder for everything the run writes."""
    seed: int = 0
    """Seed of shuffling and sampling."""
    save_every: int = 0
    """Steps between exports of the weights as Hugging Face folders, to RUN_DIR/exports/step_N; 0: only at the end."""
    checkpoint_every: int = 0
    """Steps between checkpoints in RUN_DIR/checkpoints/step_N, which hold all that is needed to go on, in any layout;
    the last step makes one too. 0: only when the run is asked to stop (SIGTERM, SIGUSR1, save_before_minutes)."""
    keep_checkpoints: int = 2
    """Latest checkpoints that are kept; 0: all."""
    keep_best: str = ""
    """Metric, such as objective/scores, whose best checkpoint is kept too: the highest, or with a leading minus
    (-loss/sft_avg) the lowest; empty: none."""
    checkpoint_in_background: bool = False
    """Write checkpoints while training goes on, from a copy in host memory (12 bytes per trained parameter)."""
    keep_capsules: int = 0
    """Latest capsules that are kept in RUN_DIR/capsules/step_N, for `megarlhf replay`: what the stages of a step saw
    and gave (about 64 bytes a token). Of the first step, and of each one that begins at a checkpoint, for as long as
    that checkpoint is kept; 0: none."""
    save_before_minutes: float = 0.0
    """Minutes after the start by which a checkpoint must be on the disk: the step before which time would run out ends
    with one, and the run with exit code 75. 0: no limit."""
    stage_timeout_minutes: float = 120.0
    """A stage of a step (generate, learn_actor, ...) that takes longer is taken for stuck: all ranks end with a report
    of where each was. 0: no limit."""
    resume: str = "auto"
    """auto: go on from the latest intact checkpoint in run.dir, if there is one and the settings are the same; never;
    or a checkpoint (or a run folder) to start from, whose settings may differ."""
    overwrite: bool = False
    """Start afresh in a folder that already holds a run; its checkpoints and exports are removed."""
    profile: tuple[int, ...] = ()
    """Steps, counted from 1, that are profiled: each rank writes to RUN_DIR/profile torch's trace of the step, and what
    the time of each stage went to. --profile is short for --run.profile 2: the first step warms up."""
    sample_texts: int = 4
    """Texts written to samples.jsonl per step."""
    tensorboard: bool = True
    """Write tensorboard event files."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (the package wandb): offline writes to RUN_DIR/wandb, for `wandb sync` later; online sends while
    the run goes on, and needs `wandb login` before."""
    wandb_project: str = "megarlhf"
    """Project that the run is shown in there."""
    steps: int = 0
    """Steps, at most; 0: as many as data.epochs make of the data set."""


@dataclass(frozen=True)
class Run(CorpusRun):
    """A run over sampled responses."""

    steps: int = 100
    """Steps; one step is one batch of rollouts and the updates on it."""


@dataclass(frozen=True)
class PPORun:
    """Settings of `megarlhf ppo`."""

    actor: Actor = field(default_factory=Actor)
    critic: Critic = field(default_factory=Critic)
    reference: Reference = field(default_factory=Reference)
    reward: Reward = field(default_factory=Reward)
    algorithm: PPO = field(default_factory=PPO)
    pretraining: Pretraining = field(default_factory=Pretraining)
    rollout: Rollout = field(default_factory=Rollout)
    data: Data = field(default_factory=Data)
    residency: CriticResidency = field(default_factory=CriticResidency)
    run: Run = field(default_factory=Run)
