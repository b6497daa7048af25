"""`steppe params …` and `steppe node`: parameter servers and nodes of a cluster that a TOML file describes.

Tokens come from files and environment variables, never from the command line.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table
from steppe.cli.text_charts import count
from steppe.core.contracts.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from steppe.core.config.cluster import ClusterConfig
    from steppe.params.client import ParameterClient
    from steppe.params.server import ParameterServer

params = typer.Typer(help="Parameter server for several machines.", rich_markup_mode=None, no_args_is_help=True)

File = Annotated[Path, typer.Option("--cluster", metavar="FILE", help="TOML file of the cluster.", show_default=False)]
MaybeFile = Annotated[Path | None, typer.Option("--cluster", metavar="FILE", help="TOML file of the cluster.")]
Address = Annotated[
    str | None,
    typer.Argument(
        metavar="[URL]", help="Address of the server: grpc://host:port, or grpcs:// with TLS; or give --cluster."
    ),
]
Ca = Annotated[Path | None, typer.Option("--ca", metavar="FILE", help="CA certificate of the server (PEM).")]


@params.command()
def serve(cluster: File, as_json: AsJson = False) -> None:
    """Serve the parameters of a cluster until Ctrl-C or SIGTERM.

    With [server] checkpoint it continues from its last checkpoint. STEPPE_PARAMS_TOKEN has the token of all nodes, or [server] tokens
    one for each node.
    """
    from steppe.compose import cluster as clusters
    from steppe.core.config.run import from_environ, resolve_config

    described, run = _read_cluster(cluster)
    if described.backend != "grpc":
        raise UsageError(f"with backend {described.backend!r} the first node starts the server: start the nodes")
    layers = ((f"{cluster} [run]", _flat(run)), ("environment", from_environ()))
    server = clusters.make_cluster_server(described, resolve_config(*layers))
    stopping = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopping.set())
    try:
        port = clusters.serve_cluster(server, described)
        url = described.url.rpartition(":")[0] + f":{port}"
        _print_started(
            {"url": url, "run": server.run, "version": server.version, "fell_back": server.fell_back}, as_json=as_json
        )
        while not stopping.wait(1.0):
            server.tick()
        _stop(server, described)
    finally:
        server.close()


def _print_started(about: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        return emit(about)
    if about["fell_back"]:
        print("steppe: WARNING: the newest checkpoint is damaged; the previous one was loaded", file=sys.stderr)
    start = "from the initial parameters" if not about["version"] else f"from version {about['version']}"
    return print(f"serving run {about['run']} at {about['url']} {start}; stop with Ctrl-C", flush=True)


def _stop(server: ParameterServer, cluster: ClusterConfig) -> None:
    """Finish calls in progress, then write the last checkpoint, so that no accepted push is lost."""
    server.stop_server()
    if cluster.server.checkpoint is not None:
        print(f"steppe: stopped at version {server.version}: {server.save_checkpoint()}", file=sys.stderr)
    else:
        print(
            f"steppe: stopped at version {server.version}, which was not saved: [server] has no checkpoint",
            file=sys.stderr,
        )


@params.command()
def status(url: Address = None, cluster: MaybeFile = None, ca: Ca = None, as_json: AsJson = False) -> None:
    """Show accepted and refused pushes, and the progress of each node."""
    with _client(url, cluster, ca) as client:
        stats = client.get_server_stats()
    if as_json:
        return emit(stats)
    plain = {name: value for name, value in stats.items() if name not in ("workers", "staleness")}
    print_table(["", ""], [(name, _format_value(value)) for name, value in plain.items()])
    workers = stats.get("workers", {})
    if workers:
        rows = [_worker_row(name, found) for name, found in workers.items()]
        print()
        print_table(["node", "connected", "accepted", "refused", "steps", "episodes"], rows)
    return None


def _worker_row(name: str, found: dict[str, Any]) -> tuple[object, ...]:
    metrics = found["metrics"]
    connected = "yes" if found["registered"] else "no"
    steps, episodes = (count(int(metrics[key])) if key in metrics else None for key in ("env_steps", "episodes"))
    return name, connected, found["accepted"], _format_value(found["refused"]), steps, episodes


def _format_value(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format_value(inner)}" for name, inner in value.items()) or "none"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


@params.command()
def checkpoint(url: Address = None, cluster: MaybeFile = None, ca: Ca = None, as_json: AsJson = False) -> None:
    """Make a server write a checkpoint now, to its configured path."""
    with _client(url, cluster, ca) as client:
        path = client.save_checkpoint()
    emit({"path": path}) if as_json else print(path)


@params.command()
def privacy(
    epsilon: Annotated[float | None, typer.Option(metavar="E", help="The privacy budget.")] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Number of released rounds.")] = None,
    noise: Annotated[float | None, typer.Option(metavar="Z", help="The noise multiplier.")] = None,
    delta: Annotated[float, typer.Option(metavar="D", help="Probability that the guarantee does not hold.")] = 1e-5,
    sampling_rate: Annotated[float, typer.Option(metavar="Q", help="Share of clients sampled in each round.")] = 1.0,
    as_json: AsJson = False,
) -> None:
    """Plan a private run: give two of --epsilon, --rounds and --noise; the third is computed."""
    plan = _plan_privacy(epsilon, rounds, noise, delta, sampling_rate)
    if as_json:
        return emit(plan)
    return print(
        f"epsilon {plan['epsilon']:.4g} (delta {delta:g}): {plan['rounds']} rounds with noise multiplier {plan['noise']:.4g}"
        + (f", sampling {sampling_rate:.3g} of the clients in each round" if sampling_rate < 1.0 else "")
    )


def _plan_privacy(
    epsilon: float | None, rounds: int | None, noise: float | None, delta: float, sampling_rate: float
) -> dict[str, Any]:
    from steppe.params.privacy import epsilon_after, noise_needed, releases_within

    if sum(value is None for value in (epsilon, rounds, noise)) != 1:
        raise UsageError("give two of --epsilon, --rounds and --noise: the third is computed")
    given = (("--epsilon", epsilon), ("--rounds", rounds), ("--noise", noise))
    wrong = [name for name, value in given if value is not None and not 0 < value < float("inf")]
    if wrong or not 0.0 < delta < 1.0 or not 0.0 < sampling_rate <= 1.0:
        raise UsageError(f"{wrong[0] if wrong else '--delta or --sampling-rate'} is out of range")
    if noise is None:
        assert epsilon is not None
        assert rounds is not None
        noise = noise_needed(rounds, epsilon, delta, sampling_rate)
    elif rounds is None:
        assert epsilon is not None
        rounds = releases_within(noise, epsilon, delta, sampling_rate)
    assert rounds is not None
    spent = epsilon_after(noise, rounds, delta, sampling_rate)
    return {"epsilon": spent, "delta": delta, "rounds": rounds, "noise": noise, "sampling_rate": sampling_rate}


def _client(url: str | None, cluster: Path | None, ca: Path | None) -> ParameterClient:
    from steppe.params.client import ParameterClient

    if (url is None) == (cluster is None):
        raise UsageError("no server given: give its URL (grpc://host:port), or --cluster FILE")
    if cluster is not None:
        from steppe.core.config.cluster import read_cluster_file
        from steppe.roles.cluster.node import connect

        described, _ = read_cluster_file(cluster)
        if described.backend == "mpi":
            raise UsageError("the server of an MPI world cannot be reached from outside: see the runs of its nodes")
        if described.backend == "ray":
            return connect(described.model_copy(update={"retry_s": 0.0}))
        files = described.tls
        url, ca = described.url, ca or (files.ca if files is not None else None)
    assert url is not None
    return ParameterClient(url, ca=ca, retry_s=0.0)


def node(
    cluster: File,
    node_id: Annotated[
        str | None,
        typer.Option("--node-id", metavar="ID", help="Name of this node. Default in an MPI world: by rank."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train as one node of a cluster.

    The table [run] of the file describes what is trained.
    """
    from steppe.cli.commands.train import exit_code, print_failure, run_with_live_view
    from steppe.compose.cluster import hosted_cluster_server
    from steppe.compose.main_loop import MainLoop
    from steppe.core.config.run import from_environ, resolve_config
    from steppe.training.train import run_experiment

    described, run = _read_cluster(cluster)
    joined = described.model_dump(mode="json", exclude_none=True) | {"node_id": node_id or _node_id_by_rank(described)}
    keys = {f"cluster.{key}": value for key, value in joined.items()}
    layers = ((f"{cluster} [run]", _flat(run)), ("environment", from_environ()), (str(cluster), keys))
    found = resolve_config(*layers).config
    seed = (f"{cluster} and the rank of the node", {"seed": found.seed + found.cluster.seed_offset})
    resolved = resolve_config(*layers, seed)
    with hosted_cluster_server(resolved.config.cluster, MainLoop.of(resolved)):
        result = run_with_live_view(lambda observers: run_experiment(resolved, observers=observers), as_json=as_json)
    print_failure(result)
    raise typer.Exit(exit_code(result.summary))


def _node_id_by_rank(cluster: ClusterConfig) -> str:
    if cluster.backend != "mpi":
        raise UsageError("no node given: give its name with --node-id")
    from steppe.roles.cluster.mpi import join_mpi_cluster

    rank: int = join_mpi_cluster(cluster).COMM_WORLD.rank
    return cluster.nodes[rank]


def _read_cluster(path: Path) -> tuple[ClusterConfig, dict[str, Any]]:
    """Read a cluster file; raises ConfigError if it does not describe what is trained."""
    from steppe.core.config.cluster import read_cluster_file

    cluster, run = read_cluster_file(path)
    if "env" not in run:
        raise ConfigError(f"{path} has no table [run] with env and algo: add it")
    return cluster, run


def _flat(run: dict[str, Any]) -> dict[str, Any]:
    from steppe.core.config.run import flat_keys

    return flat_keys(run)
