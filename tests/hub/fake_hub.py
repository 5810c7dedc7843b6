"""A Hub on this machine: enough of the Hub's HTTP protocol to create a repository, push to it and load from it."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

USER = "me"


@dataclass
class Answer:
    """Status, body and headers of one response."""

    status: int = 200
    body: bytes | dict | list = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass
class Repository:
    """Files of every commit, and the commit that each branch points to."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"0" * 40: {}})
    branches: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})
    private: bool = False

    def commit_of(self, revision: str) -> str | None:
        return self.branches.get(revision, revision if revision in self.commits else None)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[revision]]

    def add_commit(self, branch: str, files: dict[str, bytes]) -> str:
        commit = f"{len(self.commits):040x}"
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit


class FakeHub:
    """Serve on a free port of 127.0.0.1 while the ``with`` block runs.

    >>> with FakeHub() as hub:
    ...     hub.url.startswith("http://127.0.0.1:")
    True
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.blobs: dict[str, bytes] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.server.hub = self
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> "FakeHub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def environment(self, cache: str) -> dict[str, str]:
        """What a subprocess needs in its environment to take this server for the Hub, with an empty cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": cache,
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",  # this server speaks plain LFS
            "HF_TOKEN": "hf_token_of_the_tests",
        }

    def answer(self, method: str, path: str, body: bytes) -> Answer:
        """The response to one request; unknown paths are 404, as on the Hub."""
        for allowed, pattern, route in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and method in allowed.split():
                return route(self, body, **match.groupdict())
        return Answer(404, {"error": f"this Hub does not know {method} {path}"})

    def whoami(self, body: bytes) -> Answer:
        token = {"type": "access_token", "accessToken": {"role": "write"}}
        return Answer(body={"name": USER, "type": "user", "orgs": [], "auth": token})

    def validate_card(self, body: bytes) -> Answer:
        return Answer(body={"errors": [], "warnings": []})

    def create_repository(self, body: bytes) -> Answer:
        wanted = json.loads(body)
        name = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if name in self.repositories:
            return Answer(409, {"error": "You already created this model repo", "url": f"{self.url}/{name}"})
        self.repositories[name] = Repository(private=wanted.get("visibility") == "private")
        return Answer(body={"url": f"{self.url}/{name}", "name": name})

    def create_branch(self, body: bytes, repo: str, branch: str) -> Answer:
        repository = self.repositories[repo]
        if branch in repository.branches:
            return Answer(409, {"error": "Reference already exists"})
        repository.branches[branch] = repository.branches["main"]
        return Answer()

    def preupload(self, body: bytes, repo: str, revision: str) -> Answer:
        """Say of each file how it is uploaded: weights as LFS objects, the rest inside the commit."""
        paths = [file["path"] for file in json.loads(body)["files"]]
        modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
        return Answer(body={"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})

    def lfs_batch(self, body: bytes, repo: str) -> Answer:
        objects = [
            {
                "oid": wanted["oid"],
                "size": wanted["size"],
                "actions": {"upload": {"href": f"{self.url}/lfs/{wanted['oid']}"}},
            }
            for wanted in json.loads(body)["objects"]
        ]
        return Answer(body={"transfer": "basic", "objects": objects})

    def lfs_upload(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return Answer(400, {"error": f"the object is not {oid}"})
        self.blobs[oid] = body
        return Answer()

    def commit(self, body: bytes, repo: str, revision: str) -> Answer:
        repository = self.repositories[repo]
        if revision not in repository.branches:
            return Answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        files = dict(repository.files(revision))
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
        commit = repository.add_commit(revision, files)
        return Answer(body={"commitUrl": f"{self.url}/{repo}/commit/{commit}", "commitOid": commit, "success": True})

    def model_info(self, body: bytes, repo: str, revision: str | None = None) -> Answer:
        if repo not in self.repositories:
            return Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        repository = self.repositories[repo]
        commit = repository.commit_of(revision or "main")
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        return Answer(
            body={"_id": "0" * 24, "id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "tags": []}
        )

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> Answer:
        """One file of one revision, with the headers that the client caches it by."""
        if repo not in self.repositories:
            return Answer(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        repository = self.repositories[repo]
        commit = repository.commit_of(revision)
        if commit is None:
            return Answer(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
        content = repository.commits[commit].get(path)
        headers = {"X-Repo-Commit": commit}
        if content is None:
            return Answer(404, {"error": "Entry not found"}, headers | {"X-Error-Code": "EntryNotFound"})
        return Answer(body=content, headers=headers | {"ETag": f'"{hashlib.sha256(content).hexdigest()}"'})


REPO = r"(?P<repo>[^/]+/[^/]+)"
ROUTES = [
    ("GET", r"/api/whoami-v2", FakeHub.whoami),
    ("POST", r"/api/validate-yaml", FakeHub.validate_card),
    ("POST", r"/api/repos/create", FakeHub.create_repository),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", FakeHub.create_branch),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>.+)", FakeHub.preupload),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", FakeHub.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]+)", FakeHub.lfs_upload),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>.+)", FakeHub.commit),
    ("GET", rf"/api/models/{REPO}(/revision/(?P<revision>.+))?", FakeHub.model_info),
    ("GET HEAD", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", FakeHub.resolve),
]


class _Handler(BaseHTTPRequestHandler):
    """Reads a request, asks the hub for the answer, writes it."""

    def _serve(self) -> None:
        answer = self.server.hub.answer(self.command, unquote(urlsplit(self.path).path), self._body())
        content = answer.encoded()
        self.send_response(answer.status)
        for name, value in {**answer.headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def log_message(self, *_: object) -> None:
        """Keep requests out of the test output."""

    do_GET = do_HEAD = do_POST = do_PUT = _serve  # noqa: N815 (http.server looks for these names)
