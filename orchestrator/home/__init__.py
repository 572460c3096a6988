"""A controller's home folder, and how its API may listen."""
