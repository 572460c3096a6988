"""Telling a person's own service that a job stopped: JSON posted to a webhook.

Promises: a notification is stored with the transition that it tells, so a controller that
restarts still sends it; it is sent at least once, with an ``id`` by which a receiver knows a
repetition, or given up with an event that says why; nothing waits for it. The URL is never
logged or told, its host only: it may be a secret.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

import httpx

from orchestrator.events import EventDraft
from orchestrator.spec.config import NotificationsConfig
from orchestrator.spec.errors import Problem, SpecError
from orchestrator.spec.job import JobSpec
from orchestrator.store.database import Store
from orchestrator.store.webhooks import Delivery

TIMEOUT_S = 10.0
MOST_TRIES = 12
RETRY_S = (2.0, 600.0)
"""Shortest and longest wait between tries; twelve tries take an hour and a half."""
EVERY_S = 1.0
"""Longest time between two looks for what is due; something new is looked at sooner."""
REST_S = 0.1
"""Shortest: a job stores steps all the time."""

_FOR_LATER = frozenset({408, 425, 429})
"""Refusals that another try may end."""

logger = logging.getLogger(__name__)


class Webhooks:
    """Sends what is due, from a thread of the controller's."""

    def __init__(
        self,
        store: Store,
        environ: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``environ``: where ``webhook_env`` is looked up."""
        self._store = store
        self._environ = os.environ if environ is None else environ
        self._clock = clock
        # At INFO it would write every URL, the secret in it included.
        logging.getLogger("httpx").setLevel(logging.WARNING)

    def run(self, stop: threading.Event, wait_for_change: Callable[[int, float], int]) -> None:
        """``send_due`` until ``stop``; ``wait_for_change`` is the controller's."""
        seen = 0
        while not stop.wait(REST_S):
            seen = wait_for_change(seen, EVERY_S)
            try:
                self.send_due()
            except Exception:
                logger.exception("webhooks could not be tended; again in a moment")

    def send_due(self) -> int:
        """Try each notification whose time has come, once; how many there were."""
        due = self._store.webhooks.due(self._clock(), RETRY_S[1])
        for delivery in due:
            self._send(delivery)
        return len(due)

    def _send(self, delivery: Delivery) -> None:
        url = url_of(delivery.config, self._environ)
        if not url:
            why = f"${delivery.config.webhook_env} is not set in the controller's environment"
            self._give_up(delivery, "the webhook", why)
            return
        where = place_of(url)
        trouble, again = post(url, {"id": delivery.id, **delivery.body})
        tries = delivery.tries + 1
        now = self._clock()
        if not trouble:
            told = f"{where} was told that the job is {delivery.body['state']}."
            event = EventDraft("webhook_sent", now, told, {"webhook": delivery.id, "tries": tries})
            self._store.webhooks.settle(delivery, event)
        elif again and tries < MOST_TRIES:
            wait_s = min(RETRY_S[0] * 2**delivery.tries, RETRY_S[1])
            logger.warning("%s: %s; again in %.0f s", where, trouble, wait_s)
            self._store.webhooks.postpone(delivery, now + wait_s)
        else:
            self._give_up(delivery, where, f"{trouble}, in {tries} tries" if again else trouble)

    def _give_up(self, delivery: Delivery, where: str, why: str) -> None:
        told = f"{where} was not told that the job is {delivery.body['state']}: {why}."
        logger.warning("%s: %s", delivery.job, told)
        event = EventDraft("webhook_failed", self._clock(), told, {"webhook": delivery.id})
        self._store.webhooks.settle(delivery, event)


def check_webhook(spec: JobSpec, file: str, environ: Mapping[str, str]) -> None:
    """Raise ``SpecError`` if the URL that a spec leaves to the environment isn't there."""
    name = spec.notifications.webhook_env
    if name is None or environ.get(name, "").strip().startswith(("https://", "http://")):
        return
    message = f"${name} holds no URL in the controller's environment"
    remedy = "set it where the controller starts (`octavo up`, `octavo run`)"
    raise SpecError([Problem(file, "notifications.webhook_env", name, message, remedy)])


def url_of(config: NotificationsConfig, environ: Mapping[str, str]) -> str:
    """Where to post; empty where the environment doesn't say."""
    if config.webhook_env is not None:
        return environ.get(config.webhook_env, "").strip()
    return config.webhook or ""


def place_of(url: str) -> str:
    """What may be told of a URL: ``https://hooks.example.com``."""
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "the webhook"
    return f"{parts.scheme}://{parts.hostname}{port}" if parts.hostname else "the webhook"


def post(url: str, body: Mapping[str, object]) -> tuple[str, bool]:
    """Post once. What went wrong, empty if nothing, and whether another try may help."""
    try:
        answer = httpx.post(
            url,
            json=dict(body),
            timeout=TIMEOUT_S,
            headers={"User-Agent": "octavo", "Octavo-Delivery": str(body["id"])},
            # Whoever it is passed on to is not whom the spec names.
            follow_redirects=False,
        )
    except (httpx.InvalidURL, httpx.UnsupportedProtocol):
        return "it has no valid http or https URL", False
    except httpx.HTTPError as error:
        # Texts of libraries may repeat the URL.
        return f"{type(error).__name__} ({place_of(url)} did not answer)", True
    if answer.is_success:
        return "", False
    refused = 300 <= answer.status_code < 500 and answer.status_code not in _FOR_LATER
    return f"it answered {answer.status_code}", not refused
