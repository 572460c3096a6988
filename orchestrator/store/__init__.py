"""What is durable: one database, written by the controller alone."""
