"""`mqd tune`: the settings of this machine that affect a broker."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from mqd.base.paths import default_data_dir
from mqd.cli.common import EXIT_FAILED, CliError, emit_json, emit_table
from mqd.cli.machine import changes, settings
from mqd.cli.machine.changes import JOURNAL, Journal, Outcome
from mqd.cli.machine.settings import Setting


def _directories(data_dir: Path | None, config_file: Path | None) -> list[Path]:
    """The directories in which a broker of this configuration keeps files."""
    from mqd.base.config import load_broker

    base = (data_dir or default_data_dir()).resolve()
    config = load_broker(config_file, {}, {})
    others = [Path(one.strip()) for one in config.get("log.dirs", "").split(",") if one.strip()]
    return [base, *((base / one).resolve() for one in others)]


def _show(found: Sequence[Setting]) -> None:
    emit_table(
        ("SETTING", "NOW", "WANTED", ""),
        [
            (one.name, one.now, one.wanted, "ok" if one.is_good else "RECORDS AT RISK" if one.is_risk else "change")
            for one in found
        ],
    )
    for one in found:
        if not one.is_good:
            click.echo(f"\n{one.name}: {one.why}")
            click.echo("  mqd tune --apply changes it" if one.writes else f"  {one.how}")


def _as_json(found: Sequence[Setting]) -> list[dict[str, object]]:
    return [
        {
            "setting": one.name,
            "now": one.now,
            "wanted": one.wanted,
            "ok": one.is_good,
            "records_at_risk": one.is_risk,
            "why": one.why,
            "how": "mqd tune --apply" if one.writes else one.how,
        }
        for one in found
    ]


def _report(outcomes: Sequence[Outcome], as_json: bool) -> None:
    """Raises CliError if a change failed."""
    if as_json:
        emit_json([one._asdict() for one in outcomes])
    else:
        for one in outcomes:
            click.echo(f"{'' if one.done else 'FAILED '}{one.path}: {one.text}")
    failed = [one for one in outcomes if not one.done]
    if failed:
        raise CliError(f"{len(failed)} of {len(outcomes)} settings failed, first {failed[0].path}: {failed[0].text}")


@click.command(short_help="Check whether this machine's settings suit a broker, and change them.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="Check the disks of this broker.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
    envvar="MQD_DATA_DIR",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The broker's properties file, for log.dirs.",
)
@click.option(
    "--apply", "is_apply", is_flag=True, help="Change the settings that can be changed at run time; needs root."
)
@click.option("--undo", "is_undo", is_flag=True, help="Restore the settings that --apply has changed; needs root.")
@click.option(
    "--journal",
    type=click.Path(dir_okay=False, path_type=Path),
    default=JOURNAL,
    show_default=True,
    help="The journal of --apply, for --undo.",
)
@click.option("--root", type=click.Path(file_okay=False, path_type=Path), default=Path("/"), hidden=True)
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    data_dir: Path | None,
    config_file: Path | None,
    is_apply: bool,
    is_undo: bool,
    journal: Path,
    root: Path,
    output_format: str,
) -> int:
    """Check whether the settings of this machine suit a broker: the present value, the wanted one, and
    why.

    Nothing is changed without --apply. What --apply changes is lost when the machine restarts;
    until then --undo restores it. mqd up never changes any of this.

    Exit status: 0 all is as it should be, 1 something is not.
    """
    if is_apply and is_undo:
        raise click.UsageError("--apply and --undo are mutually exclusive")
    as_json = output_format == "json"
    if is_undo:
        written = Journal(journal)
        if not written.entries:
            raise CliError(f"{journal} has no entry: no change of mqd tune --apply is left to undo")
        _report(changes.undo(root, written), as_json)
        return 0
    if data_dir is not None and not (root / data_dir.absolute().relative_to("/")).is_dir():
        raise CliError(f"{data_dir} is not a directory: name one on the disk that is to be checked")
    found = settings.read_settings(root, _directories(data_dir, config_file))
    if is_apply:
        try:
            outcomes = changes.apply(root, Journal(journal), found)
        except PermissionError as error:
            raise CliError(f"{error.filename}: {error.strerror}; --apply needs root") from error
        if not outcomes and not as_json:
            click.echo("nothing to change: all settings that can be changed at run time are as wanted")
        _report(outcomes, as_json)
        return 0
    if as_json:
        emit_json(_as_json(found))
    else:
        _show(found)
    return 0 if all(one.is_good for one in found) else EXIT_FAILED
