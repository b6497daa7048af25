"""REST under /api/v1, and the WebSocket beside it. Translates: what is done is in control/service.py, who may do it in auth.py."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import anyio.to_thread
from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response, WebSocket, WebSocketDisconnect
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute
from starlette.routing import Match as RouteMatch

from steppe.control import models
from steppe.control.errors import to_problem
from steppe.control.http.auth import AccessControl, Caller, RequestRefused
from steppe.control.http.connections import Connections
from steppe.control.http.middleware import AccessMiddleware, problem_document, set_cookie_header
from steppe.control.http.prometheus import render_metrics
from steppe.control.http.static import add_page
from steppe.control.http.stream import SEND_TIMEOUT_S, Hub, RunWatcher, snapshot
from steppe.control.http.ws_frames import FRAMES
from steppe.control.mcp.resources import notify_changes
from steppe.control.mcp.tools import McpAdapter
from steppe.control.pagination import paginate
from steppe.control.periodic import PeriodicTask
from steppe.control.service import Service, operations
from steppe.core.contracts.errors import RunNotFound, SteppeError

PREFIX = "/api/v1"
THREADS = 4  # each keeps a connection to the store of every run that it looked at
FOLLOW_S = 20.0
MAX_ERRORS = 50  # of one request that are told
SESSION_CHECK_INTERVAL_S = 2.0  # how long a stream may outlive its session

RunId = Annotated[str, Path(pattern=models.RUN_ID, description="A run's id.")]
OperationId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Cursor = Annotated[int, Query(ge=0, lt=2**62, description="What the last answer said is `next`; 0 at first.")]
PageLimit = Annotated[int, Query(ge=1, le=1_000)]
PageCursor = Annotated[
    str | None, Query(max_length=300, description="What the last answer said is `next`; absent at first.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=200,
        pattern="^[!-~]+$",
        description="The same key with the same request gets the same answer, carried out once.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        pattern=r'^("[0-9]{1,18}"|[0-9]{1,18}|\*)$',
        description="Only if the run is at this generation: its ETag, in quotes, or the bare number; * is any.",
    ),
]
AnswerT = TypeVar("AnswerT", bound=BaseModel | None)


def _problem_responses(*codes: int) -> dict[int | str, dict[str, Any]]:
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {code: {"description": problem_document(code, "", "")["title"], "content": content} for code in codes}


_READ_STATUSES = (400, 401, 403, 404, 405, 422, 429, 503)
_WRITE_STATUSES = (*_READ_STATUSES, 409, 412, 413)


class Routes:
    """The routes over one service."""

    def __init__(self, service: Service, hub: Hub, gate: AccessControl) -> None:
        self.service, self.hub, self.gate = service, hub, gate
        self.router = APIRouter(prefix=PREFIX)
        self._reading()
        self._add_write_routes()
        self.router.add_api_websocket_route("/stream", self.stream)

    def _get(self, path: str, name: str, answer: type[BaseModel]) -> Callable[..., Any]:
        return self.router.get(
            path,
            operation_id=name,
            response_model=answer,
            responses=_problem_responses(*_READ_STATUSES),
            dependencies=[self._require_scope(name)],
            summary=_summary_line(name),
        )

    def _write_route(self, method: str, path: str, name: str, answer: Any, status: int = 202) -> Callable[..., Any]:
        return self.router.api_route(
            path,
            methods=[method],
            operation_id=name,
            response_model=answer,
            status_code=status,
            responses=_problem_responses(*_WRITE_STATUSES),
            dependencies=[self._require_scope(name)],
            summary=_summary_line(name),
        )

    def _require_scope(self, name: str) -> Any:
        """The caller, if his scope is that of the operation; whoever tries more is in the audit."""
        scope, database = operations()[name], self.service.database

        def check(request: Request) -> Caller:
            caller: Caller = request.scope["steppe.caller"]
            if not caller.may(scope):
                words = f"{name} needs the scope {scope}; this token has {caller.scope}"
                database.audit(caller.name, caller.scope, name, request.path_params.get("run"), f"refused: {words}")
                raise RequestRefused(403, "scope", words)
            request.scope["steppe.operation"] = name
            return caller

        return Depends(check)

    def _reading(self) -> None:
        service = self.service
        self._get("/environments", "list_environments", models.Environments)(_list_route(service.list_environments))
        self._get("/algorithms", "list_algorithms", models.Algorithms)(_list_route(service.list_algorithms))
        self._get("/version", "get_version", models.Version)(lambda: service.get_version())
        self._get("/health", "get_health", models.Health)(lambda: service.get_health())
        self._get("/readiness", "get_readiness", models.Health)(lambda: service.get_readiness())
        self._get("/runs", "list_runs", models.Runs)(_list_route(service.list_runs))

        @self._get("/operations", "list_operations", models.Operations)
        def list_operations(
            run: Annotated[str | None, Query(pattern=models.RUN_ID)] = None,
            limit: PageLimit = 100,
            cursor: PageCursor = None,
        ) -> models.Operations:
            return service.list_operations(run, limit, cursor)

        @self._get("/operations/{operation}", "get_operation", models.Operation)
        def get_operation(operation: OperationId) -> models.Operation:
            return service.get_operation(operation)

        @self._get("/audit", "get_audit", models.Audit)
        def get_audit(limit: PageLimit = 100, cursor: PageCursor = None) -> models.Audit:
            return service.get_audit(limit, cursor)

        self._add_run_read_routes()

    def _add_run_read_routes(self) -> None:
        service = self.service
        plain: dict[str, tuple[str, type[BaseModel]]] = {
            "/actors": ("get_actors", models.Actors),
            "/learner": ("get_learner", models.LearnerStatus),
            "/hyperparameters": ("get_hyperparameters", models.Hyperparameters),
        }
        for path, (name, answer) in plain.items():
            self._get(f"/runs/{{run}}{path}", name, answer)(_run_route(getattr(service, name)))

        @self._get("/runs/{run}", "get_run", models.RunDetail)
        def get_run(run: RunId, response: Response) -> models.RunDetail:
            found = service.get_run(run)
            response.headers["etag"] = _etag(found.generation)
            return found

        @self._get("/runs/{run}/checkpoints", "list_checkpoints", models.CheckpointList)
        def list_checkpoints(run: RunId, limit: PageLimit = 1_000, cursor: PageCursor = None) -> models.CheckpointList:
            return service.list_checkpoints(run, limit, cursor)

        @self._get("/runs/{run}/diagnosis", "diagnose_run", models.Finding)
        def diagnose_run(
            run: RunId,
            whole_life: Annotated[bool, Query(description="Over all of the run, not only over the last 30 s.")] = False,
        ) -> models.Finding:
            return service.diagnose_run(run, whole_life=whole_life)

        @self._get("/runs/{run}/metrics", "get_metrics", models.Metrics)
        def get_metrics(
            run: RunId,
            series: Annotated[
                list[str] | None, Query(max_length=50, description="Which curves; all if absent.")
            ] = None,
            since: Cursor = 0,
            max_points: Annotated[int, Query(ge=2, le=10_000)] = 500,
        ) -> models.Metrics:
            return service.get_metrics(run, series, since, max_points)

        @self._get("/runs/{run}/logs", "get_logs", models.Logs)
        async def get_logs(
            run: RunId,
            source: Annotated[str | None, Query(pattern="^[a-z0-9-]{1,64}$")] = None,
            after: Cursor = 0,
            max_bytes: Annotated[int, Query(ge=1_024, le=1 << 20)] = 65_536,
            follow_s: Annotated[float, Query(ge=0, le=FOLLOW_S, description="Wait so long for a new line.")] = 0.0,
        ) -> models.Logs:
            deadline = time.monotonic() + follow_s
            while True:
                found = await anyio.to_thread.run_sync(service.get_logs, run, source, after, max_bytes)
                if found.lines or time.monotonic() >= deadline:
                    return found
                await asyncio.sleep(0.25)

        @self._get("/runs/{run}/events", "get_events", models.Events)
        def get_events(run: RunId, after: Cursor = 0, limit: PageLimit = 200) -> models.Events:
            return service.get_events(run, after, limit)

        @self._get("/runs/{run}/evaluations", "list_evaluations", models.Evaluations)
        def list_evaluations(run: RunId, after: Cursor = 0, limit: PageLimit = 200) -> models.Evaluations:
            return service.list_evaluations(run, after, limit)

    def _add_write_routes(self) -> None:
        service = self.service

        @self._write_route("POST", "/runs", "create_run", models.RunDetail, 201)
        def create_run(
            body: models.RunRequest, request: Request, response: Response, key: IdempotencyKey = None
        ) -> Any:
            made = self._once(request, key, body, None, lambda issuer: service.create_run(body, issuer))
            response.headers["location"] = f"{PREFIX}/runs/{made['id']}"
            response.headers["etag"] = _etag(made["generation"])
            return made

        for word in ("start", "pause", "resume", "stop", "kill"):
            name = f"{word}_run"
            self._write_route("POST", f"/runs/{{run}}/{word}", name, models.Operation)(self._asking(name))

        @self._write_route("DELETE", "/runs/{run}", "delete_run", None, 204)
        def delete_run(run: RunId, request: Request, key: IdempotencyKey = None, match: IfMatch = None) -> Response:
            self._once(request, key, None, run, lambda issuer: service.delete_run(run, issuer, _parse_if_match(match)))
            return Response(status_code=204)

        @self._write_route("PUT", "/runs/{run}/actors", "scale_actors", models.Operation)
        def scale_actors(
            run: RunId,
            body: models.ActorCount,
            request: Request,
            key: IdempotencyKey = None,
            match: IfMatch = None,
        ) -> Any:
            return self._once(
                request,
                key,
                body,
                run,
                lambda issuer: service.scale_actors(run, body.actors, issuer, _parse_if_match(match)),
            )

        @self._write_route("PUT", "/runs/{run}/learner", "scale_learner", models.Operation)
        def scale_learner(
            run: RunId,
            body: models.LearnerCount,
            request: Request,
            key: IdempotencyKey = None,
            match: IfMatch = None,
        ) -> Any:
            return self._once(
                request,
                key,
                body,
                run,
                lambda issuer: service.scale_learner(run, body.learner, issuer, _parse_if_match(match)),
            )

        @self._write_route("PATCH", "/runs/{run}/hyperparameters", "set_hyperparameters", models.Effects)
        def set_hyperparameters(
            run: RunId,
            body: models.HyperparameterChange,
            request: Request,
            key: IdempotencyKey = None,
            match: IfMatch = None,
        ) -> Any:
            def change(issuer: str) -> models.Effects:
                return service.set_hyperparameters(
                    run, body.values, issuer, _parse_if_match(match), dry_run=body.dry_run
                )

            return self._once(request, key, body, run, change)

    def _asking(self, name: str) -> Callable[..., Any]:
        def ask(run: RunId, request: Request, key: IdempotencyKey = None, match: IfMatch = None) -> Any:
            operation = getattr(self.service, name)
            return self._once(request, key, None, run, lambda issuer: operation(run, issuer, _parse_if_match(match)))

        return ask

    def _once(
        self, request: Request, key: str | None, body: BaseModel | None, run: str | None, call: Callable[[str], AnswerT]
    ) -> Any:
        """Carry a change out, or give the answer that the same request got before; written into the audit either way."""
        caller: Caller = request.scope["steppe.caller"]
        about = (caller.name, caller.scope, request.scope["steppe.operation"], run)
        database = self.service.database
        mine = None if key is None else f"{caller.scope}:{key}"
        if mine is not None:
            text = json.dumps([request.method, request.url.path, body.model_dump(mode="json") if body else None])
            before = database.claim_idempotency_key(mine, hashlib.sha256(text.encode()).hexdigest())
            if before is not None:
                database.audit(*about, "repeated")
                return before
        try:
            answer = call(caller.name)
        except BaseException as error:
            database.audit(*about, f"refused: {error}")
            if mine is not None:
                database.save_answer(mine, None)
            raise
        told = answer.model_dump(mode="json", by_alias=True) if answer is not None else {}
        if mine is not None:
            database.save_answer(mine, told)
        database.audit(*about, "done")
        return told

    async def stream(self, socket: WebSocket, resume: str | None = None) -> None:
        """`?resume=EPOCH:NUMBER` goes on after that message, where it is still known; otherwise a snapshot comes first."""
        await socket.accept()
        self.hub.clients += 1
        gone = asyncio.ensure_future(_wait_for_disconnect(socket))
        try:
            number = await self._begin(socket, resume)
            with self.hub.subscribe(socket.scope["extensions"][FRAMES], number) as listener:
                signed_in = await self._listen(socket.scope.get("steppe.caller"), gone, listener.dropped)
            if not signed_in:
                await socket.close(1008, "signed out")
            elif not gone.done():
                await _send_text(
                    socket, json.dumps({"type": "dropped", "detail": "too slow: connect again for a snapshot"})
                )
                await socket.close(1013, "too slow")
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return  # the client has gone, or does not read
        finally:
            self.hub.clients -= 1
            gone.cancel()

    async def _listen(self, caller: Caller | None, *ends: asyncio.Future[None]) -> bool:
        """Wait for an end; False when it is that the caller's session was ended."""
        session = caller.session if caller is not None else None
        while not any(end.done() for end in ends):
            if session is not None and not self.gate.keys.sessions.is_live(session):
                return False
            await asyncio.wait(ends, timeout=SESSION_CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _begin(self, socket: WebSocket, resume: str | None) -> int:
        """The number of the message that the client has heard, after a snapshot unless it goes on."""
        epoch, _, number = (resume or "").partition(":")
        if epoch == self.hub.epoch and number.isdigit() and self.hub.after(int(number)) is not None:
            return int(number)
        begun, text = await anyio.to_thread.run_sync(snapshot, self.service, self.hub)
        await _send_text(socket, text)
        return begun


async def _send_text(socket: WebSocket, text: str) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await socket.send_text(text)


async def _wait_for_disconnect(socket: WebSocket) -> None:
    """Clients have nothing to say; reading is how their end is noticed."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await socket.receive_text()


def _etag(generation: int) -> str:
    return f'"{generation}"'


def _parse_if_match(match: str | None) -> int | None:
    """What an If-Match header asks for."""
    return None if match in (None, "*") else int(str(match).strip('"'))


def _list_route(operation: Callable[[int, str | None], Any]) -> Callable[..., Any]:
    def read(limit: PageLimit = 1_000, cursor: PageCursor = None) -> Any:
        return operation(limit, cursor)

    return read


def _run_route(operation: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(run: RunId) -> Any:
        return operation(run)

    return read


def _summary_line(name: str) -> str:
    return (getattr(Service, name).__doc__ or name).strip().splitlines()[0]


def make_app(
    service: Service, gate: AccessControl, beside: Iterable[PeriodicTask] = (), connections: Connections | None = None
) -> FastAPI:
    """The application: routes, problem documents, the gate around it all, and the life of the watcher and of what else is done
    beside answering. `connections` are those of the server, where their number is bounded."""
    hub = Hub()
    watcher = RunWatcher(service, hub)
    works = (watcher, *beside)
    mcp = McpAdapter(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        hub.serve_on(asyncio.get_running_loop())
        for work in works:
            work.start()
        telling = asyncio.gather(hub.deliver(), notify_changes(hub, mcp.bus))
        try:
            async with mcp.server.session_manager.run():
                yield
        finally:
            telling.cancel()
            for work in works:
                work.stop()
            service.close()

    app = FastAPI(
        title="Steppe",
        version="1",
        description="Start, stop, watch, scale and tune training runs.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    router = Routes(service, hub, gate).router
    app.include_router(router)
    _add_probe_routes(app, service, hub, works)
    _add_sessions(app, service, gate)
    app.router.routes += mcp.routes(gate)
    add_page(app, service, PREFIX)
    _add_exception_handlers(app, [*router.routes, *app.routes])
    _customize_openapi(app)
    app.add_middleware(AccessMiddleware, gate=gate, connections=connections)
    return app


def _add_probe_routes(app: FastAPI, service: Service, hub: Hub, works: Sequence[PeriodicTask]) -> None:
    """What is not an operation: probes, Prometheus."""

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    def readyz() -> JSONResponse:
        found = service.get_readiness()
        deaf = next((work.trouble for work in works if work.required_for_readiness and work.trouble is not None), None)
        if found.status == "ok" and deaf is not None:
            found = models.Health(status="unavailable", detail=f"commands on Kafka cannot be heard: {deaf}"[:500])
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.get("/version", include_in_schema=False)
    def version() -> models.Version:
        return service.get_version()

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> PlainTextResponse:
        text = render_metrics(service, clients=hub.clients, failures=works[0].failures)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_sessions(app: FastAPI, service: Service, gate: AccessControl) -> None:
    """The session of the page, and those of all browsers that are signed in."""
    sessions = gate.keys.sessions

    @app.get(f"{PREFIX}/session", include_in_schema=False)
    async def session(request: Request) -> dict[str, Any]:
        caller: Caller = request.scope["steppe.caller"]
        csrf = gate.keys.csrf(caller.session) if caller.session else None
        return {"name": caller.name, "scope": caller.scope, "csrf": csrf}

    @app.delete(f"{PREFIX}/session", include_in_schema=False)
    def sign_out(request: Request) -> Response:
        caller: Caller = request.scope["steppe.caller"]
        if caller.session is None:
            raise RequestRefused(
                409, "session", "this caller has a token, not a session: there is nothing to sign out of"
            )
        end(caller, caller.session, "sign_out")
        over = set_cookie_header(gate, request.scope, request.headers, "", 0)
        return Response(status_code=204, headers={"set-cookie": over})

    @app.get(f"{PREFIX}/sessions", include_in_schema=False)
    def list_sessions(request: Request, limit: PageLimit = 100, cursor: PageCursor = None) -> dict[str, Any]:
        caller = admin(request, "list_sessions")
        page, following = paginate(sessions.list(), lambda one: one.id, limit, cursor)
        return {"sessions": [asdict(one) | {"current": one.id == caller.session} for one in page], "next": following}

    @app.delete(f"{PREFIX}/sessions/{{identity}}", include_in_schema=False)
    def revoke(request: Request, identity: Annotated[str, Path(pattern="^[0-9a-f]{16}$")]) -> Response:
        end(admin(request, "revoke_session"), identity, "revoke_session")
        return Response(status_code=204)

    def admin(request: Request, name: str) -> Caller:
        caller: Caller = request.scope["steppe.caller"]
        if not caller.may("admin"):
            raise RequestRefused(403, "scope", f"{name} needs the scope admin; this token has {caller.scope}")
        return caller

    def end(caller: Caller, identity: str, name: str) -> None:
        if not sessions.end(identity):
            raise RunNotFound("there is no session of that id")
        service.database.audit(caller.name, caller.scope, name, None, f"done: session:{identity}")


def _add_exception_handlers(app: FastAPI, routes: list[BaseRoute]) -> None:
    def told(status: int, code: str, detail: str) -> JSONResponse:
        return JSONResponse(problem_document(status, code, detail), status, media_type="application/problem+json")

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> JSONResponse:
        return told(error.status, error.code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [(".".join(str(part) for part in one["loc"])[:200], one["msg"][:300]) for one in error.errors()]
        answer = problem_document(422, "invalid", "; ".join(f"{where}: {words}" for where, words in found)[:2_000])
        answer["errors"] = [{"field": where, "detail": words} for where, words in found[:MAX_ERRORS]]
        return JSONResponse(answer, 422, media_type="application/problem+json")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        answer = told(error.status_code, "http", str(error.detail))
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["allow"] = ", ".join(_allowed_methods(routes, request))
        return answer

    @app.exception_handler(SteppeError)
    async def ours(request: Request, error: SteppeError) -> JSONResponse:
        return told(*to_problem(error))


def _allowed_methods(routes: list[BaseRoute], request: Request) -> list[str]:
    """The methods of a path, of which each may have a route of its own."""
    matching = (route for route in routes if route.matches(request.scope)[0] is not RouteMatch.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _customize_openapi(app: FastAPI) -> None:
    """OpenAPI with our problem documents in place of FastAPI's own, and how one signs in."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = made()
            parts = schema["components"]["schemas"]
            found = models.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            parts |= found.pop("$defs")
            parts["Problem"] = found
            for name in ("HTTPValidationError", "ValidationError"):
                parts.pop(name, None)
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
            _add_openapi_links(schema["paths"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_openapi_links(paths: dict[str, Any]) -> None:
    """Say which answers name what other requests are about: a new run, and an operation under way."""
    every = {method["operationId"]: method for path in paths.values() for method in path.values()}
    mine = [method["operationId"] for path, methods in paths.items() if "{run}" in path for method in methods.values()]
    named = "$response.body#/id"
    about = {name: {"operationId": name, "parameters": {"run": named}} for name in mine}
    every["create_run"]["responses"]["201"]["links"] = about
    for method in every.values():
        content = method["responses"].get("202", {}).get("content", {}).get("application/json", {})
        if content.get("schema", {}).get("$ref", "").endswith("/Operation"):
            became = {"operationId": "get_operation", "parameters": {"operation": named}}
            method["responses"]["202"]["links"] = {"get_operation": became}
