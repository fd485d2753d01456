"""Text and token ids."""

from pdmesh.openai.text.detokenizer import Detokenizer
from pdmesh.openai.text.load import load_text_model
from pdmesh.openai.text.model import TextModel
from pdmesh.openai.text.stop_strings import Scanned, StopScanner, StopStrings

__all__ = ["Detokenizer", "Scanned", "StopScanner", "StopStrings", "TextModel", "load_text_model"]
