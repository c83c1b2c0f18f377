"""A report as text: its table, and below it a line for each thing that the table does not show."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pytest_kvmock.report.figures import figure_text

_LOSE: Final = ("crash", "restart")
"""The incidents by which requests are lost."""


class MissedAbort(NamedTuple):
    """An abort that did not happen.

    Attributes:
        ms: when it was to, in virtual milliseconds; of one that waited for tokens, when its request was over.
        number: which request was to be called off, by the order of arrival.
        kind: "abort".
    """

    ms: float
    number: int
    kind: str = "abort"

    def __str__(self) -> str:
        return f"request {self.number} was not called off at {self.ms:g} ms: it was over by then, or had not arrived"


def report_text(report: Any, about: str) -> str:
    """Return a `Report` as it is printed.

    Args:
        report: the report.
        about: what it is of, for the first line.
    """
    rows = report.printed_rows()
    text = {name: figure_text(value) for name, value in rows[None].items()}
    parts = [f"{type(report).__name__}: {about}", report.table(rows)]
    if report.router:
        parts.append(
            f"ideal hit ratio {text['ideal_hit_ratio']} ({text['of_ideal']} of it); greatest worker over mean: requests {text['balance_requests']}, "
            f"prompt tokens computed {text['balance_prompt_tokens']}, open requests at picks {text['balance_open_requests']}"
        )
    if lacking := report.lacking() if report.router else {}:
        shown = ", ".join(f"{caches} lacked {blocks}" for caches, blocks in lacking.items())
        parts.append(
            f"of {text['promised_not_found']} blocks promised and not found the attention group had {sum(lacking.values())}: {shown}"
        )
    if report.facts.held_before:
        parts.append(
            f"the engines held {report.facts.held_before} blocks before this run: their hits count, and the ideal knows none of them"
        )
    missed = [each for each in report.missed if isinstance(each, MissedAbort)]
    parts += [
        f"{each.ms:g} ms: {each.kind} of worker {each.worker!r}" + (f", {each.lost} lost" if each.kind in _LOSE else "")
        for each in report.incidents
    ]
    parts += [
        f"the run ended before {each.ms:g} ms: no {each.kind} of worker {each.worker!r}"
        for each in report.missed
        if not isinstance(each, MissedAbort)
    ]
    if report.router and report.aborted:
        parts.append(f"{report.aborted} of {report.arrived} requests were called off")
    if missed:
        parts.append(
            f"{len(missed)} aborts did not happen; the first: {missed[0]}" if len(missed) > 1 else str(missed[0])
        )
    parts += filter(None, (report.facts.nobody_text, *map(str, report.beliefs or ())))
    if report.event_errors:
        parts.append(f"errors of events: {len(report.event_errors)}")
    return "\n".join(parts)
