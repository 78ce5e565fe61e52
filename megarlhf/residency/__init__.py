"""Which weights are in a model's memory at each stage of a step."""
