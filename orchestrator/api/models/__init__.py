"""What the HTTP API answers with, as its OpenAPI description tells it, each with an example.

Promises: answers are built elsewhere, from rows of the store, and conform to these, which
``tests/unit/test_api_fuzz.py`` shows; a field may be added, none changes its meaning within /v1.
Times are seconds since the epoch; a number that isn't finite is ``"nan"``, ``"inf"`` or ``"-inf"``.
"""
