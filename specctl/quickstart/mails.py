"""The narrow domain of quickstart: requests for a short e-mail, made from phrasings, people and matters.

Three sets that share no phrasing, no person and no matter: to train a draft on, to choose its best state and its length
by, and to measure on.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from random import Random

from specctl.prompts import Prompt
from specctl.text.messages import Message

CLASS = "mails"


@dataclass(frozen=True)
class Parts:
    """phrasings: with {who} and {what}, or {What} where the matter begins a sentence."""

    phrasings: tuple[str, ...]
    who: tuple[str, ...]
    what: tuple[str, ...]

    def prompts(self, name: str) -> list[Prompt]:
        """Every combination, in an order that mixes them and never changes."""
        mixed = list(product(self.phrasings, self.who, self.what))
        Random(name).shuffle(mixed)
        return [
            Prompt(id=f"{name}-{number}", class_=CLASS, messages=(Message("user", _written(phrasing, who, what)),))
            for number, (phrasing, who, what) in enumerate(mixed, 1)
        ]


def _written(phrasing: str, who: str, what: str) -> str:
    text = phrasing.format(who=who, what=what, What=what[0].upper() + what[1:])
    return text[0].upper() + text[1:]


TRAINING = Parts(
    phrasings=(
        "Write an email to {who} about {what}.",
        "Draft a short business email to {who}. The subject is {what}.",
        "Help me write a polite email to {who} about {what}.",
        "I need an email to {who}. It is about {what}.",
        "Write a professional letter to {who} regarding {what}.",
        "Compose an email in which I tell {who} about {what}.",
        "{What}: write the email that I send to {who}.",
        "Please help me with a formal email to {who} because of {what}.",
        "What would a good email to {who} about {what} look like? Write it for me.",
        "Give me the text of an email to {who}; the topic is {what}.",
    ),
    who=(
        "a customer",
        "our supplier",
        "a hotel guest",
        "my landlord",
        "a job applicant",
        "the school office",
        "a new client",
        "our accountant",
        "the neighbours",
        "a conference speaker",
        "the building manager",
        "a former colleague",
        "the sales team",
        "my professor",
        "a travel agency",
        "the bank",
    ),
    what=(
        "an order that will arrive late",
        "a meeting on Monday",
        "a quick payment",
        "an invoice that is still open",
        "a quote for new chairs",
        "a lost parcel",
        "a wrong bill",
        "the summer party",
        "a change of the opening hours",
        "a copy of the contract",
        "a repair of the heating",
        "a cancelled booking",
        "a discount on the next purchase",
        "a missing signature",
        "a move to a new office",
        "feedback on a draft",
        "a water leak in the kitchen",
        "a call next week",
        "a refund for a broken lamp",
        "a deadline in June",
        "a welcome to the team",
        "new rules for parking",
        "two days of holiday",
        "a price increase in spring",
        "a young engineer whom I recommend",
        "the minutes of a discussion",
        "a training course",
        "a damaged bicycle",
        "a change of address",
        "a visit to the factory",
    ),
)

VALIDATION = Parts(
    phrasings=(
        "Could you write an e-mail to {who} for me? It should cover {what}.",
        "Prepare a kind email to {who}. Topic: {what}.",
        "Formulate an email for {who} with regard to {what}.",
        "Make a short email out of this: to {who}, on the subject of {what}.",
    ),
    who=("the dentist", "a museum", "our lawyer", "a car dealer"),
    what=(
        "a stolen laptop",
        "the guest list",
        "a certificate",
        "a spare room",
        "an apology for the noise",
        "a delivery of flowers",
    ),
)

HELD_OUT = Parts(
    phrasings=(
        "Please set up a friendly email for {who} concerning {what}.",
        "Can you write a mail for me? The recipient is {who} and the reason is {what}.",
        "Write {who} a courteous email on the matter of {what}.",
        "I want to inform {who} by email: {what}. Write the complete email.",
        "Create a brief email, addressed to {who}, on {what}.",
    ),
    who=(
        "a library",
        "our web designer",
        "a tax adviser",
        "the football club",
        "an insurance company",
        "a private teacher",
        "the town hall",
        "a photographer",
    ),
    what=(
        "a printer that does not work",
        "a workshop in October",
        "some excellent samples",
        "forty extra badges",
        "keys left at reception",
        "an unanswered phone call",
        "a fence that needs paint",
        "sold-out concert tickets",
        "an error in the report",
        "lunch at noon",
        "a new password",
        "an extension of the lease",
    ),
)
