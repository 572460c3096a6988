"""From incidents to decisions: the ladder and its evidence. Pure."""
