"""A validation as people and CI systems read it: terminal, markdown, JUnit XML. Only here are words laid out."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from specctl.schemas.validation import Check, GateResult, Validation

MARKS = {"pass": "pass", "fail": "FAIL", "no-data": "NO DATA"}

# What XML 1.0 cannot hold, not even escaped.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def closing(validation: Validation) -> str:
    """What a person wants to know at the end: every gate, what it measured against what, and what to do."""
    width = max(len(gate.name) for gate in validation.gates)
    lines = []
    for gate in validation.gates:
        for number, check in enumerate(gate.checks):
            head = f"{MARKS[gate.status]:<7}  {gate.name:<{width}}" if number == 0 else " " * (9 + width)
            lines.append(f"{head}  {_said(check, gate)}")
        if gate.remedy is not None:
            lines.append(f"{' ' * (9 + width)}  -> {gate.remedy}")
    return "\n".join([*lines, "", verdict(validation), ""])


def verdict(validation: Validation) -> str:
    """One sentence, naming what did not pass."""
    gates = validation.gates
    if validation.passed:
        return f"{len(gates)} of {len(gates)} gates passed"
    bad = [f"{gate.name} ({MARKS[gate.status].lower()})" for gate in gates if gate.status != "pass"]
    return f"{len(bad)} of {len(gates)} gates did not pass: {', '.join(bad)}"


def markdown(validation: Validation) -> str:
    return "\n".join(_page(validation))


def _page(validation: Validation) -> Iterator[str]:
    origin = validation.provenance
    yield "# Validation\n"
    yield f"**{verdict(validation)}**\n"
    yield "| | gate | measured, and against what | what to do |"
    yield "| --- | --- | --- | --- |"
    for gate in validation.gates:
        found = "<br>".join(_cell(_said(check, gate)) for check in gate.checks)
        yield f"| {MARKS[gate.status]} | {gate.name} | {found} | {_cell(gate.remedy or '')} |"
    yield ""
    for what, source in (("Judged", validation.results), ("Compared with", validation.baseline)):
        if source is not None:
            yield f"{what}: {source.file} (sha256 {source.sha256[:12]})\n"
    threads = "" if origin.threads is None else f", {origin.threads} threads"
    where = f", {origin.device}{threads}" if validation.results is None else ""
    yield f"specctl {origin.specctl}, torch {origin.torch}{where}, {origin.date}"
    yield f"\n    {origin.command}\n"


def junit(validation: Validation) -> str:
    """One test case a gate; a gate without data is an error, not a failure."""
    counts = {status: sum(gate.status == status for gate in validation.gates) for status in ("fail", "no-data")}
    totals = f'tests="{len(validation.gates)}" failures="{counts["fail"]}" errors="{counts["no-data"]}"'
    suite = f'name="specctl validate" {totals} skipped="0" timestamp={quoteattr(validation.provenance.date)}'
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', f"<testsuites {totals}>", f"  <testsuite {suite}>"]
    for gate in validation.gates:
        lines += _case(gate)
    return "\n".join([*lines, "  </testsuite>", "</testsuites>", ""])


def _case(gate: GateResult) -> Iterator[str]:
    text = "\n".join(f"{check.status}: {_said(check, gate)}" for check in gate.checks)
    yield f'    <testcase classname="specctl.validate" name={_attribute(gate.name)} time="0">'
    if gate.status != "pass":
        tag, first = ("failure", "fail") if gate.status == "fail" else ("error", "no-data")
        message = next(_said(check, gate) for check in gate.checks if check.status == first)
        body = f"{text}\nWhat to do: {gate.remedy}"
        yield f'      <{tag} type="{gate.status}" message={_attribute(message)}>{_text(body)}</{tag}>'
    else:
        yield f"      <system-out>{_text(text)}</system-out>"
    yield "    </testcase>"


def _said(check: Check, gate: GateResult) -> str:
    """The sentence with its subject, where that is not the gate itself."""
    subject = " of ".join(part for part in (check.figure, check.run) if part not in (None, gate.name))
    told = f"{subject}: {check.says}" if subject else check.says
    return told if check.status == gate.status else f"[{MARKS[check.status]}] {told}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def _attribute(text: str) -> str:
    return quoteattr(_NOT_XML.sub("?", " ".join(text.split())))


def _text(text: str) -> str:
    return escape(_NOT_XML.sub("?", text))
