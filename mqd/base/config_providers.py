"""Resolves the references `${file:PATH:KEY}`, `${env:NAME}` and `${dir:PATH:FILE}` in a broker's
configuration. In Kafka, FileConfigProvider, EnvVarConfigProvider and DirectoryConfigProvider do this
(KIP-297, KIP-421, KIP-887).

If `config.providers` is not set, all three are available under these names; if it is set, only the
providers that it lists, restricted by their parameters `allowed.paths` and `allowlist.pattern`. A
reference to any other name stays text, as in Kafka. Unlike in Kafka, a reference that cannot be
resolved is an error: the text of the reference must not become a password.

Only references in the operator's settings are resolved (file, environment, command line), never
those in values that clients set.
"""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from mqd.base.property_values import ConfigError

PROVIDERS = "config.providers"
PARAMETERS = f"{PROVIDERS}."
_REFERENCE = re.compile(r"\$\{([^}]*?):(([^}]*?):)?([^}]*?)\}")  # Kafka's ConfigTransformer
_FILE_BYTES_MAX = 1 << 20
_KAFKA_PACKAGE = "org.apache.kafka.common.config.provider."
_CLASSES = {
    f"{_KAFKA_PACKAGE}FileConfigProvider": "file",
    f"{_KAFKA_PACKAGE}EnvVarConfigProvider": "env",
    f"{_KAFKA_PACKAGE}DirectoryConfigProvider": "dir",
}
_PARAMETER_OF = {"file": "allowed.paths", "dir": "allowed.paths", "env": "allowlist.pattern"}
_REFERENCE_FORMS = {"file": "${%s:PATH:KEY}", "dir": "${%s:PATH:FILE}", "env": "${%s:NAME}"}
Parse = Callable[[str], Mapping[str, tuple[str, int]]]  # parses Java's .properties syntax


class Providers:
    """Resolves references with the configured providers. `settings`: name -> value of config.providers
    and config.providers.*. Raises ConfigError.
    """

    def __init__(self, settings: Mapping[str, str], environment: Mapping[str, str], parse: Parse) -> None:
        self._environment = environment
        self._parse = parse
        self._kinds: dict[str, str] = {}  # the provider's name -> file | env | dir
        self._restrictions: dict[str, str] = {}  # the provider's name -> allowed.paths or allowlist.pattern
        self.variables_used: set[str] = set()  # environment variables, since the last clear()
        names = [name.strip() for name in settings.get(PROVIDERS, "").split(",") if name.strip()]
        known_keys = {PROVIDERS}
        for name in names:
            known_keys |= self._declare(name, settings)
        if not names:
            self._kinds = {kind: kind for kind in _REFERENCE_FORMS}
        for key in settings:
            if key not in known_keys:
                raise ConfigError(f"{key} cannot be set: {PROVIDERS} lists no provider with such a setting", key)

    def _declare(self, name: str, settings: Mapping[str, str]) -> set[str]:
        """Adds the provider. Returns the names of its settings."""
        class_key = f"{PARAMETERS}{name}.class"
        class_name = settings.get(class_key, "").strip()
        if not class_name:
            raise ConfigError(f"{PROVIDERS} lists {name}, but {class_key} is not set", class_key)
        if class_name not in _CLASSES:
            raise ConfigError(
                f"{class_key} cannot be {class_name!r}: the broker loads no Java classes; only these are built in:"
                f" {', '.join(_CLASSES)}",
                class_key,
                class_name,
            )
        kind = self._kinds[name] = _CLASSES[class_name]
        parameter_key = f"{PARAMETERS}{name}.param.{_PARAMETER_OF[kind]}"
        if parameter_key in settings:
            self._restrictions[name] = settings[parameter_key].strip()
            if kind == "env":
                try:
                    re.compile(self._restrictions[name])
                except re.error as error:
                    raise ConfigError(f"{parameter_key} is not a regular expression: {error}", parameter_key) from None
        return {class_key, parameter_key}

    def resolve(self, text: str) -> str:
        """Replaces the references in `text`; references in the resulting values are not replaced.
        Raises ConfigError, which names the reference and never a value.
        """

        def replacement(match: re.Match[str]) -> str:
            kind = self._kinds.get(match[1])
            if kind is None:
                return match[0]
            try:
                return self._look_up(kind, match[1], match[3] or "", match[4])
            except OSError as error:
                raise ConfigError(f"{match[0]} cannot be read: {error.filename}: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ConfigError(f"{match[0]} cannot be read: {match[3]} is not UTF-8 text") from None
            except LookupError as error:
                raise ConfigError(f"{match[0]} cannot be resolved: {error.args[0]}") from None

        return _REFERENCE.sub(replacement, text)

    def _look_up(self, kind: str, name: str, path: str, key: str) -> str:
        if not key or bool(path) == (kind == "env"):
            raise LookupError(f"it must have the form {_REFERENCE_FORMS[kind] % name}")
        if kind == "env":
            return self._environment_variable(name, key)
        target = Path(path)
        if not self._may_read(name, target):
            raise LookupError(f"{path} is not below any of {PARAMETERS}{name}.param.allowed.paths")
        if kind == "dir":
            if "/" in key or not (target / key).is_file():
                raise LookupError(f"{path} has no file {key}")
            return _read_text(target / key)
        entries = self._parse(_read_text(target))
        if key not in entries:
            raise LookupError(f"{path} has no key {key}")
        return entries[key][0]

    def _environment_variable(self, name: str, key: str) -> str:
        pattern = self._restrictions.get(name)
        if pattern is not None and not re.fullmatch(pattern, key):
            raise LookupError(f"{PARAMETERS}{name}.param.allowlist.pattern does not allow it")
        if key not in self._environment:
            raise LookupError("the environment has no such variable")
        self.variables_used.add(key)
        return self._environment[key]

    def _may_read(self, name: str, target: Path) -> bool:
        """Whether the normalized path (without ..) is in one of allowed.paths, as in Kafka."""
        allowed = self._restrictions.get(name)
        if allowed is None:
            return True
        requested = Path(os.path.normpath(target))
        roots = [Path(os.path.normpath(root.strip())) for root in allowed.split(",") if root.strip()]
        return any(requested.is_relative_to(root) for root in roots)


def _read_text(file: Path) -> str:
    with file.open("rb") as opened:
        content = opened.read(_FILE_BYTES_MAX + 1)
    if len(content) > _FILE_BYTES_MAX:
        raise LookupError(f"{file} is larger than {_FILE_BYTES_MAX} bytes")
    return content.decode()
