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
    others = [Path(log_dir.strip()) for log_dir in config.get("log.dirs", "").split(",") if log_dir.strip()]
    return [base, *((base / log_dir).resolve() for log_dir in others)]


def _show(checked: Sequence[Setting]) -> None:
    emit_table(
        ("SETTING", "NOW", "WANTED", ""),
        [
            (
                setting.name,
                setting.now,
                setting.wanted,
                "ok" if setting.is_good else "RECORDS AT RISK" if setting.is_risk else "change",
            )
            for setting in checked
        ],
    )
    for setting in checked:
        if not setting.is_good:
            click.echo(f"\n{setting.name}: {setting.why}")
            click.echo("  mqd tune --apply changes it" if setting.writes else f"  {setting.how}")


def _as_json(checked: Sequence[Setting]) -> list[dict[str, object]]:
    return [
        {
            "setting": setting.name,
            "now": setting.now,
            "wanted": setting.wanted,
            "ok": setting.is_good,
            "records_at_risk": setting.is_risk,
            "why": setting.why,
            "how": "mqd tune --apply" if setting.writes else setting.how,
        }
        for setting in checked
    ]


def _report(outcomes: Sequence[Outcome], as_json: bool) -> None:
    """Raises CliError if a change failed."""
    if as_json:
        emit_json([outcome._asdict() for outcome in outcomes])
    else:
        for outcome in outcomes:
            click.echo(f"{'' if outcome.done else 'FAILED '}{outcome.path}: {outcome.text}")
    failed = [outcome for outcome in outcomes if not outcome.done]
    if failed:
        raise CliError(
            f"{len(failed)} of {len(outcomes)} settings could not be changed; {failed[0].path}: {failed[0].text}"
        )


@click.command(short_help="Check whether this machine's settings suit a broker, and change them.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    help="The broker's data directory, whose disk is checked.  [env: MQD_DATA_DIR; default: ~/.local/share/mqd]",
    envvar="MQD_DATA_DIR",
)
@click.option(
    "--config",
    "config_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The broker's properties file; the disks of its log.dirs are checked, too.",
)
@click.option("--apply", "apply", is_flag=True, help="Change the settings that can be changed at run time; needs root.")
@click.option("--undo", "undo", is_flag=True, help="Restore the settings that --apply has changed; needs root.")
@click.option(
    "--journal",
    "journal_path",
    type=click.Path(dir_okay=False, path_type=Path),
    default=JOURNAL,
    show_default=True,
    help="File in which --apply records the earlier values, and from which --undo restores them.",
)
@click.option("--root", type=click.Path(file_okay=False, path_type=Path), default=Path("/"), hidden=True)
@click.option("--format", "output_format", type=click.Choice(["text", "json"]), default="text", show_default=True)
def command(
    data_dir: Path | None,
    config_file: Path | None,
    apply: bool,
    undo: bool,
    journal_path: Path,
    root: Path,
    output_format: str,
) -> int:
    """Check whether the settings of this machine suit a broker, and show the current value, the
    wanted value, and why.

    Nothing is changed without --apply. The changes of --apply are lost when the machine restarts;
    until then, --undo reverts them. mqd up never changes these settings.

    Exit status: 0 if every setting is as wanted, 1 otherwise.
    """
    if apply and undo:
        raise click.UsageError("--apply and --undo are mutually exclusive")
    as_json = output_format == "json"
    if undo:
        journal = Journal(journal_path)
        if not journal.entries:
            raise CliError(f"{journal_path} has no entry: no change of mqd tune --apply is left to undo")
        _report(changes.undo(root, journal), as_json)
        return 0
    if data_dir is not None and not (root / data_dir.absolute().relative_to("/")).is_dir():
        raise CliError(f"{data_dir} is not a directory: give one on the disk to check")
    checked = settings.read_settings(root, _directories(data_dir, config_file))
    if apply:
        try:
            outcomes = changes.apply(root, Journal(journal_path), checked)
        except PermissionError as error:
            raise CliError(f"{error.filename}: {error.strerror}; --apply needs root") from error
        if not outcomes and not as_json:
            click.echo("nothing to change: all settings that can be changed at run time are as wanted")
        _report(outcomes, as_json)
        return 0
    if as_json:
        emit_json(_as_json(checked))
    else:
        _show(checked)
    return 0 if all(setting.is_good for setting in checked) else EXIT_FAILED
