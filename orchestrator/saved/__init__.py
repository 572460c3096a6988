"""What training can start from: snapshots, copies on partners, checkpoints."""
