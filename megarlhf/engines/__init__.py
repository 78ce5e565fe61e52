"""Engines own what changes: the learner its optimizer, the generator its cache. Records go in, records come out."""
