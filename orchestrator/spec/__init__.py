"""What a user submits: sections, checks, completion, and errors told by file and key."""
