"""Reward functions: plain functions from texts to one number per response."""
