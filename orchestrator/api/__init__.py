"""The HTTP API of the controller, and its Python client."""
