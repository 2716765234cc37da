"""Plain decimal numbers as text, compared exactly and without converting them."""

from __future__ import annotations

import re

# Only ASCII digits: Python's \d and int() also take other scripts' digits and would equate them silently.
_NUMBER = re.compile(r"([+-]?)([0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.([0-9]*))?")


def canonical_number(text: str) -> str | None:
    """The one spelling of a plain decimal number: "+1,048.50" gives "1048.5"; None if the text is none.

    No int() or float(): Python refuses to convert integers of more than 4300 digits, and floats round.
    """
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, fraction = match.groups()
    if not whole and not fraction:
        return None
    whole = (whole or "").replace(",", "").lstrip("0") or "0"
    fraction = (fraction or "").rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if sign == "-" and number != "0" else number
