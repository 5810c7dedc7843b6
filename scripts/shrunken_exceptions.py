"""Data for ``shrunken_configs.py``: settings that its rules on names do not find out, by model type."""

from typing import Any

__all__ = ["EXCEPTIONS", "INPUT_SIZES", "NEEDED"]

NEEDED: dict[str, dict[str, Any]] = {
    # without these the default config itself is refused
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
}
INPUT_SIZES: dict[str, dict[str, int]] = {}
"""Sizes of inputs under the names that ``architecture_inputs.py`` asks for."""
EXCEPTIONS: dict[str, dict[str, Any]] = {}
