"""What a user may set: frozen dataclasses, one per command, filled from YAML and dotted flags. No torch here."""
