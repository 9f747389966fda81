"""Names and text as they are written in SQL."""


def name(text: str) -> str:
    """A quoted identifier."""
    return '"' + text.replace('"', '""') + '"'


def quote(text: str) -> str:
    """A quoted string."""
    return "'" + text.replace("'", "''") + "'"
