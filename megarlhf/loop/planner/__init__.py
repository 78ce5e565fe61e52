"""What a run would need, counted before there is one: bytes per rank and stage, messages, seconds. No weights, no GPU.

Everything is arithmetic on config.json and the recipe, from the same sources as the run itself: the family's name table
and local maps for weights, the reshard plan for messages. Nothing here imports torch.
"""
