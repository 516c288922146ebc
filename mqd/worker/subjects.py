"""Rights of the worker's clients. The reactor requests a subject (what one principal from one
address may do); this module compiles it from the rules, and again whenever they change.

    MQD_EVENT_SUBJECT_REQUESTED -> compile -> mqd_reactor_subject_put
    rules changed            -> the same for every present subject
    MQD_EVENT_SUBJECT_GONE   -> dropped

Invariants
    J1  when apply() returns, the reactor decides by the rules that were in force at the call, or by
        newer ones; so a change of rules is acknowledged once every worker has applied it
    J2  commands for one subject are posted in the order of the rule changes that they apply
    J3  after the new rights are in force, the active segments that local clients have mapped are
        rolled, in topics where a right may have been taken away: a mapping also shows records that
        are appended later
Bounds: the reactor's subjects. Concurrency: the event loop's thread.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from mqd import native
from mqd.base import logging
from mqd.native import E_STALE, NativeError
from mqd.security.acl import AclBinding, Permission, ResourceType
from mqd.security.audit import Audit
from mqd.security.authorizer import Authorizer
from mqd.security.subject import compile_subject
from mqd.worker.commands import ReactorCommands


class Subjects:
    """`rules`: changed by change() and replace() only. `slots_of`: the slots of all replicas on
    this host whose topic's name satisfies the predicate.
    """

    def __init__(
        self,
        reactor: native.Reactor,
        commands: ReactorCommands,
        rules: Authorizer,
        log_only: bool,
        slots_of: Callable[[Callable[[str], bool]], list[int]] = lambda _: [],
        audit: Audit | None = None,
    ) -> None:
        self._reactor = reactor
        self._commands = commands
        self._rules = rules
        self._log_only = log_only
        self._audit = audit or Audit()
        self._present: dict[int, tuple[str, str]] = {}  # by the reactor's number: principal, host
        self._generation = rules.generation  # what was sent to the reactor
        self._slots_of = slots_of
        # changed topic rules that may take a right away; None: any rule may have changed
        self._changed: list[AclBinding] | None = []
        self._background_tasks: set[asyncio.Task[None]] = set()
        self._log = logging.get("worker.rights")

    def on_requested(self, event: native.Event) -> None:
        """Handles MQD_EVENT_SUBJECT_REQUESTED."""
        host, _, principal = event.text.partition(" ")
        self._present[event.token] = principal, host
        self._run_in_background(self._put(event.token))

    def on_gone(self, event: native.Event) -> None:
        """Handles MQD_EVENT_SUBJECT_GONE."""
        self._present.pop(event.token, None)

    def on_denied(self, event: native.Event) -> None:
        """Handles MQD_EVENT_DENIED."""
        principal, host = self._present.get(event.token, ("unknown", ""))
        self._audit.record_denial(
            principal, host, event.operation, event.resource_type, event.text, self._log_only, event.count
        )

    def change(self, put: Mapping[bytes, AclBinding], removed: Iterable[bytes]) -> None:
        removed_bindings = [self._rules.bindings[acl_id] for acl_id in removed if acl_id in self._rules.bindings]
        restricting = [
            binding for binding in put.values() if binding.permission == Permission.DENY or self._rules.allow_everyone
        ]
        if self._changed is not None:
            self._changed += [
                binding for binding in (*removed_bindings, *restricting) if binding.resource_type == ResourceType.TOPIC
            ]
        self._rules.change(put, removed)

    def replace(self, bindings: Mapping[bytes, AclBinding]) -> None:
        if self._rules.bindings != bindings:
            self._changed = None
        self._rules.replace(bindings)

    async def apply(self) -> None:
        """Must be called whenever the rules may have changed (J1)."""
        if self._generation == self._rules.generation:
            return
        self._generation = self._rules.generation
        await asyncio.gather(*(self._put(number) for number in list(self._present)))
        changed, self._changed = self._changed, []
        if changed is None or changed:
            slots = self._slots_of(lambda name: changed is None or any(binding.covers(name) for binding in changed))
            # only now: the reactor no longer lets a client map a segment under the old rights
            await self._commands.run(self._reactor.revoke_mappings, slots)

    async def _put(self, number: int) -> None:
        if number not in self._present:
            return
        principal, host = self._present[number]
        subject = compile_subject(self._rules, principal, host)
        try:
            await self._commands.run(
                self._reactor.subject_put, number, subject.topics, subject.transactional_ids, subject.groups
            )
        except NativeError as error:
            if error.code != E_STALE:
                raise
            self._present.pop(number, None)  # gone before its rights arrived

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._background_tasks.add(task)
        task.add_done_callback(self._on_put)

    def _on_put(self, task: "asyncio.Task[None]") -> None:
        self._background_tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.warning(
                "the reactor refused the rights of a principal, whose clients are waiting", reason=str(error)
            )
