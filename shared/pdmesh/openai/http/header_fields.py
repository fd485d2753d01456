"""Numbers in header fields, which come from anybody: bytes are read as Latin-1, and whatever is no number is none."""

# As many as an int64 has; longer ones are no header's business, and Python refuses to parse very long ones.
MAX_DIGITS = 19
INT64_MAX = (1 << 63) - 1


def decimal(text: str) -> int | None:
    """Parse ASCII digits with an optional minus as an int64; None for anything else (`str.isdigit` also takes "²")."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > MAX_DIGITS:
        return None
    number = int(text)
    return number if -INT64_MAX <= number <= INT64_MAX else None
