"""From settings to a running loop: preflight, building, the source of batches, and the loop itself."""
