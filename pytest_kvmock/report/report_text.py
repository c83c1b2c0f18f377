"""A report as text: its table, and below it a line for each thing that the table does not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from pytest_kvmock.report.figures import figure_text

if TYPE_CHECKING:
    from pytest_kvmock.report.rows import Happened


def report_text(report: Any, about: str) -> str:
    """Return a `Report` as it is printed.

    Args:
        report: the report.
        about: what it is of, for the first line.
    """
    rows = report.rows()
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
    if report.held_before:
        parts.append(
            f"the engines held {report.held_before} blocks before this run: their hits count, and the ideal knows none of them"
        )
    parts += _happened(report.incidents, report.missed)
    if report.router and report.aborted:
        parts.append(f"{report.aborted} of {report.arrived} requests were called off")
    parts += _not_called_off([each for each in report.missed if each.request is not None])
    parts += map(str, report.beliefs or ())
    if report.event_errors:
        parts.append(f"errors of events: {len(report.event_errors)}")
    return "\n".join(parts)


def _happened(incidents: Iterable[Happened], missed: Iterable[Happened]) -> Iterator[str]:
    """Lines on what happened to workers, and on what did not."""
    for each in incidents:
        yield f"{each.ms:g} ms: {each.kind} of worker {each.worker!r}, {each.lost} lost"
    for each in missed:
        if each.request is None:
            yield f"the run ended before {each.ms:g} ms: no {each.kind} of worker {each.worker!r}"


def _not_called_off(missed: Sequence[Happened]) -> Iterator[str]:
    """A line on the aborts that did not happen, if there are any."""
    if missed:
        first, more = missed[0], f", and {len(missed) - 1} more" if len(missed) > 1 else ""
        yield f"request {first.request} was not called off at {first.ms:g} ms: it was over by then, or had not arrived{more}"
