"""REST API under /api/v1 and the WebSocket of changes. Only translates: control/service.py executes, auth.py decides who may."""

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
THREADS = 4  # each keeps a connection to the store of every run that it has read
FOLLOW_S = 20.0  # maximum wait for new log lines
MAX_ERRORS = 50  # validation errors in one response
SESSION_CHECK_INTERVAL_S = 2.0  # how long a stream may outlive its session

RunId = Annotated[str, Path(pattern=models.RUN_ID, description="Id of a run.")]
OperationId = Annotated[str, Path(pattern="^[0-9a-f]{32}$")]
Cursor = Annotated[int, Query(ge=0, lt=2**62, description="`next` of the previous response; 0 at first.")]
PageLimit = Annotated[int, Query(ge=1, le=1_000)]
PageCursor = Annotated[
    str | None, Query(max_length=300, description="`next` of the previous response; absent at first.")
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        max_length=200,
        pattern="^[!-~]+$",
        description="Repeating a request with the same key returns the first response; it is executed only once.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        alias="If-Match",
        pattern=r'^("[0-9]{1,18}"|[0-9]{1,18}|\*)$',
        description="Execute only if the run has this generation: its ETag, in quotes, or the number alone; * means any.",
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
        self._add_read_routes()
        self._add_write_routes()
        self.router.add_api_websocket_route("/stream", self.stream)

    def _get(self, path: str, name: str, response: type[BaseModel]) -> Callable[..., Any]:
        return self.router.get(
            path,
            operation_id=name,
            response_model=response,
            responses=_problem_responses(*_READ_STATUSES),
            dependencies=[self._require_scope(name)],
            summary=_summary_line(name),
        )

    def _write_route(self, method: str, path: str, name: str, response: Any, status: int = 202) -> Callable[..., Any]:
        return self.router.api_route(
            path,
            methods=[method],
            operation_id=name,
            response_model=response,
            status_code=status,
            responses=_problem_responses(*_WRITE_STATUSES),
            dependencies=[self._require_scope(name)],
            summary=_summary_line(name),
        )

    def _require_scope(self, name: str) -> Any:
        """Return a dependency that requires the operation's scope; refusals are recorded in the audit log."""
        scope, database = operations()[name], self.service.database

        def check(request: Request) -> Caller:
            caller: Caller = request.scope["steppe.caller"]
            if not caller.may(scope):
                message = f"{name} needs the scope {scope}; this token has {caller.scope}"
                database.audit(caller.name, caller.scope, name, request.path_params.get("run"), f"refused: {message}")
                raise RequestRefused(403, "scope", message)
            request.scope["steppe.operation"] = name
            return caller

        return Depends(check)

    def _add_read_routes(self) -> None:
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
        routes: dict[str, tuple[str, type[BaseModel]]] = {
            "/actors": ("get_actors", models.Actors),
            "/learner": ("get_learner", models.LearnerStatus),
            "/hyperparameters": ("get_hyperparameters", models.Hyperparameters),
        }
        for path, (name, response_model) in routes.items():
            self._get(f"/runs/{{run}}{path}", name, response_model)(_run_route(getattr(service, name)))

        @self._get("/runs/{run}", "get_run", models.RunDetail)
        def get_run(run: RunId, response: Response) -> models.RunDetail:
            found = service.get_run(run)
            response.headers["etag"] = _etag(found.generation)
            return found

        @self._get("/runs/{run}/checkpoints", "list_checkpoints", models.CheckpointList)
        def list_checkpoints(run: RunId, limit: PageLimit = 1_000, cursor: PageCursor = None) -> models.CheckpointList:
            return service.list_checkpoints(run, limit, cursor)

        @self._get("/runs/{run}/diagnosis", "diagnose_run", models.RunDiagnosis)
        def diagnose_run(
            run: RunId,
            whole_life: Annotated[bool, Query(description="Diagnose the whole run instead of its last 30 s.")] = False,
        ) -> models.RunDiagnosis:
            return service.diagnose_run(run, whole_life=whole_life)

        @self._get("/runs/{run}/metrics", "get_metrics", models.Metrics)
        def get_metrics(
            run: RunId,
            series: Annotated[
                list[str] | None, Query(max_length=50, description="Names of the curves. Default: all.")
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
            follow_s: Annotated[
                float, Query(ge=0, le=FOLLOW_S, description="Wait up to this many seconds for a new line.")
            ] = 0.0,
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
            run = self._once(request, key, body, None, lambda issuer: service.create_run(body, issuer))
            response.headers["location"] = f"{PREFIX}/runs/{run['id']}"
            response.headers["etag"] = _etag(run["generation"])
            return run

        for verb in ("start", "pause", "resume", "stop", "kill"):
            name = f"{verb}_run"
            self._write_route("POST", f"/runs/{{run}}/{verb}", name, models.Operation)(self._change_route(name))

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

    def _change_route(self, name: str) -> Callable[..., Any]:
        def change(run: RunId, request: Request, key: IdempotencyKey = None, match: IfMatch = None) -> Any:
            operation = getattr(self.service, name)
            return self._once(request, key, None, run, lambda issuer: operation(run, issuer, _parse_if_match(match)))

        return change

    def _once(
        self, request: Request, key: str | None, body: BaseModel | None, run: str | None, call: Callable[[str], AnswerT]
    ) -> Any:
        """Execute a change, or return the first response to a repeated request; the audit log records both."""
        caller: Caller = request.scope["steppe.caller"]
        entry = (caller.name, caller.scope, request.scope["steppe.operation"], run)
        database = self.service.database
        scoped_key = None if key is None else f"{caller.scope}:{key}"
        if scoped_key is not None:
            text = json.dumps([request.method, request.url.path, body.model_dump(mode="json") if body else None])
            earlier = database.claim_idempotency_key(scoped_key, hashlib.sha256(text.encode()).hexdigest())
            if earlier is not None:
                database.audit(*entry, "repeated")
                return earlier
        try:
            answer = call(caller.name)
        except BaseException as error:
            database.audit(*entry, f"refused: {error}")
            if scoped_key is not None:
                database.save_answer(scoped_key, None)
            raise
        content = answer.model_dump(mode="json", by_alias=True) if answer is not None else {}
        if scoped_key is not None:
            database.save_answer(scoped_key, content)
        database.audit(*entry, "done")
        return content

    async def stream(self, socket: WebSocket, resume: str | None = None) -> None:
        """Send changes. `?resume=EPOCH:NUMBER` continues after that message if it is still buffered; else a snapshot is first."""
        await socket.accept()
        self.hub.clients += 1
        disconnected = asyncio.ensure_future(_wait_for_disconnect(socket))
        try:
            number = await self._begin(socket, resume)
            with self.hub.subscribe(socket.scope["extensions"][FRAMES], number) as subscriber:
                signed_in = await self._wait_for_end(
                    socket.scope.get("steppe.caller"), disconnected, subscriber.dropped
                )
            if not signed_in:
                await socket.close(1008, "signed out")
            elif not disconnected.done():
                await _send_text(
                    socket, json.dumps({"type": "dropped", "detail": "too slow: connect again for a snapshot"})
                )
                await socket.close(1013, "too slow")
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            return  # the client has disconnected, or does not read
        finally:
            self.hub.clients -= 1
            disconnected.cancel()

    async def _wait_for_end(self, caller: Caller | None, *ends: asyncio.Future[None]) -> bool:
        """Wait until one of `ends` is done; return False if the caller's session ended first."""
        session = caller.session if caller is not None else None
        while not any(end.done() for end in ends):
            if session is not None and not self.gate.keys.sessions.is_live(session):
                return False
            await asyncio.wait(ends, timeout=SESSION_CHECK_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
        return True

    async def _begin(self, socket: WebSocket, resume: str | None) -> int:
        """Return the number of the last message that the client has: the one it resumes after, or that of a snapshot."""
        epoch, _, number = (resume or "").partition(":")
        if epoch == self.hub.epoch and number.isdigit() and self.hub.after(int(number)) is not None:
            return int(number)
        snapshot_number, text = await anyio.to_thread.run_sync(snapshot, self.service, self.hub)
        await _send_text(socket, text)
        return snapshot_number


async def _send_text(socket: WebSocket, text: str) -> None:
    async with asyncio.timeout(SEND_TIMEOUT_S):
        await socket.send_text(text)


async def _wait_for_disconnect(socket: WebSocket) -> None:
    """Read until the client disconnects. Clients send nothing; reading detects the end."""
    with contextlib.suppress(WebSocketDisconnect, RuntimeError):
        while True:
            await socket.receive_text()


def _etag(generation: int) -> str:
    return f'"{generation}"'


def _parse_if_match(match: str | None) -> int | None:
    """Return the generation in an If-Match header; None for any."""
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
    service: Service, gate: AccessControl, tasks: Iterable[PeriodicTask] = (), connections: Connections | None = None
) -> FastAPI:
    """Make the application: routes, problem responses, access middleware and background tasks.

    `tasks` run in parallel with serving requests. `connections` are those of the server, if their number is limited.
    """
    hub = Hub()
    watcher = RunWatcher(service, hub)
    background = (watcher, *tasks)
    mcp = McpAdapter(service)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        hub.serve_on(asyncio.get_running_loop())
        for task in background:
            task.start()
        notifying = asyncio.gather(hub.deliver(), notify_changes(hub, mcp.bus))
        try:
            async with mcp.server.session_manager.run():
                yield
        finally:
            notifying.cancel()
            for task in background:
                task.stop()
            service.close()

    app = FastAPI(
        title="Steppe",
        version="1",
        description="Start, stop, observe, scale and tune training runs.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
    )
    router = Routes(service, hub, gate).router
    app.include_router(router)
    _add_probe_routes(app, service, hub, background)
    _add_sessions(app, service, gate)
    app.router.routes += mcp.routes(gate)
    add_page(app, service, PREFIX)
    _add_exception_handlers(app, [*router.routes, *app.routes])
    _customize_openapi(app)
    app.add_middleware(AccessMiddleware, gate=gate, connections=connections)
    return app


def _add_probe_routes(app: FastAPI, service: Service, hub: Hub, tasks: Sequence[PeriodicTask]) -> None:
    """Add the routes that are not operations: probes and Prometheus metrics."""

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", include_in_schema=False)
    def readyz() -> JSONResponse:
        found = service.get_readiness()
        required = (task.last_error for task in tasks if task.required_for_readiness)
        error = next((error for error in required if error is not None), None)
        if found.status == "ok" and error is not None:
            found = models.Health(status="unavailable", detail=f"commands cannot be read from Kafka: {error}"[:500])
        return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)

    @app.get("/version", include_in_schema=False)
    def version() -> models.Version:
        return service.get_version()

    @app.get("/metrics", include_in_schema=False)
    def metrics() -> PlainTextResponse:
        text = render_metrics(service, clients=hub.clients, failures=tasks[0].failures)
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


def _add_sessions(app: FastAPI, service: Service, gate: AccessControl) -> None:
    """Add the routes of sessions: the page's own, and for admins those of all signed-in browsers."""
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
            raise RequestRefused(409, "session", "this caller uses a token, not a session, and cannot sign out")
        end(caller, caller.session, "sign_out")
        expired = set_cookie_header(gate, request.scope, request.headers, "", 0)
        return Response(status_code=204, headers={"set-cookie": expired})

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
            raise RunNotFound("there is no session with that id")
        service.database.audit(caller.name, caller.scope, name, None, f"done: session:{identity}")


def _add_exception_handlers(app: FastAPI, routes: list[BaseRoute]) -> None:
    def problem(status: int, code: str, detail: str) -> JSONResponse:
        return JSONResponse(problem_document(status, code, detail), status, media_type="application/problem+json")

    @app.exception_handler(RequestRefused)
    async def refused(request: Request, error: RequestRefused) -> JSONResponse:
        return problem(error.status, error.code, error.detail)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        found = [(".".join(str(part) for part in one["loc"])[:200], one["msg"][:300]) for one in error.errors()]
        answer = problem_document(422, "invalid", "; ".join(f"{field}: {message}" for field, message in found)[:2_000])
        answer["errors"] = [{"field": field, "detail": message} for field, message in found[:MAX_ERRORS]]
        return JSONResponse(answer, 422, media_type="application/problem+json")

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        answer = problem(error.status_code, "http", str(error.detail))
        answer.headers.update(error.headers or {})
        if error.status_code == 405:
            answer.headers["allow"] = ", ".join(_allowed_methods(routes, request))
        return answer

    @app.exception_handler(SteppeError)
    async def ours(request: Request, error: SteppeError) -> JSONResponse:
        return problem(*to_problem(error))


def _allowed_methods(routes: list[BaseRoute], request: Request) -> list[str]:
    """Return the methods of a path; each may have its own route."""
    matching = (route for route in routes if route.matches(request.scope)[0] is not RouteMatch.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", None) or ()})


def _customize_openapi(app: FastAPI) -> None:
    """Replace FastAPI's error schemas in the OpenAPI document by problem documents, and add authentication and links."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = generate()
            schemas = schema["components"]["schemas"]
            found = models.Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= found.pop("$defs")
            schemas["Problem"] = found
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{"token": []}]
            _add_openapi_links(schema["paths"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _add_openapi_links(paths: dict[str, Any]) -> None:
    """Add links from responses to the requests that use their ids: a new run, and a pending operation."""
    every = {method["operationId"]: method for path in paths.values() for method in path.values()}
    run_operations = [
        method["operationId"] for path, methods in paths.items() if "{run}" in path for method in methods.values()
    ]
    response_id = "$response.body#/id"
    links = {name: {"operationId": name, "parameters": {"run": response_id}} for name in run_operations}
    every["create_run"]["responses"]["201"]["links"] = links
    for method in every.values():
        content = method["responses"].get("202", {}).get("content", {}).get("application/json", {})
        if content.get("schema", {}).get("$ref", "").endswith("/Operation"):
            link = {"operationId": "get_operation", "parameters": {"operation": response_id}}
            method["responses"]["202"]["links"] = {"get_operation": link}
