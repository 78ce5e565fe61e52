"""Everything that a run needs to go on where it stopped: written whole or not at all, and read in any layout."""
