"""The records of a topic: a search that shows its progress, one record, and downloads."""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import datetime
from functools import partial
from threading import Event
from typing import Any

import click
from confluent_kafka import KafkaException
from starlette.responses import Response, StreamingResponse

from mqd.cli import client_security
from mqd.cli.common import CliError, explain
from mqd.cli.records import envelope, parse_time
from mqd.console import filters, record_view, searching
from mqd.console.filters import BadFilter
from mqd.console.page_request import PageRequest, Refused
from mqd.console.rendering import url
from mqd.console.searching import COUNT_MAX, Query, Step
from mqd.console.streaming import stream

STARTS = {
    "newest": "the newest",
    "beginning": "the beginning",
    "offset": "offset",
    "time": "time",
    "live": "now on, live",
}
FIELDS = ("topic", "from", "at", "partition", "count", "key", "value", "header", "path")
DOWNLOAD_MAX = 100_000
OFFSET_MAX = (1 << 63) - 1


def query_of(request: PageRequest, count_max: int = COUNT_MAX) -> Query:
    """The query in the URL. Raises BadFilter, whose message shows the expected form."""
    start = request.text("from", "newest")
    if start not in STARTS:
        raise BadFilter(f"there is no start {start!r}; a search starts from one of {', '.join(STARTS)}")
    at, text = 0, request.text("at").strip()
    if start == "time":
        try:
            at = parse_time(text or "-1h", datetime.now().astimezone())
        except (click.UsageError, OverflowError) as error:
            raise BadFilter(str(error)) from None
    elif start == "offset":
        if text and not (text.isascii() and text.isdigit() and int(text) <= OFFSET_MAX):
            raise BadFilter(f"{text!r} is not an offset")
        at = int(text or 0)
    partition_text = request.text("partition").strip()
    if partition_text and not (partition_text.isascii() and partition_text.isdigit() and len(partition_text) < 10):
        raise BadFilter(f"{partition_text!r} is not a partition")
    return Query(
        request.required_text("topic"),
        start,
        at,
        int(partition_text) if partition_text else None,
        request.number("count", 50, 1, count_max),
        filters.parse(request.text("key"), request.text("value"), request.text("header"), request.text("path")),
    )


def command_of(query: Query, bootstrap: str, at: str) -> str:
    """The equivalent mqd command, without the filters: mqd consume has none."""
    offset = {
        "newest": f"-{query.count}", "beginning": "beginning", "offset": str(query.at), "time": f"@{at or '-1h'}",
        "live": "end",
    }[query.start]  # fmt: skip
    partition_option = "" if query.partition is None else f" -p {query.partition}"
    end = "" if query.start == "live" else " -e"
    topic, server = shlex.quote(query.topic), shlex.quote(bootstrap)
    return f"mqd consume {topic} -b {server} -o {shlex.quote(offset)}{partition_option}{end}"


def page(request: PageRequest) -> Response:
    given = {name: request.text(name) for name in FIELDS}
    reason = ""
    query = Query(request.required_text("topic"))
    try:
        query = query_of(request)
    except BadFilter as error:
        reason = str(error)
    parameters = {name: value for name, value in given.items() if value}
    return request.page(
        "messages.html",
        status=400 if reason else 200,
        given=given,
        query=query,
        starts=STARTS,
        reason=reason,
        stream="" if reason else url("/messages/stream", **parameters),
        download="" if reason or query.start == "live" else url("/messages/download", **parameters),
        command=command_of(query, request.console.options.bootstrap, given["at"]),
        count_max=COUNT_MAX,
        help=filters.CONDITION_FORMS,
    )


# -- streams: a thread searches, the event loop sends ----------------------------------------------


def _server_sent_event(name: str, data: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()


def _steps(
    request: PageRequest, query: Query, stop: Event, convert: Callable[[Any], Any], is_sorted: bool
) -> Iterator[Step]:
    with client_security.acting_as(request.session.security):
        yield from searching.search(request.settings, query, stop, convert, is_sorted)


def _error_text(error: Exception) -> str:
    return error.message if isinstance(error, CliError) else explain(error)[0]


def stream_page(request: PageRequest) -> Response:
    stream_limit, user = request.console.stream_limit, request.session.user
    try:
        query = query_of(request)
    except BadFilter as error:
        raise Refused(400, str(error)) from None
    if not stream_limit.take(user):
        return _event_stream(_failure_event("too many searches are running; stop one, or close its tab"))
    template = request.console.templates.get_template("records.html")

    def render(step: Step) -> str:
        return template.render(records=step.records, bootstrap=request.console.options.bootstrap)

    convert = partial(record_view.record, max_bytes=record_view.ROW_BYTES)

    def rendered_steps(stop: Event) -> Iterator[tuple[str, Step]]:
        for step in _steps(request, query, stop, convert, True):
            html = render(step) if step.records else ""  # on the thread, not on the event loop
            yield html, step

    async def events() -> AsyncIterator[bytes]:
        try:
            async for html, step in stream(rendered_steps, partial(stream_limit.free, user)):
                if html:
                    yield _server_sent_event("records", html)
                progress = {
                    name: getattr(step, name) for name in ("scanned", "total", "whole", "matches", "bytes", "ended")
                }
                yield _server_sent_event("progress", progress)
        except (CliError, KafkaException, OSError) as error:
            yield _server_sent_event("failed", _error_text(error))

    return _event_stream(events())


async def _failure_event(reason: str) -> AsyncIterator[bytes]:
    yield _server_sent_event("failed", reason)


def _event_stream(events: AsyncIterator[bytes]) -> Response:
    return StreamingResponse(events, media_type="text/event-stream")


def download(request: PageRequest) -> Response:
    """Returns the results of the search in the format of `mqd consume --format json`: a line of JSON
    for each record.
    """
    stream_limit, user = request.console.stream_limit, request.session.user
    try:
        query = query_of(request, DOWNLOAD_MAX)
    except BadFilter as error:
        raise Refused(400, str(error)) from None
    if query.start == "live":
        raise Refused(400, "a live search has no end and cannot be downloaded")
    if not stream_limit.take(user):
        raise Refused(503, "too many searches are running; stop one, or close its tab")

    def encoded_steps(stop: Event) -> Iterator[bytes]:
        for step in _steps(request, query, stop, envelope, False):
            yield b"".join(step.records)

    async def lines() -> AsyncIterator[bytes]:
        async for data in stream(encoded_steps, partial(stream_limit.free, user)):
            yield data

    headers = {"content-disposition": f'attachment; filename="{_file_name(query.topic)}.jsonl"'}
    return StreamingResponse(lines(), media_type="application/x-ndjson", headers=headers)


def _file_name(text: str) -> str:
    return "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in text)


# -- one record ------------------------------------------------------------------------------------


def _requested_message(request: PageRequest) -> Any:
    topic = request.required_text("topic")
    partition, offset = request.number("partition", 0, 0, 10**9), request.number("offset", 0, 0, OFFSET_MAX)
    message = searching.read_record(request.settings, topic, partition, offset)
    if message is None:
        raise Refused(
            404,
            f"{topic}-{partition} has no record at offset {offset}: the record was deleted or compacted away, or is"
            " not written yet, or the offset is that of a transaction marker",
        )
    return message


def record_page(request: PageRequest) -> Response:
    record = record_view.record(_requested_message(request), record_view.PAGE_BYTES)
    return request.page("message.html", record=record, commands=record.commands(request.console.options.bootstrap))


def raw(request: PageRequest) -> Response:
    """The raw bytes, sent in such a way that no browser interprets them as a page."""
    message, part = _requested_message(request), request.text("part", "value")
    data = message.key() if part == "key" else message.value()
    name = _file_name(
        f"{message.topic()}-{message.partition()}-{message.offset()}-{'key' if part == 'key' else 'value'}"
    )
    return Response(
        data or b"",
        media_type="application/octet-stream",
        headers={"content-disposition": f'attachment; filename="{name}"'},
    )
