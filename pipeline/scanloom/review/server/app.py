"""The routes of the review server."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any, Literal

from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from scanloom.core import Reason, ScanError, is_passing
from scanloom.io.output.file_names import PREVIEW, THUMBNAIL
from scanloom.io.output.layout import case_folder
from scanloom.io.system.regular_files import read_regular_file
from scanloom.review.revisions import latest_result
from scanloom.review.server.cases import PLANES, OpenedCase, describe, slices
from scanloom.review.server.drafts import LabelDraft, Step
from scanloom.review.server.requests import (
    LastFields,
    StrokeFields,
    TokenFields,
    ToolFields,
    VerdictFields,
    VersionFields,
    read_fields,
    read_query,
    read_range,
    read_rows,
)
from scanloom.review.server.security import Guard, RefusedError, Sessions
from scanloom.review.server.state import ReviewState
from scanloom.review.server.surface import surface
from scanloom.review.server.tools import (
    Canvas,
    Values,
    erase_islands,
    fill_between,
    paint_between,
    paint_polygon,
    smooth,
)

logger = logging.getLogger(__name__)

STATIC = resources.files("scanloom.review.server") / "static"
BASE_STYLE = resources.files("scanloom.review.report") / "base.css"
"""Begin of the style sheet, which is that of the report's too."""
MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
STATUS = {
    Reason.ID_UNKNOWN: 404,
    Reason.DISK_FULL: 507,
    Reason.OUTPUT_UNWRITABLE: 503,
}
"""HTTP status of each reason; 409 of others."""

PAGE = 100
"""Rows of the list in an answer, unless others are asked for."""
MAX_PREVIEW_BYTES = 1 << 26
NO_STRUCTURE = "The label map has no such structure."
Endpoint = Callable[[Request, str], Response]
"""Answers a request of a reviewer."""


class Routes:
    """Answers to requests."""

    def __init__(self, state: ReviewState, sessions: Sessions) -> None:
        self.state, self.sessions = state, sessions

    async def enter(self, request: Request) -> Response:
        """Turn the token of a link into a session."""
        link = read_fields(TokenFields, await request.body())
        session = self.sessions.enter(link.token, link.reviewer)
        if session is None:
            raise RefusedError(403, "SESSION", "The link was used, or is not of this server.")
        return JSONResponse({"session": session})

    async def page(self, request: Request) -> Response:
        """Return a page, which holds nothing of the results: its script asks for the rest.

        Its address has the code of a reviewer, so that a browser can have pages of several.
        """
        if request.path_params.get("reviewer") not in self.sessions.tokens:
            return _page("used.html", 403)
        return _page("case.html" if "name" in request.path_params else "list.html")

    def me(self, request: Request, reviewer: str) -> Response:
        """Return who the reviewer is."""
        return JSONResponse(self.state.me(reviewer))

    def worklist(self, request: Request, reviewer: str) -> Response:
        """Return rows of the reviewer's list; 304 if nothing changed since a version."""
        fields = request.query_params
        first, last = read_rows(fields.get("rows", f"0-{PAGE - 1}"))
        since = fields.get("since", "")
        listed = self.state.listed(reviewer, read_query(fields), first, last, since)
        return Response(status_code=304) if listed is None else JSONResponse(listed)

    def near(self, request: Request, reviewer: str) -> Response:
        """Return which cases of the list are beside one."""
        name = str(request.path_params["name"])
        return JSONResponse(self.state.near(reviewer, read_query(request.query_params), name))

    def case(self, request: Request, reviewer: str) -> Response:
        """Return what the viewer needs to know about a case; 204 if it has no room ahead."""
        name = self._name(request, reviewer, anew=True)
        if "ahead" not in request.query_params:
            self.state.open_cases.show(name, reviewer)
        elif self.state.open_cases.get_ahead(name) is None:
            return Response(status_code=204)
        case = self.state.opened(name)
        if "ahead" not in request.query_params:
            self.state.log.note_view(case.name, reviewer)
        verdicts = self.state.verdicts(case.name, reviewer)
        folder = case_folder(self.state.out, case.name).relative_to(self.state.out).as_posix()
        about = {**describe(case), "folder": folder}
        return JSONResponse({**about, "doubts": self.state.findings(case), **verdicts})

    def image(self, request: Request, reviewer: str) -> Response:
        """Return slices of the scan."""
        case = self._opened(request, reviewer)
        if case.image is None:
            raise RefusedError(404, "NO_IMAGE", case.missing)
        return self._slices(request, case.image.array)

    def labels(self, request: Request, reviewer: str) -> Response:
        """Return slices of a label map."""
        with self._labels(request, reviewer) as (_, labels):
            return self._slices(request, labels)

    def surface(self, request: Request, reviewer: str) -> Response:
        """Return the surfaces of a label map as points."""
        with self._labels(request, reviewer) as (case, labels):
            spacing = [case.view.source.spacing[n] for n in case.view.order]
            try:
                content = surface(labels, spacing)
            except IndexError as exc:
                raise RefusedError(404, "SURFACE", str(exc)) from None
        return Response(content, media_type="application/octet-stream")

    def picture(self, request: Request, reviewer: str, *, file: str) -> Response:
        """Return a picture of the result that is reviewed: the case's or its revision's."""
        result = latest_result(self.state.out, self._name(request, reviewer))
        try:
            content = read_regular_file(result / file, MAX_PREVIEW_BYTES)
        except OSError as exc:
            if is_passing(exc):
                raise
            raise RefusedError(404, "NO_PREVIEW", "The case has no such picture.") from None
        return Response(content, media_type="image/png")

    def verdict(self, request: Request, reviewer: str) -> Response:
        """Keep a verdict; return its number and the next case that is open."""
        name = self._name(request, reviewer)
        fields = read_fields(VerdictFields, request.state.body)
        case = self.state.opened(name)
        case.check(fields.version)
        labels = {f"{layer.model}/{s['label']}" for layer in case.layers for s in layer.structures}
        if not fields.structures.keys() <= labels:
            raise RefusedError(400, "STRUCTURES", "The case has no such structure.")
        verdict = fields.verdict(name, reviewer, case.seen)
        kept = self.state.keep(verdict, fields.comment.strip(), fields.last)
        return JSONResponse({"number": kept.number, **self.state.verdicts(name, reviewer)})

    def undo(self, request: Request, reviewer: str) -> Response:
        """Undo the reviewer's last verdict about a case."""
        name = self._name(request, reviewer)
        undone = self.state.undo(name, reviewer, read_fields(LastFields, request.state.body).last)
        return JSONResponse({"number": undone.number, **self.state.verdicts(name, reviewer)})

    def stroke(self, request: Request, reviewer: str) -> Response:
        """Paint a stroke on the reviewer's draft."""
        name = self._name(request, reviewer)
        case, fields = self.state.opened(name), read_fields(StrokeFields, request.state.body)
        if fields.label not in {0, *_numbers(case, fields.layer)}:
            raise RefusedError(400, "LABEL", NO_STRUCTURE)
        stroke, image, values = fields.stroke, case.image, None
        if fields.between is not None:
            if image is None:
                raise RefusedError(409, "NO_IMAGE", "A range takes the scan, which is not here.")
            low, high = ((value - image.intercept) / image.slope for value in fields.between)
            values = Values(image.array, low, high)

        def make_step(draft: LabelDraft) -> Step | None:
            canvas = Canvas(stroke.layer, draft.layer(stroke.layer), draft.spacing)
            if fields.shape == "polygon":
                return paint_polygon(canvas, stroke, values)
            return stroke if values is None else paint_between(canvas, stroke, values)

        return self._changed(case, reviewer, fields.version, make_step)

    def tool(self, request: Request, reviewer: str) -> Response:
        """Change a structure of the reviewer's draft by a tool."""
        name = self._name(request, reviewer)
        case, fields = self.state.opened(name), read_fields(ToolFields, request.state.body)
        if fields.label not in _numbers(case, fields.layer):
            raise RefusedError(400, "LABEL", NO_STRUCTURE)

        def make_step(draft: LabelDraft) -> Step | None:
            canvas = Canvas(fields.layer, draft.layer(fields.layer), draft.spacing)
            match fields.tool:
                case "fill":
                    normal = PLANES[fields.plane].normal
                    return fill_between(canvas, fields.label, normal, *fields.slices)
                case "smooth":
                    return smooth(canvas, fields.label, fields.radius_mm)
            return erase_islands(canvas, fields.label)

        return self._changed(case, reviewer, fields.version, make_step)

    def _changed(
        self,
        case: OpenedCase,
        reviewer: str,
        version: str,
        make_step: Callable[[LabelDraft], Step | None],
    ) -> Response:
        """Change the reviewer's draft by a step that is made of its labels, if it changes any."""
        case.check(version)  # before a draft of an earlier result is dropped
        held = self.state.drafts.of(case, reviewer)
        try:
            with held.changing(case, version) as draft:
                step = make_step(draft)
                changed = 0 if step is None else held.change(draft, step)
                return JSONResponse({"changed": changed, **held.state})
        except IndexError as exc:
            raise RefusedError(404, "SLICES", f"{exc}.".capitalize()) from None

    def draft(self, request: Request, reviewer: str) -> Response:
        """Return how far the reviewer's draft is.

        The page that shows a case asks this first, also if it knows the case already.
        """
        self.state.open_cases.show(self._name(request, reviewer), reviewer)
        case = self._opened(request, reviewer)
        self.state.log.note_view(case.name, reviewer)  # it may have been fetched ahead
        return JSONResponse(self.state.drafts.describe(case, reviewer))

    def discard(self, request: Request, reviewer: str) -> Response:
        """Drop the draft."""
        case, version = self._opened(request, reviewer), _version(request)
        held = self.state.drafts.of(case, reviewer)
        with held.changing(case, version):
            self.state.drafts.drop(held)
        return JSONResponse(self.state.drafts.describe(case, reviewer))

    def save_draft(self, request: Request, reviewer: str) -> Response:
        """Publish the draft as a revision."""
        name, version = self._name(request, reviewer), _version(request)
        return JSONResponse({"revision": self.state.save_draft(name, reviewer, version)})

    def step(self, request: Request, reviewer: str, *, step: Literal["undo", "redo"]) -> Response:
        """Undo the last stroke, or paint the last undone stroke again."""
        case, version = self._opened(request, reviewer), _version(request)
        held = self.state.drafts.of(case, reviewer)
        with held.changing(case, version) as draft:
            return JSONResponse({"changed": held.change(draft, step), **held.state})

    def _name(self, request: Request, reviewer: str, *, anew: bool = False) -> str:
        name = str(request.path_params["name"])
        self.state.check(name, reviewer, anew=anew)
        return name

    def _opened(self, request: Request, reviewer: str) -> OpenedCase:
        """Return an open case; STALE if the address has the version of another result."""
        case = self.state.opened(self._name(request, reviewer))
        if version := request.query_params.get("version"):
            case.check(version)
        return case

    @contextmanager
    def _labels(self, request: Request, reviewer: str) -> Iterator[tuple[OpenedCase, NDArray[Any]]]:
        """Give a label map: with the strokes of the reviewer's draft if they are asked for."""
        case, layer = self._opened(request, reviewer), read_range(request.path_params["layer"])[0]
        if layer >= len(case.layers):
            raise RefusedError(404, "LAYER", "The case has no such layer.")
        held = self.state.drafts.find(case.name, reviewer)
        if "draft" in request.query_params and held is not None and held.is_about(case):
            with held.using(case) as draft:
                yield case, draft.layer(layer)
        else:
            yield case, case.layers[layer].labels

    def _slices(self, request: Request, array: Any) -> Response:
        plane = PLANES.get(request.path_params["plane"])
        if plane is None:
            raise RefusedError(404, "PLANE", "Planes are axial, coronal and sagittal.")
        first, last = read_range(request.path_params["range"])
        try:
            content = slices(array, plane, first, last)
        except IndexError as exc:
            raise RefusedError(404, "SLICES", str(exc)) from None
        return Response(content, media_type="application/octet-stream")


def make_app(state: ReviewState, sessions: Sessions, origins: Sequence[str]) -> ASGIApp:
    """Return the review server as an ASGI application."""
    routes = Routes(state, sessions)
    of_case = "/api/case/{name}"
    known: list[tuple[str, str, Endpoint]] = [
        ("GET", "/api/me", routes.me),
        ("GET", "/api/worklist", routes.worklist),
        ("GET", "/api/worklist/near/{name}", routes.near),
        ("GET", of_case, routes.case),
        ("GET", f"{of_case}/image/{{plane}}/{{range}}", routes.image),
        ("GET", f"{of_case}/labels/{{layer}}/{{plane}}/{{range}}", routes.labels),
        ("GET", f"{of_case}/surface/{{layer}}", routes.surface),
        ("GET", f"{of_case}/preview", partial(routes.picture, file=PREVIEW)),
        ("GET", f"{of_case}/thumbnail", partial(routes.picture, file=THUMBNAIL)),
        ("POST", f"{of_case}/verdict", routes.verdict),
        ("POST", f"{of_case}/undo", routes.undo),
        ("POST", f"{of_case}/stroke", routes.stroke),
        ("POST", f"{of_case}/tool", routes.tool),
        ("GET", f"{of_case}/draft", routes.draft),
        ("POST", f"{of_case}/draft/undo", partial(routes.step, step="undo")),
        ("POST", f"{of_case}/draft/redo", partial(routes.step, step="redo")),
        ("POST", f"{of_case}/draft/discard", routes.discard),
        ("POST", f"{of_case}/draft/save", routes.save_draft),
    ]
    listed = [
        Route(path, _for_reviewers(endpoint, sessions), methods=[method])
        for method, path, endpoint in known
    ]
    listed += [
        Route("/api/session", routes.enter, methods=["POST"]),
        Route("/static/{name}", _static),
        *(Route(path, routes.page) for path in ("/", "/{reviewer}/", "/{reviewer}/case/{name}")),
    ]
    app = Starlette(
        routes=listed,
        exception_handlers=dict.fromkeys(
            (RefusedError, ScanError, OSError, HTTPException, Exception), _failure
        ),
    )
    return Guard(app, tuple(origins))


def _for_reviewers(endpoint: Endpoint, sessions: Sessions) -> Callable[[Request], Any]:
    """Return an endpoint that serves reviewers only, in a thread."""

    async def answer(request: Request) -> Response:
        reviewer = sessions.reviewer(request.headers.get("authorization", ""))
        if reviewer is None:
            raise RefusedError(403, "SESSION", "Open the link that the server printed.")
        request.state.body = await request.body() if request.method == "POST" else b""
        return await run_in_threadpool(endpoint, request, reviewer)

    return answer


def _numbers(case: OpenedCase, layer: int) -> set[int]:
    """Return the numbers of the structures of a label map; RefusedError if there is none."""
    if layer >= len(case.layers):
        raise RefusedError(400, "LAYER", "The case has no such layer.")
    return {each["number"] for each in case.layers[layer].structures}


def _version(request: Request) -> str:
    return read_fields(VersionFields, request.state.body).version


def _static(request: Request) -> Response:
    name = str(request.path_params["name"])
    if name.endswith(".html") or name not in {file.name for file in STATIC.iterdir()}:
        raise RefusedError(404, "NOT_FOUND", "There is no such file.")
    return _page(name)


def _page(name: str, status: int = 200) -> Response:
    suffix = name[name.rindex(".") :]
    content = (STATIC / name).read_bytes()
    if name == "review.css":
        content = BASE_STYLE.read_bytes() + content
    return Response(content, status, media_type=MEDIA_TYPES[suffix])


def _failure(_: Request, exc: Exception) -> Response:
    """Answer that a request failed, in our own words: no path, and no text of a library."""
    match exc:
        case RefusedError():
            text = exc.text.encode("utf-8", "replace").decode()  # it may quote half a character
            status, reason = exc.status, exc.reason
        case ScanError():
            status, reason, text = STATUS.get(exc.reason, 409), exc.code, f"{exc.detail}."
        case OSError():  # a file can't be read or written now, which tells nothing of the case
            name = errno.errorcode.get(exc.errno or 0, type(exc).__name__)
            logger.error("a request failed: %s", name)
            text = f"The server can't read its files for the moment ({name}): try again."
            status, reason = 503, "BUSY"
        case HTTPException():
            status, reason, text = exc.status_code, "NOT_FOUND", "There is no such address."
        case _:
            logger.error("a request failed: %s", type(exc).__name__)
            status, reason, text = 500, "INTERNAL", "A bug in scanloom."
    return JSONResponse({"reason": reason, "text": text}, status)
