"""Files in Java's .properties syntax."""

import re


def _unescape(text: str) -> str:
    special = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}
    return re.sub(
        r"\\(u[0-9a-fA-F]{4}|.)", lambda m: chr(int(m[1][1:], 16)) if len(m[1]) == 5 else special.get(m[1], m[1]), text
    )


def parse_properties(text: str) -> dict[str, tuple[str, int]]:
    """Java's .properties syntax: name -> (value, line number from 1). A later line wins. Source:
    java.util.Properties.load.
    """
    properties: dict[str, tuple[str, int]] = {}
    lines = text.splitlines()
    index = 0
    while index < len(lines):
        number, line = index + 1, lines[index].lstrip()
        index += 1
        if not line or line[0] in "#!":
            continue
        # an odd number of trailing backslashes continues the line
        while (len(line) - len(line.rstrip("\\"))) % 2:
            line = line[:-1] + (lines[index].lstrip() if index < len(lines) else "")
            index += 1
        match = re.match(r"((?:\\.|[^\\=:\s])*)\s*[=:]?\s*(.*)", line, re.DOTALL)
        assert match is not None  # every part may be empty
        properties[_unescape(match[1])] = (_unescape(match[2]).strip(), number)
    return properties
