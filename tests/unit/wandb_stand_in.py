"""A W&B server on the loopback that knows what a run's upload asks for, and keeps what it was told.

Answers the requests that wandb 0.31 sends when a run is written online or synced: GraphQL by the
name of the operation, a stream of history lines a run, and files. What that version doesn't ask it
doesn't know: an unknown operation is an empty answer, and is in ``operations``.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class WandbStandIn:
    """The server; use it as a context."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, dict[str, Any]]] = []
        """(name, variables) of every GraphQL request, in order."""
        self.runs: dict[str, dict[str, Any]] = {}
        """By name: the newest variables of each field that was not null."""
        self.history: dict[str, dict[int, dict[str, Any]]] = defaultdict(dict)
        """By run: line number → line."""
        self.finished: dict[str, list[int]] = defaultdict(list)
        """By run: exit codes."""
        self.files: dict[str, bytes] = {}
        """By path."""
        self.telemetry = 0
        """Reports of wandb's own."""
        self.keys: set[str] = set()
        """Credentials that came with requests."""
        self._lock = threading.Lock()
        stand_in = self

        class Handler(_Handler):
            server_side = stand_in

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def asked(self, operation: str) -> list[dict[str, Any]]:
        """Variables of each request of that name."""
        return [variables for name, variables in self.operations if name == operation]

    def __enter__(self) -> WandbStandIn:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def graphql(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            self.operations.append((operation, variables))
            if operation == "RunResumeStatus":
                return {"model": self._model(variables)}
            if operation == "UpsertBucket":
                return {"upsertBucket": self._upserted(variables)}
            if operation == "ServerFeaturesQuery":
                return {"serverInfo": {"features": []}}
            if operation == "CreateArtifact":
                made = {"id": f"artifact-{len(self.operations)}", "state": "COMMITTED"}
                return {"createArtifact": {"artifact": {**made, "artifactSequence": _NO_ARTIFACT}}}
            if operation == "CreateRunFiles":
                names = variables["files"]
                files = [{"name": n, "uploadUrl": f"{self.url}/upload/{n}"} for n in names]
                made = {"runID": "run", "uploadHeaders": [], "files": files}
                return {"createRunFiles": made}
            if operation == "NotifyScriptableRunAlert":
                return {"notifyScriptableRunAlert": {"success": True}}
            if operation in ("ArtifactType", "ProjectArtifactType"):
                return {"project": {"artifact": None}}
            if operation == "Viewer":
                return {"viewer": {"id": "u", "entity": "team", "username": "u", "flags": "{}"}}
            return {}

    def stream(self, run: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            lines = body.get("files", {}).get("wandb-history.jsonl", {})
            for i, line in enumerate(lines.get("content", ())):
                self.history[run][int(lines["offset"]) + i] = json.loads(line)
            if body.get("complete"):
                self.finished[run].append(int(body["exitcode"]))
        return {"exitcode": None, "limits": {}}

    def _model(self, variables: dict[str, Any]) -> dict[str, Any]:
        run = self.runs.get(variables["name"])
        model = {"id": "model", "name": "octavo", "entity": _ENTITY, "bucket": None}
        if run is None:
            return model
        history = self.history[variables["name"]]
        tail = [json.dumps(line) for _, line in sorted(history.items())[-1:]]
        bucket = {
            "id": "run",
            "name": variables["name"],
            "displayName": run.get("displayName"),
            "summaryMetrics": "{}",
            "logLineCount": 0,
            "historyLineCount": len(history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "config": run.get("config", "{}"),
            "tags": [],
            "notes": run.get("notes"),
            "wandbConfig": "{}",
        }
        return {**model, "bucket": bucket}

    def _upserted(self, variables: dict[str, Any]) -> dict[str, Any]:
        name = variables["name"]
        new = name not in self.runs
        known = self.runs.setdefault(name, {})
        known |= {key: value for key, value in variables.items() if value is not None}
        project = {"id": "project", "name": "octavo", "entity": _ENTITY}
        bucket = {
            "id": "run",
            "name": name,
            "displayName": known.get("displayName"),
            "description": None,
            "config": known.get("config", "{}"),
            "sweepName": None,
            "project": project,
            "historyLineCount": len(self.history[name]),
        }
        return {"bucket": bucket, "inserted": new}


_ENTITY = {"id": "entity", "name": "team"}
_NO_ARTIFACT = {"latestArtifact": None}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_side: WandbStandIn

    def do_POST(self) -> None:
        if "/otel/" in self.path:
            # Of how wandb itself fares; no part of a run.
            self.server_side.telemetry += 1
            self._body()
            self._answer({})
            return
        body = json.loads(self._body() or b"{}")
        if self.path.endswith("/file_stream"):
            self._answer(self.server_side.stream(self.path.split("/")[-2], body))
            return
        found = re.search(r"(?:query|mutation)\s+(\w+)", body.get("query", ""))
        name = found[1] if found else self.path
        self._answer({"data": self.server_side.graphql(name, body.get("variables") or {})})

    def do_PUT(self) -> None:
        self.server_side.files[self.path.removeprefix("/upload/")] = self._body()
        self._answer({})

    def do_GET(self) -> None:
        self._answer({})

    def log_message(self, *_: object) -> None:
        pass

    def _body(self) -> bytes:
        if key := self.headers.get("Authorization"):
            self.server_side.keys.add(key)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data

    def _answer(self, told: dict[str, Any]) -> None:
        data = json.dumps(told).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
