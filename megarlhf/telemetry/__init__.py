"""What a run tells: named spans of time, and numbers and texts per step to console, JSON lines and tensorboard."""
