"""What a run wrote, as one HTML page that opens without a network: curves, stages, memory, texts, signs in words."""
