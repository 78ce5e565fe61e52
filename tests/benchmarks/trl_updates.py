"""The peers of learning.py: one update of TRL's GRPOTrainer, and one as TRL's PPOTrainer makes it."""

import tempfile
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, pad, softmax

from megarlhf.records.experience import Experience

MODEL = "assets/SmolLM2-135M-Instruct"
LEARNING_RATE = 1e-6


def trainer(num_rows: int, new_tokens: int, reward: Callable, prompts: list[str], **options):
    """A GRPOTrainer on the CPU with TRL's defaults, but float32, no gradient checkpointing, and nothing saved or sent:
    one optimizer step per batch of `num_rows` rows in groups of 4."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    settings = {
        "output_dir": tempfile.mkdtemp(),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": num_rows,
        "num_generations": 4,
        "max_completion_length": new_tokens,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "shuffle_dataset": False,
    }
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32),
        reward_funcs=[reward],
        args=GRPOConfig(**settings | options),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
    )


def grpo(rows: Experience) -> Callable[[], float]:
    """GRPOTrainer.training_step on a batch that is already scored, then what transformers' Trainer does after it."""
    peer = trainer(rows.num_rows, 64, lambda completions, **rest: [0.0] * len(completions), ["x"] * rows.num_rows)
    peer.create_optimizer_and_scheduler(1000)
    peer.current_gradient_accumulation_steps = 1
    model, peer.optimizer = peer.accelerator.prepare(peer.model, peer.optimizer)
    model.train()
    prompts, prompt_mask, responses, response_mask = _padded(rows)
    batch = {
        "prompt_ids": prompts,
        "prompt_mask": prompt_mask.long(),
        "completion_ids": responses,
        "completion_mask": response_mask.long(),
        "advantages": rows.advantage.gather(1, rows.prompt_lengths[:, None] - 1)[:, 0],
        "num_items_in_batch": response_mask.sum(),
    }

    def update() -> float:
        peer._step, peer._buffered_inputs = 1, [batch]  # so that training_step reads the batch and samples none
        peer.args.steps_per_generation = 1
        peer.num_iterations = 2**31
        peer.training_step(model, None, None)
        norm = peer.accelerator.clip_grad_norm_(model.parameters(), peer.args.max_grad_norm)
        peer.optimizer.step()
        peer.lr_scheduler.step()
        model.zero_grad()
        return float(norm)

    return update


def ppo(rows: Experience) -> Callable[[], float]:
    """Policy and value model in one forward of one padded batch, one loss, one AdamW over both (clipped at norm 1 each,
    as ours are)."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    critic = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32)
    torch.nn.init.zeros_(critic.score.weight)
    models = torch.nn.ModuleList([policy, critic]).train()
    optimizer = torch.optim.AdamW(models.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    prompts, prompt_mask, responses, response_mask = _padded(rows)
    advantage, value, target = (_of_responses(rows, field) for field in (rows.advantage, rows.value, rows.target))
    ids, mask = torch.cat([prompts, responses], 1), torch.cat([prompt_mask, response_mask], 1)
    old: list[Tensor] = []

    def update() -> float:
        positions = mask.long().cumsum(1) - mask.long()
        inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": positions, "use_cache": False}
        hidden = critic.model(**inputs, output_hidden_states=True).hidden_states[-1]
        values = critic.score(hidden)[:, prompts.shape[1] - 1 : -1, 0]
        logits = policy(**inputs, output_hidden_states=True).logits[:, prompts.shape[1] - 1 : -1]
        logits = logits / (1.0 + 1e-7)
        logp = log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0].masked_fill(~response_mask, 1.0)
        old.extend([] if old else [logp.detach()])
        ratio = (logp - old[0]).exp()
        gain = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        near = torch.clamp(values, value - 0.2, value + 0.2)
        error = torch.max((values - target).square(), (near - target).square())
        loss = gain[response_mask].mean() + 0.5 * error[response_mask].mean()
        loss.backward()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) for model in (policy, critic)]
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            probability = softmax(logits, -1)
            (logits.logsumexp(-1) - (probability * logits).sum(-1)).mean()
        return float(sum(norm**2 for norm in norms) ** 0.5)

    return update


def _padded(rows: Experience) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Prompts padded on the left, responses on the right, and where they are tokens; token 0 pads."""
    lengths = rows.prompt_lengths
    width, new = int(lengths.max()), int((rows.lengths - lengths).max())
    ids = [rows.tokens[row, : rows.lengths[row]] for row in range(rows.num_rows)]
    cut = [(one[:length], one[length:]) for one, length in zip(ids, lengths.tolist(), strict=True)]
    prompts = [pad(prompt, (width - len(prompt), 0)) for prompt, _ in cut]
    responses = [pad(response, (0, new - len(response))) for _, response in cut]
    prompt_mask = torch.arange(width) >= (width - lengths)[:, None]
    response_mask = torch.arange(new) < (rows.lengths - lengths)[:, None]
    return torch.stack(prompts), prompt_mask, torch.stack(responses), response_mask


def _of_responses(rows: Experience, field: Tensor) -> Tensor:
    """A field [B, T] of an experience as [B, longest response]."""
    starts = (rows.prompt_lengths - 1).tolist()
    new = int((rows.lengths - rows.prompt_lengths).max())
    padded = pad(field, (0, new))
    return torch.stack([padded[row, start : start + new] for row, start in enumerate(starts)])
