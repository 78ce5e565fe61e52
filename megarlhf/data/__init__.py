"""What goes into a run: the tokenizer, prompts, data sets to learn from, and the order in which rows are used."""
