"""A Hugging Face hub of one repository, as far as huggingface_hub asks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

COMMIT = "0" * 40


@dataclass
class FakeHub:
    """Serves a folder as `owner/name`; notes which files were fetched whole."""

    folder: Path
    fetched: list[str] = field(default_factory=list[str])

    @property
    def app(self) -> Starlette:
        """The ASGI app."""
        return Starlette(
            routes=[
                Route("/{owner}/{name}/resolve/{rev}/{file:path}", self._resolve),
                Route("/api/models/{owner}/{name}/revision/{rev}", self._info),
                Route("/api/models/{owner}/{name}", self._info),
                Route("/api/models/{owner}/{name}/tree/{rev}", self._tree),
            ]
        )

    async def _resolve(self, request: Request) -> Response:
        path = self.folder / request.path_params["file"]
        if not path.is_file():
            return Response(status_code=404, headers={"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}
        if request.method == "HEAD":
            size = str(path.stat().st_size)
            return Response(headers={**headers, "Content-Length": size})
        self.fetched.append(path.name)
        return FileResponse(path, headers=headers)

    async def _info(self, request: Request) -> Response:
        del request
        files = [{"rfilename": path.name} for path in sorted(self.folder.iterdir())]
        return JSONResponse({"id": "owner/name", "sha": COMMIT, "siblings": files, "tags": []})

    async def _tree(self, request: Request) -> Response:
        del request
        return JSONResponse(
            [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "0"}
                for p in sorted(self.folder.iterdir())
            ]
        )
