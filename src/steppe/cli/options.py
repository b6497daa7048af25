"""The flags that describe an experiment, declared once for every command that takes one. Their meaning, types and
defaults live at the fields of RunConfig, which is imported only when a command runs or its help is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand

from steppe.core.contracts.errors import ConfigError

Layers = tuple[tuple[str, Mapping[str, Any]], ...]
Text = str | None
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; everything else goes to stderr.")]
PLAIN_TEXT_KEYS = {
    "env",
    "algo",
    "name",
    "run_dir",
    "device",
    "runtime",
    "mode",
    "init_from",
    "ray.address",
    "kafka.address",
}  # taken as they are; the rest are TOML values


class FieldHelp(TyperCommand):
    """A command whose flags take their help from the configuration's fields, at the moment help is shown."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from steppe.core.algorithms import FrozenConfig
        from steppe.core.config.run import FlowConfig, RunConfig

        for parameter in self.params:
            name = parameter.name or ""
            field = RunConfig.model_fields.get(name) or FlowConfig.model_fields.get(name)
            if field is not None and not isinstance(
                field.get_default(), FrozenConfig
            ):  # a flag never is a whole section
                choices = _choices(field.annotation)
                default = field.get_default()
                hints = [f"One of {', '.join(choices)}."] if choices else []
                hints += [] if default is None or default is False or field.is_required() else [f"[default: {default}]"]
                parameter.help = " ".join([field.description or "", *hints])  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def experiment_flags(command: Callable[[Layers, bool], None]) -> Callable[..., None]:
    """Give a command the flags of an experiment; it receives the layers that they, the environment and a file make."""

    def flags(
        env: Annotated[Text, typer.Argument(metavar="ENV", show_default=False)] = None,
        algo: Annotated[Text, typer.Option(metavar="NAME")] = None,
        runtime: Annotated[Text, typer.Option(metavar="NAME")] = None,
        mode: Annotated[Text, typer.Option(metavar="NAME")] = None,
        ray_address: Annotated[
            Text, typer.Option(metavar="ADDR", help="A running Ray cluster, host:port or auto, for --runtime ray.")
        ] = None,
        kafka: Annotated[
            Text, typer.Option(metavar="ADDR", help="Kafka brokers, host:port, for --runtime kafka.")
        ] = None,
        actors: Annotated[Text, typer.Option(metavar="N")] = None,
        envs: Annotated[Text, typer.Option(metavar="N")] = None,
        steps: Annotated[Text, typer.Option(metavar="N")] = None,
        seed: Annotated[Text, typer.Option(metavar="N")] = None,
        target_return: Annotated[Text, typer.Option(metavar="R")] = None,
        restarts: Annotated[Text, typer.Option(metavar="N")] = None,
        init_from: Annotated[Text, typer.Option(metavar="RUN")] = None,
        record_arrivals: Annotated[bool, typer.Option("--record-arrivals")] = False,
        profile: Annotated[bool, typer.Option("--profile")] = False,
        device: Annotated[Text, typer.Option(metavar="NAME")] = None,
        pairs: Annotated[
            list[str] | None,
            typer.Option(
                "-s",
                "--set",
                metavar="KEY=VALUE",
                help="Any other key, repeatable: -s learning_rate=1e-3 -s evaluation.episodes=50. "
                "`steppe config show` lists them all.",
            ),
        ] = None,
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="TOML file with any of these keys; STEPPE_* and flags win.")
        ] = None,
        run_dir: Annotated[Text, typer.Option(metavar="DIR")] = None,
        name: Annotated[Text, typer.Option(metavar="NAME")] = None,
        as_json: AsJson = False,
    ) -> None:
        given = {
            "env": env, "algo": algo, "runtime": runtime, "mode": mode, "actors": actors, "envs": envs, "steps": steps,
            "seed": seed, "target_return": target_return, "restarts": restarts, "init_from": init_from,
            "flow.record_arrivals": "true" if record_arrivals else None, "flow.profile": "true" if profile else None,
            "device": device, "run_dir": run_dir, "name": name, "ray.address": ray_address,
            "kafka.address": kafka,
        }  # fmt: skip
        command(layers({key: text for key, text in given.items() if text is not None}, pairs or [], config), as_json)

    flags.__name__, flags.__doc__ = command.__name__, command.__doc__
    return flags


def layers(given: Mapping[str, str], pairs: list[str], file: Path | None) -> Layers:
    """What `core.config.resolve` takes: file, environment and flags, weakest first."""
    from steppe.core.config.run import from_environ, from_pairs, from_toml, parse_value

    flags = {key: text if key in PLAIN_TEXT_KEYS else parse_value(text) for key, text in given.items()}
    extra = from_pairs(pairs)
    twice = flags.keys() & extra.keys()
    if twice:
        key = min(twice)
        raise ConfigError(f"{key} is given twice, by its own argument and by -s {key}=…: leave one of them out")
    from_file = ((str(file), from_toml(file)),) if file else ()
    return (*from_file, ("environment", from_environ()), ("flag", {**flags, **extra}))


def _choices(annotation: Any) -> list[str]:
    """The words of a Literal, also inside an optional one."""
    if get_origin(annotation) is Literal:
        return [str(word) for word in get_args(annotation)]
    return [word for inner in get_args(annotation) if get_origin(inner) is Literal for word in _choices(inner)]
