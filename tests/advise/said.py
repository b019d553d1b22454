"""What the command says of an advice."""

from kvoffload.advise.findings import findings
from kvoffload.advise.subject import Subject
from kvoffload.advise.verdicts import headline


def verdict(advice, **context):
    return headline(Subject(advice, **context))


def said(advice, **context):
    """Return the findings by title, in their order."""
    return {finding.title: finding.text for finding in findings(Subject(advice, **context))}
