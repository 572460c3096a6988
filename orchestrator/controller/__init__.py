"""The job's life: from the queue to its end, one transition a pass."""
