"""Where a controller runs: a Ray of its own, or one that somebody else started."""
