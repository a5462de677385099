"""A Hugging Face hub on loopback: what huggingface_hub calls to download a model."""

import contextlib
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c" * 40
TOKEN = "hf_token"  # opens the gated models


class Hub(ThreadingHTTPServer):
    """The server. `models` are folders by name; `downloads` are the files that were sent."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()  # names of models that need TOKEN
        self.broken = False  # answers each request with status 500
        self.downloads: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def environ(self, home: Path) -> dict[str, str]:
        """Returns the variables of a process that uses this hub, with its cache in `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        return kept | {
            "HF_ENDPOINT": self.address,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "NO_PROXY": "127.0.0.1",
        }


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.server.broken:
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        parts = parts[2:] if is_api else parts
        at = next((i for i, part in enumerate(parts) if part in ("revision", "tree", "resolve")), 0)
        name = "/".join(parts[:at])
        if name not in self.server.models:
            self.answer(HTTPStatus.NOT_FOUND, {"X-Error-Code": "RepoNotFound"})
            return
        has_token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if name in self.server.gated and not (is_api and parts[at] == "revision" or has_token):
            self.answer(HTTPStatus.FORBIDDEN, {"X-Error-Code": "GatedRepo"})
            return
        folder = self.server.models[name]
        if parts[at] == "revision":
            self.answer(HTTPStatus.OK, body=json.dumps({"id": name, "sha": COMMIT}).encode())
        elif parts[at] == "tree":
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            entries = [
                {
                    "type": "file",
                    "path": path.relative_to(folder).as_posix(),
                    "size": path.stat().st_size,
                    "oid": digest(path),
                }
                for path in files
            ]
            self.answer(HTTPStatus.OK, body=json.dumps(entries).encode())
        else:
            self.send_file(folder, "/".join(parts[at + 2 :]))

    def send_file(self, folder: Path, file: str) -> None:
        path = folder / file
        if not path.is_file():
            self.answer(HTTPStatus.NOT_FOUND, {"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            self.server.downloads.append(file)
        headers = {"ETag": f'"{digest(path)}"', "X-Repo-Commit": COMMIT}
        self.answer(HTTPStatus.OK, headers, path.read_bytes())

    def answer(self, status: HTTPStatus, headers: dict[str, str] | None = None, body: bytes = b""):
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def digest(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def serving() -> Iterator[Hub]:
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, daemon=True)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
