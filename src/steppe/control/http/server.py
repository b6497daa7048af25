"""Run the service as a process: HTTP until a signal (`steppe serve`), or MCP over stdio (`steppe mcp`)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Literal, cast

import anyio
import uvicorn

from steppe.control.autoscale.loop import AutoscaleLoop
from steppe.control.autoscale.policy import ScalingPolicy
from steppe.control.factory import make_external_service, make_kubernetes_service, make_local_service
from steppe.control.http.app import make_app
from steppe.control.http.auth import WILDCARDS, AccessControl, Caller, TokenStore, public_names, require_safe_bind
from steppe.control.http.connections import Connections, preload_traceback_modules
from steppe.control.http.static import MISSING, is_page_complete
from steppe.control.http.stream import Hub, RunWatcher
from steppe.control.http.ws_frames import FrameSocket
from steppe.control.mcp.resources import notify_changes
from steppe.control.mcp.tools import McpAdapter
from steppe.control.periodic import PeriodicTask
from steppe.control.repository import PRIVATE
from steppe.control.run_requests import Bounds
from steppe.control.service import Service
from steppe.core.config.run import KafkaConfig
from steppe.core.contracts.errors import DamagedFile, MissingExtra, Unreachable, UsageError
from steppe.core.io.atomic_files import read_json, write_json
from steppe.records.run_directory import runs_root
from steppe.transport.kafka.client import import_kafka

TOKENS_FILE = "tokens.json"
ADDRESS_FILE = "serving.json"  # addresses of the last start, for `steppe serve --sign-in`


def serve(
    host: str,
    port: int,
    allowed: tuple[str, ...],
    bounds: Bounds,
    namespace: str | None = None,
    autoscale: Literal["off", "recommend", "set"] = "off",
    kafka: KafkaConfig | None = None,
    run: str | None = None,
) -> None:
    """Serve until SIGINT or SIGTERM; runs continue.

    With `namespace`, serve the run of that Kubernetes namespace; with `run`, that externally managed run. `kafka` has
    the brokers for runs of this machine, or those where the roles of the other kinds of runs report.
    """
    require_safe_bind(host, allowed)
    _require_compatible(namespace, run, kafka, autoscale)
    connections = Connections()
    listener = bind_listener(host, port, connections)
    preload_traceback_modules()
    service = _make_service(namespace, run, bounds, kafka)
    service.database.delete_unfinished_answers()
    keys = TokenStore(service.private / TOKENS_FILE)
    own_port = listener.getsockname()[1]
    gate = AccessControl(keys, allowed, port=own_port)
    app = make_app(service, gate, _background_tasks(service, bounds, autoscale, kafka), connections)
    addresses = _addresses(host, own_port, allowed)
    found = {"addresses": addresses, "host": WILDCARDS.get(host, host), "port": own_port}
    write_json(service.private / ADDRESS_FILE, found)
    print(f"steppe serves {service.root} at {addresses[0]}", flush=True)
    _print_links(addresses, keys)
    print(f"tokens:        {keys.path}", flush=True)
    if kafka is not None:
        print(f"kafka:         {kafka.address}", flush=True)
    if not is_page_complete():
        print(f"note:          {MISSING}", flush=True)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # URLs contain sign-in codes
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
        http=cast(type[asyncio.Protocol], connections.protocol),
        loop="asyncio",
        ws=FrameSocket,
        ws_max_size=4_096,
        ws_per_message_deflate=False,  # compressing the same text for every client would cost more than it saves
    )
    uvicorn.Server(config).run(sockets=[listener])


def sign_in() -> None:
    """Print a new sign-in link for the running service of these runs; raises Unreachable if it is not running."""
    private = runs_root().resolve() / PRIVATE
    try:
        found = read_json(private / ADDRESS_FILE)
        socket.create_connection((found["host"], found["port"]), timeout=5.0).close()
    except (DamagedFile, OSError):
        raise Unreachable(f"no service is running for {private.parent}: start it with steppe serve") from None
    _print_links(found["addresses"], TokenStore(private / TOKENS_FILE))


def _addresses(host: str, port: int, allowed: tuple[str, ...]) -> list[str]:
    """Return the URLs under which the service answers; the address it listens on, such as 0.0.0.0, often is none."""
    return [f"http://{f'[{name}]' if ':' in name else name}:{port}" for name in public_names(host, allowed)]


def _print_links(addresses: list[str], keys: TokenStore) -> None:
    code = keys.new_sign_in_link()
    for label, address in zip(("sign in once:", *("or:" for _ in addresses[1:])), addresses, strict=True):
        print(f"{label:14} {address}/sign-in?code={code}", flush=True)


def _background_tasks(
    service: Service, bounds: Bounds, autoscale: Literal["off", "recommend", "set"], kafka: KafkaConfig | None
) -> Iterator[PeriodicTask]:
    """Yield the tasks that run in parallel with serving requests."""
    yield from _publisher(service, kafka)
    if autoscale != "off":
        yield AutoscaleLoop(service, autoscale, ScalingPolicy(most=bounds.actors))
    if kafka is not None and service.backend.capabilities.receives_start_commands:
        from steppe.control.backends.kafka_listener import StartCommandListener

        yield StartCommandListener(service, kafka)


def _publisher(service: Service, kafka: KafkaConfig | None) -> Iterator[PeriodicTask]:
    """Attach and yield the command publisher, if the backend needs one."""
    if kafka is None or not service.backend.capabilities.publishes_commands:
        return
    from steppe.control.backends.publisher import CommandPublisher

    publisher = CommandPublisher(service, kafka)
    service.commands.publisher = publisher
    yield publisher


def _require_compatible(namespace: str | None, run: str | None, kafka: KafkaConfig | None, autoscale: str) -> None:
    hint = "give the brokers with --kafka HOST:PORT or STEPPE_KAFKA__ADDRESS"
    if run is not None and namespace is not None:
        raise UsageError(
            "--run (roles started elsewhere) and --kubernetes (roles of a cluster) exclude each other: give one of them"
        )
    if run is not None and kafka is None:
        raise UsageError(f"--run {run} needs Kafka, where its roles report: {hint}")
    if run is not None and autoscale != "off":
        raise UsageError(
            "--autoscale does not work with --run, because the service cannot start actors of that run: remove --autoscale"
        )
    if autoscale != "off" and namespace is not None and kafka is None:
        raise UsageError(f"--autoscale with --kubernetes needs Kafka, where the roles report: {hint}")


def _make_service(namespace: str | None, run: str | None, bounds: Bounds, kafka: KafkaConfig | None) -> Service:
    if kafka is not None:
        import_kafka()  # fail now if the client library is missing
    if namespace is not None:
        return _make_kubernetes_service(namespace, bounds, kafka)
    if run is None or kafka is None:
        return make_local_service(bounds, kafka)
    return make_external_service(run, kafka, bounds)


def _make_kubernetes_service(namespace: str, bounds: Bounds, kafka: KafkaConfig | None) -> Service:
    try:
        from steppe.control.backends.kube_client import KubernetesClient
    except ImportError as error:
        if error.name not in ("kubernetes", "aiohttp"):
            raise
        raise MissingExtra("steppe serve --kubernetes", "kube") from None
    client = KubernetesClient(namespace)
    try:
        return make_kubernetes_service(client, bounds, kafka)
    except BaseException:
        client.close()
        raise


def serve_mcp_stdio(scope: str, bounds: Bounds, kafka: KafkaConfig | None = None) -> None:
    """Serve MCP over standard input and output until the input ends; runs continue.

    The process that started this one has the scope.
    """
    service, hub = make_local_service(bounds, kafka), Hub()
    watcher = RunWatcher(service, hub)
    mcp = McpAdapter(service, Caller(f"stdio:{scope}", scope))

    async def serve_until_eof() -> None:
        hub.serve_on(asyncio.get_running_loop())
        async with anyio.create_task_group() as group:
            group.start_soon(notify_changes, hub, mcp.bus)
            await mcp.server.run_stdio_async()
            group.cancel_scope.cancel()

    tasks = [watcher, *_publisher(service, kafka)]
    for task in tasks:
        task.start()
    try:
        anyio.run(serve_until_eof)
    finally:
        for task in tasks:
            task.stop()
        service.close()


def bind_listener(host: str, port: int, connections: Connections | None = None) -> socket.socket:
    """Return a listening socket; raises UsageError if the address is not available."""
    try:
        return (connections or Connections()).listen(host, port)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from None
