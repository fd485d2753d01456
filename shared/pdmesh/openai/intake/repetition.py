"""`repetition_detection`: when an output that goes round in circles is ended."""

from pdmesh.openai.intake.refusal import refuse
from pdmesh.openai.schemas.generation import RepetitionBody
from pdmesh.protocol.messages import RepetitionDetection

FIELD = "repetition_detection"
MAX_SIZE = (1 << 31) - 1


def resolve_repetition(body: RepetitionBody | None) -> RepetitionDetection | None:
    """Check the field with vLLM's ranges; `max_pattern_size` 0 is off. Raises InvalidRequest."""
    if body is None:
        return None
    largest, smallest, count = body.max_pattern_size or 0, body.min_pattern_size or 0, body.min_count or 0
    for name, value in (("max_pattern_size", largest), ("min_pattern_size", smallest), ("min_count", count)):
        if not 0 <= value <= MAX_SIZE:
            refuse(FIELD, f"{FIELD}.{name} must be between 0 and {MAX_SIZE}, got {value}.", value)
    if smallest > largest:
        refuse(FIELD, f"{FIELD}.min_pattern_size must be at most max_pattern_size={largest}, got {smallest}.", smallest)
    if not largest:
        return None
    if count < 2:
        refuse(FIELD, f"{FIELD}.min_count must be at least 2 (max_pattern_size 0 is off), got {count}.", count)
    return RepetitionDetection(max_pattern_size=largest, min_pattern_size=smallest, min_count=count)
