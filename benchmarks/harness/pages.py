"""Tables of a page that are written from rows of csv files, each between two comments that name it."""

from collections.abc import Callable


def with_tables(text: str, tables: dict[str, Callable[[], str]]) -> str:
    """``text`` with new tables between its comments.

    Raises:
        ValueError: If it has no place for any table.
    """
    found = [name for name in tables if f"<!-- {name} table: begin -->" in text]
    if not found:
        name = next(iter(tables))
        raise ValueError(f"no place for a table. Put in <!-- {name} table: begin --> and <!-- {name} table: end -->.")
    for name in found:
        begin, end = f"<!-- {name} table: begin -->\n", f"<!-- {name} table: end -->"
        above, _, rest = text.partition(begin)
        _, closed, below = rest.partition(end)
        if not closed:
            raise ValueError(f"{begin.strip()} has no {end} below it. Put it on a line of its own below the table.")
        text = f"{above}{begin}\n{tables[name]()}\n\n{end}{below}"
    return text
