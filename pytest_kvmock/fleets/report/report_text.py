"""A report as text: its table, followed by a line for each fact that the table lacks."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from pytest_kvmock.fleets.report.figures import figure_text

_LOSE: Final = ("crash", "restart")
"""The incidents that lose requests."""


class MissedAbort(NamedTuple):
    """An abort that did not happen.

    Attributes:
        ms: its planned time, in virtual milliseconds; for an abort after tokens, when its request was over.
        number: the request of the abort, by the order of arrival.
        kind: "abort".
    """

    ms: float
    number: int
    kind: str = "abort"

    def __str__(self) -> str:
        return f"request {self.number} was not called off at {self.ms:g} ms: it was over by then, or had not arrived"


def role_lines(report: Any) -> list[str]:
    """Return a line for each role of P/D pairs."""
    return [
        f"{name} (worker{'s' * (len(role.workers) != 1)} {', '.join(map(repr, role.workers))}): {role}"
        for name, role in (report.roles or {}).items()
    ]


def report_text(report: Any, about: str) -> str:
    """Return the printed text of a `Report`.

    Args:
        report: the report.
        about: its subject, for the first line.
    """
    rows = report.run.printed_rows()
    text = {name: figure_text(value) for name, value in rows[None].items()}
    parts = [f"{type(report).__name__}: {about}", report.run.table(rows)]
    if report.router:
        parts.append(
            f"ideal hit ratio {text['ideal_hit_ratio']} ({text['of_ideal']} of it); greatest worker over mean: "
            f"requests {text['balance_requests']}, prompt tokens computed {text['balance_prompt_tokens']}, open "
            f"requests at picks {text['balance_open_requests']}"
        )
    if lacking := report.lacking() if report.router else {}:
        shown = ", ".join(f"{caches} lacked {blocks}" for caches, blocks in lacking.items())
        parts.append(
            f"of {text['promised_not_found']} blocks promised and not found the attention group had "
            f"{sum(lacking.values())}: {shown}"
        )
    parts += role_lines(report)
    if report.run.facts.held_before:
        parts.append(
            f"the engines held {report.run.facts.held_before} blocks before this run: their hits count, and the "
            "ideal does not include them"
        )
    missed = [each for each in report.missed if isinstance(each, MissedAbort)]
    parts += [
        f"{each.ms:g} ms: {each.kind} of worker {each.worker!r}" + (f", {each.lost} lost" if each.kind in _LOSE else "")
        for each in report.run.incidents
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
    parts += filter(None, (report.run.facts.nobody_text, *map(str, report.beliefs or ())))
    if report.run.event_errors:
        parts.append(f"errors of events: {len(report.run.event_errors)}")
    return "\n".join(parts)
