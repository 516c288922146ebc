"""The value of one property: validation, and conversion from and to text."""

import re

from mqd.base.properties import INT_MAX, LONG_MAX, Property

Value = int | float | bool | str | list[str]


class ConfigError(ValueError):
    """A name is unknown, or a value is not allowed. The message gives the property, the value, the
    allowed values and, if known, where the value was set.
    """

    def __init__(self, message: str, name: str = "", value: str | None = None):
        super().__init__(message)
        self.name = name
        self.value = value


def allowed_text(prop: Property) -> str:
    """The allowed values, for messages and the manual: "a whole number, at least 1"."""
    if prop.choices:
        prefix = "any of " if prop.kind == "list" else "empty or one of " if "" in prop.choices else "one of "
        return prefix + ", ".join(filter(None, prop.choices))
    noun = {
        "int": "a whole number",
        "long": "a whole number",
        "double": "a number",
        "string": "text",
        "list": "values separated by commas",
        "bool": " or ".join(value for value in ("true", "false") if value not in prop.refused),
    }[prop.kind]
    bounds = []
    if prop.minimum is not None and prop.minimum == prop.maximum:
        return str(prop.minimum)
    if prop.minimum is not None:
        bounds.append(f"at least {prop.minimum}")
    if prop.maximum is not None and prop.maximum != LONG_MAX:
        bounds.append(f"at most {prop.maximum}")
    elif prop.kind == "int":
        bounds.append(f"at most {INT_MAX}")
    return ", ".join([noun, *bounds])


def _not_allowed(prop: Property, text: str | None, why: str = "") -> ConfigError:
    value_text = "(hidden)" if prop.sensitive else repr(text)
    return ConfigError(
        f"{prop.name} cannot be {value_text}: {why or 'it must be ' + allowed_text(prop)}", prop.name, text
    )


def _parse_number(prop: Property, text: str) -> int | float:
    try:
        # int() and float() accept "1_000", "inf" and digits of other scripts; a file must not
        # contain these
        if not re.fullmatch(
            r"[+-]?[0-9]+" if prop.kind != "double" else r"[+-]?[0-9]*\.?[0-9]+([eE][+-]?[0-9]+)?", text
        ):
            raise ValueError
        number = float(text) if prop.kind == "double" else int(text)
    except ValueError:
        raise _not_allowed(prop, text) from None
    kind_maximum = {"int": INT_MAX, "long": LONG_MAX, "double": float("inf")}[prop.kind]
    minimum = prop.minimum if prop.minimum is not None else -kind_maximum - 1
    maximum = min(prop.maximum, kind_maximum) if prop.maximum is not None else kind_maximum
    if not minimum <= number <= maximum or str(number) in prop.refused:
        raise _not_allowed(prop, text, prop.refused.get(str(number), ""))
    return number


def parse_value(prop: Property, text: str) -> Value:
    """The typed value of `text`. Raises ConfigError. Surrounding blanks are ignored."""
    text = text.strip()
    if prop.kind in ("int", "long", "double"):
        return _parse_number(prop, text)
    if prop.kind == "bool":
        if text.lower() not in ("true", "false") or text.lower() in prop.refused:
            raise _not_allowed(prop, text, prop.refused.get(text.lower(), ""))
        return text.lower() == "true"
    if prop.kind == "enum":
        if text in prop.choices:
            return text
        raise _not_allowed(prop, text, prop.refused.get(text, ""))
    if prop.kind == "list":
        members = [member.strip() for member in text.split(",") if member.strip()]
        if prop.choices and not members and (text or not prop.may_be_empty):
            raise _not_allowed(prop, text)
        for member in members:
            if prop.choices and member not in prop.choices:
                raise _not_allowed(prop, text, prop.refused.get(member, ""))
            if prop.pattern and not re.fullmatch(prop.pattern, member):
                raise _not_allowed(prop, text, f"{member!r} is not an allowed value. {prop.doc}")
        return members
    return text


def canonical_text(prop: Property, text: str) -> str:
    value = parse_value(prop, text)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(value)
    return str(value) if prop.kind in ("int", "long") else text.strip()
