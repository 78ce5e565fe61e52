"""What goes into a run: the tokenizer, the prompts, and the order in which they are used."""
