"""What of a machine, or of a cluster's, stands in the way of training."""
