"""Several hosts on one machine: network namespaces behind a bridge. Needs root and iproute2."""
