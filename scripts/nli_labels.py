"""Labels of pairs of sentences, by name or by number, as the numbers of the classes."""

from typing import Any

from datasets import ClassLabel, Dataset

from six_encoders import CLASSES

UNLABELLED = -1


def label_numbers(rows: Dataset, name: str) -> list[int]:
    """The class of each row; ``UNLABELLED`` where the label is missing, -1, empty or "-" (as in SNLI).

    Args:
        rows: Pairs with a column ``label``.
        name: Of the split, for messages.

    Raises:
        ValueError: If a label is none of the classes.
    """
    labels, feature = list(rows["label"]), rows.features["label"]
    if isinstance(feature, ClassLabel):
        labels = [feature.names[label] if label is not None and label >= 0 else None for label in labels]
    return [_number(label, f"Row {row} of {name}") for row, label in enumerate(labels)]


def _number(label: Any, where: str) -> int:
    if label is None or label != label:  # NaN: a missing number in a csv file
        return UNLABELLED
    if isinstance(label, float) and label.is_integer():  # numbers of a csv file in which some are missing
        label = int(label)
    text = str(label).strip().lower()
    if text in {"", "-", "-1"}:
        return UNLABELLED
    if text in CLASSES:
        return CLASSES.index(text)
    if text in {str(number) for number in range(len(CLASSES))}:
        return int(text)
    numbers = ", ".join(f"{number} ({name})" for number, name in enumerate(CLASSES))
    raise ValueError(
        f"{where} has label={label!r}, which is no class. Needed: {', '.join(CLASSES)}, or their numbers {numbers}; "
        f"unlabelled pairs have -1 or nothing. For example label={CLASSES[1]}."
    )
