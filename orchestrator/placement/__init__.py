"""Which nodes a job gets, and when. Pure."""
