"""`steppe ctl`: every operation of the control service on the command line, under its REST and MCP name.

Commands are generated from the method signatures of control/service.py, which is imported when a command runs or its help is
shown. The service runs in this process and shares runs, operations and audit log with a `steppe serve` on this machine.
"""

from __future__ import annotations

import getpass
import inspect
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from steppe.cli.commands.serve import Kafka, MaxActors, MaxRuns, Modules, kafka_config_at, make_bounds
from steppe.cli.options import AsJson
from steppe.cli.output import emit, print_table
from steppe.core.contracts.errors import RunFailed, SteppeError, UsageError

if TYPE_CHECKING:
    from pydantic import BaseModel

    from steppe.control.service import Service

POLL_INTERVAL_S = 0.1
_EPOCH_S = 1e9  # larger floats are timestamps
_PAIRS = "NAME=VALUE"
_SETTING = typer.Option("-s", "--set", metavar="KEY=VALUE", help="Set a key of the request; repeatable: -s actors=4.")
_WAIT = Annotated[bool, typer.Option("--wait", help="Wait until the operation has finished; exit code 1 if it failed.")]
_FOLLOW = Annotated[bool, typer.Option("--follow", help="Print new entries until the run has ended.")]
# Command-line form of each argument of an operation. An argument that is missing here raises KeyError.
_ARGUMENT_TYPES: dict[str, Any] = {
    "run": Annotated[str, typer.Argument(metavar="RUN", help="A run's name.", show_default=False)],
    "identity": Annotated[str, typer.Argument(metavar="OPERATION", help="An operation's id.", show_default=False)],
    "count": Annotated[int, typer.Argument(metavar="N", min=0, help="Number of roles.", show_default=False)],
    "values": Annotated[
        list[str], typer.Argument(metavar=_PAIRS, help="Hyperparameters and their new values.", show_default=False)
    ],
    "expected": Annotated[
        int | None, typer.Option("--if-generation", metavar="N", help="Refuse unless the run has this generation.")
    ],
    "dry_run": Annotated[
        bool, typer.Option("--dry-run", help="Print what would change, and when, without changing it.")
    ],
    "series": Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name of a series; repeatable. Default: all.")
    ],
    "since": Annotated[int, typer.Option(metavar="N", min=0, help="Return entries after this cursor.")],
    "after": Annotated[int, typer.Option(metavar="N", min=0, help="Return entries after this cursor.")],
    "max_points": Annotated[int, typer.Option(metavar="N", min=2, max=10_000, help="Maximum points per series.")],
    "max_bytes": Annotated[int, typer.Option(metavar="N", min=1_024, help="Maximum bytes of log lines.")],
    "cursor": Annotated[str | None, typer.Option(metavar="ID", help="Return entries after this cursor.")],
    "whole_life": Annotated[
        bool, typer.Option("--whole-life", help="Diagnose the whole run instead of its last 30 s.")
    ],
    "limit": Annotated[int | None, typer.Option(metavar="N", min=1, max=1_000, help="Maximum number of entries.")],
    "source": Annotated[
        str | None, typer.Option(metavar="NAME", help="Role whose log to print. Default: the supervisor.")
    ],
}


class OperationGroup(TyperGroup):
    """Command group whose commands are generated when they are requested."""

    def list_commands(self, ctx: Any) -> list[str]:
        from steppe.control.service import operations

        return [name.replace("_", "-") for name in operations()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name.replace("-", "_")) if cmd_name in self.list_commands(ctx) else None


app = typer.Typer(
    cls=OperationGroup,
    help="Operate on runs: the operations of the REST API and MCP.",
    rich_markup_mode=None,
    no_args_is_help=True,
)


@app.callback()
def _ctl(
    ctx: typer.Context,
    allow_env: Modules = None,
    max_actors: MaxActors = 16,
    max_runs: MaxRuns = 8,
    kafka: Kafka = None,
) -> None:
    ctx.obj = lambda: _service(make_bounds(allow_env, max_actors, max_runs), kafka_config_at(kafka))


def _service(bounds: Any, kafka: Any) -> Service:
    from steppe.control.factory import make_local_service

    return make_local_service(bounds, kafka)


def _command(name: str) -> Any:
    from steppe.control.service import Service

    required = list(inspect.signature(getattr(Service, name), eval_str=True).parameters.values())[1:]
    names = {parameter.name for parameter in required}
    extra = {"wait": _WAIT} if "expected" in names and name != "delete_run" else {}
    extra |= {"follow": _FOLLOW} if "after" in names else {}
    parameters = [option for parameter in required if parameter.name != "issuer" for option in _parameters(parameter)]
    parameters += [_parameter(key, kind, False) for key, kind in {**extra, "as_json": AsJson}.items()]

    def call(ctx: typer.Context, **arguments: Any) -> None:
        _execute(ctx.obj(), name, arguments)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in [context, *parameters]}
    typer_app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    typer_app.command(name.replace("_", "-"), help=inspect.getdoc(getattr(Service, name)))(call)
    return typer.main.get_command(typer_app)


def _parameters(source: inspect.Parameter) -> list[inspect.Parameter]:
    """Return the command-line parameters for one argument of an operation."""
    if source.name == "request":
        env = typer.Argument(metavar="ENV", help="An id from list-environments.", show_default=False)
        return [
            _parameter("env", Annotated[str, env], source.empty),
            _parameter("settings", Annotated[list[str] | None, _SETTING], None),
        ]
    if source.name == "run" and source.default is None:
        run_filter = typer.Option(metavar="RUN", help="Return entries of this run only.")
        return [_parameter("run", Annotated[str | None, run_filter], None)]
    return [_parameter(source.name, _ARGUMENT_TYPES[source.name], source.default)]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _execute(service: Service, name: str, given: dict[str, Any]) -> None:
    """Call the operation, record it in the audit log if it changes something, and print its answer."""
    as_json, wait, follow = given.pop("as_json"), given.pop("wait", False), given.pop("follow", False)
    try:
        arguments = _arguments(given)
        answer = _call_operation(service, name, arguments)
        if wait:
            answer = _wait_until_finished(service, answer)
        _print(name, answer, as_json=as_json)
        if follow:
            _follow(service, name, arguments | {"after": answer.next}, as_json=as_json)
    finally:
        service.close()
    if wait and (failed := _operation(answer)) is not None and failed.state == "failed":
        raise RunFailed(failed.message or f"{failed.kind} failed")


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    from steppe.core.config.run import from_pairs

    if "values" in given:
        return given | {"values": from_pairs(given["values"])}
    if "env" not in given:
        return given
    return {"request": _request(given["env"], from_pairs(given["settings"] or []))}


def _request(env: str, settings: Mapping[str, Any]) -> Any:
    """Build the request. A key that is not a field of RunRequest is a hyperparameter."""
    from steppe.control.models import RunRequest
    from steppe.core.config.validation import validate_config

    if "env" in settings:
        raise UsageError("env is set twice, by its own argument and by -s env=…: remove one of them")
    tree: dict[str, Any] = {"env": env}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        section = section or ("" if key in RunRequest.model_fields else "agent")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return validate_config(RunRequest, tree, "")  # type: ignore[arg-type]


def _call_operation(service: Service, name: str, arguments: dict[str, Any]) -> Any:
    operation = getattr(service, name)
    if "issuer" not in inspect.signature(operation).parameters:
        return operation(**arguments)
    issuer = f"cli:{getpass.getuser()}"
    entry = (issuer, "admin", name, arguments.get("run"))  # a user who may write the run's files has every permission
    try:
        answer = operation(**arguments, issuer=issuer)
    except SteppeError as error:
        service.database.audit(*entry, f"refused: {error}")
        raise
    service.database.audit(*entry, "done")
    return answer


def _operation(answer: Any) -> Any:
    return getattr(answer, "operation", None) if hasattr(answer, "effects") else answer


def _wait_until_finished(service: Service, answer: Any) -> Any:
    """Return the answer with its finished operation. Each operation has a deadline, so this ends."""
    operation = _operation(answer)
    while operation is not None and operation.state == "pending":
        time.sleep(POLL_INTERVAL_S)
        operation = service.get_operation(operation.id)
    return answer.model_copy(update={"operation": operation}) if hasattr(answer, "effects") else operation


def _follow(service: Service, name: str, arguments: dict[str, Any], *, as_json: bool) -> None:
    from steppe.records.view import ENDED

    ended = False
    while True:
        answer = getattr(service, name)(**arguments)
        if answer.next != arguments["after"]:
            _print(name, answer, as_json=as_json)
            arguments["after"] = answer.next
        elif ended:
            return
        else:
            ended = (
                service.get_run(arguments["run"]).state in ENDED
            )  # then read once more: entries may have been written meanwhile
            time.sleep(0 if ended else POLL_INTERVAL_S)


def _print(name: str, answer: BaseModel | None, *, as_json: bool) -> None:
    fields = answer.model_dump(mode="json", by_alias=True) if answer is not None else {}
    if as_json:
        return emit(fields)
    if name == "get_logs":
        return print("\n".join(fields["lines"]))
    rows = next((value for value in fields.values() if _is_table(value)), None)
    for key, value in fields.items():
        if value is not rows and value not in (None, [], {}):
            print(f"{key:<12} {_cell(value)}")
    if rows:
        columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]
        print_table(columns, [[_cell(row[column]) for column in columns] for row in rows])
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _cell(value: Any) -> str:
    """Format a value on one line; long values are cut (--json prints all of them)."""
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(inner)}" for key, inner in value.items() if inner is not None)[:300]
    if isinstance(value, list):
        return f"{len(value)} entries" if len(value) > 12 else ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.6g}" if value < _EPOCH_S else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return "" if value is None else str(value)
