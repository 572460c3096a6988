"""One job's supervisor: reports in, commands out."""
