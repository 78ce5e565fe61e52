"""Converting, laying out, inspecting and comparing checkpoints: thin commands over megarlhf.weights. No accelerator."""
