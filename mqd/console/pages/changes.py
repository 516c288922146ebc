"""Forms, previews and changes. A change is made only after the user has confirmed its preview,
which shows the equivalent command. The change is written to the audit log before it begins.
"""

from __future__ import annotations

from collections.abc import Callable

import click
from confluent_kafka import KafkaException
from starlette.responses import Response

from mqd.cli.common import CliError, Settings, explain
from mqd.console import access_changes, changing, cluster_changes, queries
from mqd.console.changing import BadForm, Change, Form
from mqd.console.page_request import PageRequest, Refused

Prepare = Callable[[Settings, Form], Change]
ROWS_MAX = 200


class ChangeKind:
    """A kind of change. `template`: the template of its form; `fields`: the names of the form's
    fields, which the URL can fill in. The template ask.html shows the fields under `heading`, and
    asks for `inputs` (name -> placeholder).
    """

    def __init__(
        self, path: str, template: str, prepare: Prepare, fields: tuple[str, ...], heading: str = "", **inputs: str
    ) -> None:
        self.path, self.template, self.prepare, self.fields = path, template, prepare, fields
        self.heading, self.inputs = heading, inputs

    def show(self, request: PageRequest) -> Response:
        _check_writable(request)
        return self._form_page(request, {name: request.text(name) for name in self.fields}, "", 200)

    def _form_page(self, request: PageRequest, given: Form, reason: str, status: int) -> Response:
        configs: tuple[queries.Config, ...] = ()
        if self.prepare is changing.alter_topic and given.get("name"):
            configs = queries.topic(request.settings, given["name"]).configs
        return request.page(
            self.template,
            status,
            given=given,
            reason=reason,
            action=self.path,
            configs=configs,
            heading=self.heading,
            fields=self.fields,
            inputs=self.inputs,
        )

    def post(self, request: PageRequest) -> Response:
        _check_writable(request)
        console, form = request.console, request.form
        if not console.sessions.is_valid_token(request.cookie, form.get("token", "")):
            raise Refused(
                403,
                "the console has restarted since this form was loaded, or the form belongs to another session;"
                " load it again",
            )
        try:
            change = self.prepare(request.settings, form)
        except (BadForm, CliError, click.UsageError) as error:
            reason = error.message if isinstance(error, click.ClickException) else str(error)
            return self._form_page(request, form, reason, 400)
        if form.get("confirmed") != "1" or change.refusal:
            return self._confirmation_page(request, change, "", 200)
        if change.text_to_type and form.get("typed", "").strip() != change.text_to_type:
            return self._confirmation_page(request, change, f"type {change.text_to_type} to confirm", 400)
        address = request.http.client.host if request.http.client else ""

        def log(outcome: str) -> None:
            console.audit.write(request.session.user, address, change.command, outcome)

        log("begun")
        try:
            secret = change.carry_out()
        except (CliError, KafkaException) as error:
            reason = error.message if isinstance(error, CliError) else explain(error)[0]
            log(f"failed: {reason}")
            return self._confirmation_page(request, change, reason, 502)
        except Exception as error:
            log(f"failed: {error}")
            raise
        finally:
            console.cache.clear()
        log("done")
        if secret is not None:
            return request.page("once.html", change=change, secret=secret)
        path, query = change.next_page
        return request.redirect(path, change.notice, **query)

    def _confirmation_page(self, request: PageRequest, change: Change, reason: str, status: int) -> Response:
        resent_fields = {
            name: value for name, value in request.form.items() if name not in ("token", "confirmed", "typed")
        }
        return request.page(
            "confirm.html",
            status,
            change=change,
            reason=reason,
            action=self.path,
            resent_fields=resent_fields,
            rows=change.rows[:ROWS_MAX],
        )


def _check_writable(request: PageRequest) -> None:
    if request.console.options.is_read_only:
        raise Refused(403, "this console was started with --read-only")


_USER_HEADING = "Create a user, or give it a new password"
_TOPICS_HINT = "topic names, separated by spaces; empty for all topics"
KINDS = (
    ChangeKind("/topic/create", "create.html", changing.create_topic, ("name",)),
    ChangeKind("/topic/alter", "alter.html", changing.alter_topic, ("name", "key")),
    ChangeKind("/topic/partitions", "partitions.html", changing.add_partitions, ("name",)),
    ChangeKind("/topic/delete", "ask.html", changing.delete_topic, ("name",), "Delete a topic"),
    ChangeKind("/produce", "produce.html", changing.produce, ("topic",)),
    ChangeKind("/group/seek", "seek.html", changing.seek, ("name", "to", "topics")),
    ChangeKind(
        "/transaction/abort",
        "ask.html",
        cluster_changes.abort,
        ("id", "topic", "partition", "offset"),
        "Abort a transaction",
    ),
    ChangeKind(
        "/cluster/balance", "ask.html", cluster_changes.balance, ("topics",), "Balance the cluster", topics=_TOPICS_HINT
    ),
    ChangeKind("/cluster/drain", "ask.html", cluster_changes.drain, ("node", "cancel"), "Drain a broker", node="1"),
    ChangeKind("/moves/cancel", "ask.html", cluster_changes.cancel_moves, ("topic",), "Stop the moves of a topic"),
    ChangeKind("/access/user", "ask.html", access_changes.set_password, ("name",), _USER_HEADING, name="alice"),
    ChangeKind("/access/user/delete", "ask.html", access_changes.delete_user, ("name",), "Delete a user"),
    ChangeKind("/access/rule", "rule.html", access_changes.add_rule, access_changes.RULE_FIELDS),
    ChangeKind(
        "/access/rule/delete", "ask.html", access_changes.remove_rule, access_changes.RULE_FIELDS, "Remove a rule"
    ),
    ChangeKind("/access/quota", "quota.html", access_changes.set_quota, access_changes.QUOTA_FIELDS),
    ChangeKind(
        "/access/quota/delete", "ask.html", access_changes.delete_quota, access_changes.ENTITY_FIELDS, "Remove limits"
    ),
)
