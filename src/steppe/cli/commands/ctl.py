"""`steppe ctl`: every operation of the control plane on the command line, under the name that the API and MCP know it by.

Translates: commands are made from the signatures of control/service.py, which is imported when one is run or its help is shown.
The service is one in this process; runs, operations and the audit are those of a `steppe serve` beside it.
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
_EPOCH_S = 1e9  # what is larger, is a moment
_PAIRS = "NAME=VALUE"
_SETTING = typer.Option("-s", "--set", metavar="KEY=VALUE", help="Any key of a request, repeatable: -s actors=4.")
_WAITING = Annotated[
    bool, typer.Option("--wait", help="Return when it has been carried out; exit code 1 if it was not.")
]
_FOLLOWING = Annotated[bool, typer.Option("--follow", help="Go on with what is new, until the run has ended.")]
# How an argument of an operation is given here; one that is not listed makes a command that cannot be built.
_ARGUMENT_TYPES: dict[str, Any] = {
    "run": Annotated[str, typer.Argument(metavar="RUN", help="A run's name.", show_default=False)],
    "identity": Annotated[str, typer.Argument(metavar="OPERATION", help="An operation's id.", show_default=False)],
    "count": Annotated[int, typer.Argument(metavar="N", min=0, help="How many.", show_default=False)],
    "values": Annotated[list[str], typer.Argument(metavar=_PAIRS, help="New values.", show_default=False)],
    "expected": Annotated[
        int | None, typer.Option("--if-generation", metavar="N", help="Only if the run is at this generation.")
    ],
    "dry_run": Annotated[bool, typer.Option("--dry-run", help="Only say what would change, and when.")],
    "series": Annotated[list[str] | None, typer.Option(metavar="NAME", help="Which curve, repeatable; all if absent.")],
    "since": Annotated[int, typer.Option(metavar="N", min=0, help="Only after this cursor.")],
    "after": Annotated[int, typer.Option(metavar="N", min=0, help="Only after this cursor.")],
    "max_points": Annotated[int, typer.Option(metavar="N", min=2, max=10_000, help="Most points of each curve.")],
    "max_bytes": Annotated[int, typer.Option(metavar="N", min=1_024, help="Most bytes of the log.")],
    "cursor": Annotated[str | None, typer.Option(metavar="ID", help="Only what comes after this cursor.")],
    "whole_life": Annotated[bool, typer.Option("--whole-life", help="Over all of the run, not only the last 30 s.")],
    "limit": Annotated[int | None, typer.Option(metavar="N", min=1, max=1_000, help="Most of them.")],
    "source": Annotated[str | None, typer.Option(metavar="NAME", help="Whose log; the supervisor's if absent.")],
}


class OperationGroup(TyperGroup):
    """The commands of the group, each made when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        from steppe.control.service import operations

        return [name.replace("_", "-") for name in operations()]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return _command(cmd_name.replace("-", "_")) if cmd_name in self.list_commands(ctx) else None


app = typer.Typer(
    cls=OperationGroup,
    help="All operations on runs, by the names of API and MCP.",
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
    from steppe.control.service import Service

    return Service(bounds, kafka)


def _command(name: str) -> Any:
    from steppe.control.service import Service

    asked = list(inspect.signature(getattr(Service, name), eval_str=True).parameters.values())[1:]
    names = {parameter.name for parameter in asked}
    extra = {"wait": _WAITING} if "expected" in names and name != "delete_run" else {}
    extra |= {"follow": _FOLLOWING} if "after" in names else {}
    given = [one for parameter in asked if parameter.name != "issuer" for one in _parameters(parameter)]
    given += [_parameter(key, kind, False) for key, kind in {**extra, "as_json": AsJson}.items()]

    def call(ctx: typer.Context, **arguments: Any) -> None:
        _execute(ctx.obj(), name, arguments)

    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    call.__signature__ = inspect.Signature([context, *given])  # type: ignore[attr-defined]
    call.__annotations__ = {one.name: one.annotation for one in [context, *given]}
    made = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    made.command(name.replace("_", "-"), help=inspect.getdoc(getattr(Service, name)))(call)
    return typer.main.get_command(made)


def _parameters(asked: inspect.Parameter) -> list[inspect.Parameter]:
    if asked.name == "request":
        env = typer.Argument(metavar="ENV", help="An id from list-environments.", show_default=False)
        return [
            _parameter("env", Annotated[str, env], asked.empty),
            _parameter("settings", Annotated[list[str] | None, _SETTING], None),
        ]
    if asked.name == "run" and asked.default is None:
        only = typer.Option(metavar="RUN", help="Only those of this run.")
        return [_parameter("run", Annotated[str | None, only], None)]
    return [_parameter(asked.name, _ARGUMENT_TYPES[asked.name], asked.default)]


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)


def _execute(service: Service, name: str, given: dict[str, Any]) -> None:
    """Call the operation, in the audit if it changes something, and print its answer."""
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
    """What a request says; a key that it does not know by itself is a hyperparameter's."""
    from steppe.control.models import RunRequest
    from steppe.core.config.validation import validate_config

    if "env" in settings:
        raise UsageError("env is given twice, by its own argument and by -s env=…: leave one of them out")
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
    who = f"cli:{getpass.getuser()}"
    about = (who, "admin", name, arguments.get("run"))  # whoever may write the files may do anything with them
    try:
        answer = operation(**arguments, issuer=who)
    except SteppeError as error:
        service.ledger.audit(*about, f"refused: {error}")
        raise
    service.ledger.audit(*about, "done")
    return answer


def _operation(answer: Any) -> Any:
    return getattr(answer, "operation", None) if hasattr(answer, "effects") else answer


def _wait_until_finished(service: Service, answer: Any) -> Any:
    """The same answer when its operation is no longer under way, which has a deadline of its own."""
    operation = _operation(answer)
    while operation is not None and operation.state == "pending":
        time.sleep(POLL_INTERVAL_S)
        operation = service.get_operation(operation.id)
    return answer.model_copy(update={"operation": operation}) if hasattr(answer, "effects") else operation


def _follow(service: Service, name: str, arguments: dict[str, Any], *, as_json: bool) -> None:
    from steppe.records.view import ENDED

    ended = False
    while True:
        found = getattr(service, name)(**arguments)
        if found.next != arguments["after"]:
            _print(name, found, as_json=as_json)
            arguments["after"] = found.next
        elif ended:
            return
        else:
            ended = service.get_run(arguments["run"]).state in ENDED  # and once more: it may have spoken meanwhile
            time.sleep(0 if ended else POLL_INTERVAL_S)


def _print(name: str, answer: BaseModel | None, *, as_json: bool) -> None:
    told = answer.model_dump(mode="json", by_alias=True) if answer is not None else {}
    if as_json:
        return emit(told)
    if name == "get_logs":
        return print("\n".join(told["lines"]))
    rows = next((value for value in told.values() if _is_table(value)), None)
    for key, value in told.items():
        if value is not rows and value not in (None, [], {}):
            print(f"{key:<12} {_cell(value)}")
    if rows:
        columns = [column for column in rows[0] if any(row[column] is not None for row in rows)]
        print_table(columns, [[_cell(row[column]) for column in columns] for row in rows])
    return None


def _is_table(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _cell(value: Any) -> str:
    """A value on one line; what is long is for --json."""
    if isinstance(value, dict):
        return " ".join(f"{key}={_cell(inner)}" for key, inner in value.items() if inner is not None)[:300]
    if isinstance(value, list):
        return f"{len(value)} of them" if len(value) > 12 else ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.6g}" if value < _EPOCH_S else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    return "" if value is None else str(value)
