"""Find which column plays which role: by a flag, or by its usual names. Imports no torch."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rapidformer.config.schema import to_flag
from rapidformer.data.folders import get_split_name
from rapidformer.errors import DataError, list_first
from rapidformer.nearest import find_nearest


@dataclass(frozen=True)
class ColumnRole:
    """A role that a column plays in a task."""

    name: str
    setting: str
    """The name of the setting that names the column, such as ``text_column``."""
    holds: str
    candidates: tuple[str, ...]
    required: bool = True

    @property
    def flag(self) -> str:
        return to_flag(self.setting)


def as_optional(role: ColumnRole) -> ColumnRole:
    """The same role, made optional."""
    return replace(role, required=False)


def find_column(
    role: ColumnRole, available: Sequence[str], args: object, taken: Sequence[str | None] = ()
) -> str | None:
    """The column for the role; None if it is optional and missing. Those ``taken`` have others."""
    column = getattr(args, role.setting)
    if column is not None:
        return check_given(column, role.flag, available)
    free = [name for name in available if name not in taken]
    by_lower = {name.lower(): name for name in free}
    match = next((name for name in role.candidates if name in free), None)
    if match is None:
        match = next((by_lower[name] for name in role.candidates if name in by_lower), None)
    if match is None and role.required:
        raise DataError(describe_missing([role], available, taken))
    return match


def find_columns(
    roles: Sequence[ColumnRole], available: Sequence[str], args: object
) -> dict[str, str]:
    """The columns of all required roles, which choose in order; reports all that is missing."""
    columns: dict[str, str] = {}
    missing: list[ColumnRole] = []
    problems: list[str] = []
    for role in roles:
        try:
            columns[role.name] = str(find_column(role, available, args, list(columns.values())))
        except DataError as error:
            if getattr(args, role.setting) is None:
                missing.append(role)
            else:
                problems.append(str(error))
    if missing:
        problems.append(describe_missing(missing, available, list(columns.values())))
    if problems:
        raise DataError(" ".join(problems))
    return columns


def check_given(column: str, flag: str, available: Sequence[str]) -> str:
    """The column that the user named, if it exists."""
    if column in available:
        return column
    near = find_nearest(column, available)
    hint = f" Did you mean {flag} {shlex.quote(near)}?" if near else ""
    raise DataError(
        f"{flag} {column}: the data has no such column. It has {_listed(available)}.{hint}"
    )


def describe_missing(
    roles: Sequence[ColumnRole], available: Sequence[str], taken: Sequence[str | None] = ()
) -> str:
    """One message for all the roles without a column; those ``taken`` have other roles."""
    only = available[0] if len(available) == 1 else ""
    if separator := next((sign for sign in ";\t|" if sign in only), None):
        return (
            f"The data has one column, {only!r}: it seems to be separated by {separator!r}. "
            "Separate its columns by commas, or by tabs in a .tsv file."
        )
    if available and all(map(get_split_name, available)):
        return (
            f"The data holds splits ({', '.join(available)}), not rows: write each to a file of "
            "its own, named after it."
        )
    parts, hints = [], []
    free = [name for name in available if name not in taken]
    has_enough = len(free) >= len(roles)
    for role in roles:
        known = list_first(role.candidates, 6)
        parts.append(f"no column with {role.holds} was found (tried {known})")
        alike = (find_nearest(known, free) for known in role.candidates)
        near = next((name for name in alike if name), None)
        if near is not None:
            free.remove(near)
        hints.append(f"{role.flag} {shlex.quote(near) if near else 'NAME'}")
    text = " and ".join(parts)
    start, flags = f"{text[0].upper()}{text[1:]}", " and ".join(hints)
    if not has_enough:
        return (
            f"{start}. The data has only {_listed(available)}: `rapidformer tasks NAME` shows what "
            "a task needs."
        )
    return f"{start}. The data has {_listed(available)}: name it with {flags}."


def _listed(available: Sequence[str]) -> str:
    if not available:
        return "no columns"
    word = "the column" if len(available) == 1 else "the columns"
    return f"{word} {', '.join(available)}"
