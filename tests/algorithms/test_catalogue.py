"""Claims about the catalogue."""

import dataclasses

import torch

from megarlhf.algorithms import catalogue
from megarlhf.config.settings import PPO
from megarlhf.records import Denominators, Experience, Prediction, TokenBatch
from tests.algorithms.batches import bools, experience_of


def test_every_field_an_algorithm_reads_is_a_field_of_the_experience():
    assert set(catalogue.PPO.reads(PPO())) <= {field.name for field in dataclasses.fields(Experience)}


def test_ppo_reads_exactly_what_it_says():
    """With those fields it runs from credit to both losses; without any one of them it stops."""
    ppo, settings = catalogue.PPO, PPO(whiten_advantages="minibatch")
    batch = experience_of(bools([1, 1, 0], [1, 1, 1]), score=torch.tensor([1.0, -1.0]))
    state = ppo.initial_state(settings)
    filled, _, metrics = ppo.credit(batch, settings, state)
    tokens = TokenBatch.from_experience(ppo.prepare_minibatch(filled, settings))
    for loss in (ppo.actor_loss, ppo.critic_loss):
        value, parts = loss(Prediction(torch.zeros(5)), tokens, settings, Denominators.of(filled))
        assert value.isfinite() and parts
    assert metrics["objective/scores"] == 0.0
    for name in ppo.reads(settings):
        try:
            ppo.credit(batch.replace(**{name: None}), settings, state)
        except AssertionError as error:
            assert name in str(error)
        else:
            raise AssertionError(f"{name} is not read")
