"""Builds the response to a request that failed as a whole, like Kafka's getErrorResponse(): one error
in every error field of the response. It is UNKNOWN_SERVER_ERROR when the handler failed because of a
bug.

The response's top-level error field is set, if it has one, and every requested item gets the error:
the response's arrays are filled from the request's, matched through the schema. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from mqd.protocol.errors import ErrorCode
from mqd.protocol.headers import RequestHeader
from mqd.protocol.messages import message_class, message_of
from mqd.protocol.schema.language import BLOBS, Field, Struct

INTERNAL_ERROR_MESSAGE = "The broker failed to answer because of an internal error; its log has the details."


class Failure(NamedTuple):
    error: int
    message: str | None


INTERNAL_ERROR = Failure(int(ErrorCode.UNKNOWN_SERVER_ERROR), INTERNAL_ERROR_MESSAGE)


def failed_response(header: RequestHeader, request: object, failure: Failure = INTERNAL_ERROR) -> object | None:
    """Returns the response, or None if its version has no error field or nothing was requested."""
    response = message_class(header.api_key, "Response")()
    return response if _fill_in(response, request, header.api_version, failure) else None


def _fields(struct: Struct, version: int) -> Iterator[Field]:
    return (field for field in struct.fields if version in field.versions)


def _is_error(field: Field) -> bool:
    return field.name in ("error_code", "partition_error_code")


def _has_error_field(struct: Struct, version: int) -> bool:
    return any(
        _is_error(field) or (field.struct is not None and _has_error_field(field.struct, version))
        for field in _fields(struct, version)
    )


def _fill_in(response: Any, request: object, version: int, failure: Failure) -> bool:
    """Fills in `response`, which answers `request` (both are messages, or elements of messages'
    arrays). Returns whether the response now contains an error.
    """
    fields = {field.name: field for field in _fields(message_of(type(response))[1], version)}
    has_error = False
    for field in filter(_is_error, fields.values()):
        setattr(response, field.name, failure.error)
        has_error = True
    for field in fields.values():
        if getattr(response, field.name) is None and version not in field.nullable and not field.is_tagged(version):
            setattr(response, field.name, _non_null_default(response, field))
    if "error_message" in fields:
        response.error_message = failure.message
    for field in fields.values():
        if field.is_array and field.struct is not None:
            elements = _elements(response, field, request, version, failure)
            setattr(response, field.name, elements)
            has_error |= bool(elements) and _has_error_field(field.struct, version)
    return has_error


def _non_null_default(response: object, field: Field) -> object:
    """The value to use instead of null, where the version does not permit null."""
    if field.struct is not None and not field.is_array:
        return _class_of(response, field)()
    if field.type == "string":
        return ""
    return b"" if field.type in BLOBS else None


def _elements(response: object, field: Field, request: object, version: int, failure: Failure) -> list[object]:
    """Returns one element for each element of the matching array in the request: the array with the
    same name. If there is none, it is the first array that is not empty, provided that the elements
    of the response's array have an error field.
    """
    if not isinstance(request, msgspec.Struct):
        return []
    arrays = [
        array
        for array in _fields(message_of(type(request))[1], version)
        if array.is_array and getattr(request, array.name)
    ]
    same_name = [array for array in arrays if array.name == field.name]
    source = same_name or (arrays if field.struct is not None and _has_error_field(field.struct, version) else [])
    if not source:
        return []
    elements = []
    for element in getattr(request, source[0].name):
        item = _class_of(response, field)()
        if not _copy_key_fields(item, element, source[0], version) and not same_name:
            return []
        _fill_in(item, element, version, failure)
        elements.append(item)
    return elements


def _class_of(response: object, field: Field) -> type:
    message = message_of(type(response))[0]
    assert field.struct is not None
    return getattr(message_class(message.api_key, "Response"), field.struct.name)


def _copy_key_fields(response: object, element: object, source: Field, version: int) -> bool:
    """Copies the fields that identify the requested item into the response. Returns False if the two
    have no such field in common.
    """
    response_fields = [
        field
        for field in _fields(message_of(type(response))[1], version)
        if not field.is_array and field.struct is None
    ]
    if all(field.name.startswith("error_") for field in response_fields):
        return True  # the elements have no key fields: they are in request order (ACLs)
    if isinstance(element, msgspec.Struct):
        common = [field.name for field in response_fields if hasattr(element, field.name)]
        for name in common:
            setattr(response, name, getattr(element, name))
        if not common and hasattr(element, "name") and any(field.name == "user" for field in response_fields):
            response.user, common = element.name, ["user"]  # type: ignore[attr-defined]  # AlterUserScramCredentials
        return bool(common)
    for field in response_fields:  # an array of names or numbers: use the first field that can hold one
        if not field.name.startswith("error_") and (field.type in BLOBS) == (source.type in BLOBS):
            setattr(response, field.name, element)
            return True
    return False
